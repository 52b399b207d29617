"""An engine in a hundred lines, on the operators alone: paged cache, continuous batching, greedy decoding.
What a real one adds (chunked prefill, preemption, a prefix cache, sampling) changes who is in `batch`, not `step`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import linear

import quire
from quire import ops

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQS = 16, 40, 3


@dataclass
class Sequence:
    """Tokens, and the blocks that hold the K and V of those that are computed."""

    tokens: list[int]
    budget: int  # tokens still to generate
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Model:
    """A Llama: tokens of many sequences in, logits of each one's last token out."""

    def __init__(self, path: Path) -> None:
        """Read the weights, and make room for each layer's K and V: [N, Hkv, B, D]."""
        c = json.loads((path / "config.json").read_text())
        self.weights = {name: x.float() for name, x in load_file(path / "model.safetensors").items()}
        self.dim, self.eps = c["head_dim"], c["rms_norm_eps"]
        self.backend = ops.load("auto")
        heads = {"num_heads": c["num_attention_heads"], "num_kv_heads": c["num_key_value_heads"], "head_dim": self.dim}
        self.spec = ops.AttentionSpec(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, dtype=torch.float32, **heads)
        shape = (c["num_hidden_layers"], NUM_BLOCKS, c["num_key_value_heads"], BLOCK_SIZE, self.dim)
        self.cache = [ops.PagedKV(k, v) for k, v in zip(torch.empty(shape), torch.empty(shape), strict=True)]
        frequencies = c["rope_parameters"]["rope_theta"] ** (-torch.arange(0, self.dim, 2) / self.dim)
        angles = torch.arange(c["max_position_embeddings"])[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def step(self, batch: list[Sequence]) -> torch.Tensor:
        """Compute the tokens of each sequence that are not computed yet: logits [S, V]."""
        new = [len(s.tokens) - s.computed for s in batch]
        ids = torch.tensor([token for s in batch for token in s.tokens[s.computed :]])
        positions = torch.tensor([p for s in batch for p in range(s.computed, len(s.tokens))])
        homes = [s.blocks[p // BLOCK_SIZE] for s in batch for p in range(s.computed, len(s.tokens))]
        width = max(len(s.blocks) for s in batch)
        plan = self.backend.plan(
            self.spec,
            query_starts=torch.tensor([0, *new]).cumsum(0),
            context_lens=torch.tensor([len(s.tokens) for s in batch]),
            block_tables=torch.tensor([s.blocks + [-1] * (width - len(s.blocks)) for s in batch]),
            slots=torch.tensor(homes) * BLOCK_SIZE + positions % BLOCK_SIZE,
        )
        w, b, x = self.weights, self.backend, self.weights["model.embed_tokens.weight"][ids]
        for i, kv in enumerate(self.cache):
            at = f"model.layers.{i}."
            h = b.rms_norm(x, w[at + "input_layernorm.weight"], self.eps)
            q, k, v = (linear(h, w[f"{at}self_attn.{n}_proj.weight"]).view(len(ids), -1, self.dim) for n in "qkv")
            b.rope(q, k, positions, self.cos, self.sin)
            b.write_kv(k, v, kv, plan)
            x = x + linear(b.attention(q, kv, plan).flatten(1), w[at + "self_attn.o_proj.weight"])
            h = b.rms_norm(x, w[at + "post_attention_layernorm.weight"], self.eps)
            gate_up = torch.cat([linear(h, w[f"{at}mlp.{n}_proj.weight"]) for n in ("gate", "up")], dim=-1)
            x = x + linear(b.swiglu(gate_up), w[at + "mlp.down_proj.weight"])
        last = b.rms_norm(x[torch.tensor(new).cumsum(0) - 1], w["model.norm.weight"], self.eps)
        return linear(last, w["model.embed_tokens.weight"])


def generate(model: Model, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations. Sequences join and leave between steps; each owns the blocks that its tokens need."""
    sequences = [Sequence(list(prompt), max_tokens) for prompt in prompts]
    free, waiting, running = list(range(NUM_BLOCKS)), list(sequences), list[Sequence]()
    while waiting or running:
        running += [waiting.pop(0) for _ in range(min(len(waiting), MAX_SEQS - len(running)))]
        for s in running:
            s.blocks += [free.pop() for _ in range(-(-len(s.tokens) // BLOCK_SIZE) - len(s.blocks))]
        for s, token in zip(running, model.step(running).argmax(-1).tolist(), strict=True):
            s.computed, s.budget = len(s.tokens), s.budget - 1
            s.tokens.append(token)
        free += [block for s in running if not s.budget for block in s.blocks]
        running = [s for s in running if s.budget]
    return [s.tokens[len(prompt) :] for s, prompt in zip(sequences, prompts, strict=True)]


if __name__ == "__main__":
    path = Path(quire.__file__).parent / "embedded"
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    texts = ["import os\n", "def main(argv):\n", "class Stack:\n", "for i in range("]
    prompts = [tokenizer.encode(text).ids for text in texts]
    for text, answer in zip(texts, generate(Model(path), prompts, 16), strict=True):
        print(repr(text + tokenizer.decode(answer)))
