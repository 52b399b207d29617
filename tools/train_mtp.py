"""Train the head of the embedded model that predicts draft tokens (multi-token prediction), and add it to its weights.

    python tools/train_mtp.py [--work build/train_mtp] [--steps N]

Needs what `train_tiny.py` needs, and the embedded model. The model stays unchanged; the head learns its predictions on
the same text. A run that was interrupted continues from the checkpoint in --work.

The head has the layout that Qwen3-Next and Qwen3.5 publish: row i joins the embedding of token i and the model's hidden
state at token i - 1, and predicts token i + 1 through one layer and the model's output projection. To predict further
tokens, its own output takes the place of the model's hidden state. It is trained for UNROLLED tokens in this way.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from train_tiny import CHECKPOINT_SECONDS, REPORT_EVERY, ROOT, SEED, batch_at, collect, rate, split
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

EMBEDDED = ROOT / "src" / "quire" / "embedded"
INNER = 384  # of its feed-forward: with it the head has 0.59 million parameters
STEPS, UNROLLED, DECAY = 1500, 3, 0.8  # DECAY: weight of each further token's loss
WINDOWS = 8  # of a step; half of what train_tiny.py takes
MUON_RATE, ADAM_RATE = 4e-3, 4e-3


class Head(nn.Module):
    """The head, under the names of the published layout."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        own = LlamaConfig.from_dict(config.to_dict() | {"intermediate_size": INNER, "num_hidden_layers": 1})
        own._attn_implementation = "sdpa"
        size, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.layers = nn.ModuleList([LlamaDecoderLayer(own, 0)])
        self.norm = LlamaRMSNorm(size, eps)
        self.rotary = LlamaRotaryEmbedding(own)

    def forward(self, embedded: Tensor, before: Tensor) -> Tensor:
        """Return the hidden states after the final norm: [B, T, H]."""
        joined = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(before)], -1))
        positions = torch.arange(embedded.shape[1])[None]
        angles = self.rotary(joined, positions)
        made: Tensor = self.norm(self.layers[0](joined, position_embeddings=angles, position_ids=positions))
        return made


def shifted(hidden: Tensor) -> Tensor:
    """Return the state before each token: zeros before the first."""
    return F.pad(hidden[:, :-1], (0, 0, 1, 0))


def losses(model: LlamaForCausalLM, head: Head, ids: Tensor) -> tuple[Tensor, list[float]]:
    """Return the loss, and for each draft token the share of positions at which it is the model's own choice."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            hidden = model.model(ids, use_cache=False).last_hidden_state
            wanted = model.lm_head(hidden).float().log_softmax(-1)
            embedded = model.model.embed_tokens(ids)
        before, total, agreed = shifted(hidden), torch.zeros(()), []
        for k in range(UNROLLED):
            made = head(embedded, before)
            logits = model.lm_head(made).float().log_softmax(-1)[:, k:]
            target = wanted[:, k:]
            total = total + DECAY**k * F.kl_div(logits.flatten(0, 1), target.flatten(0, 1), log_target=True,
                                                reduction="batchmean")  # fmt: skip
            agreed.append((logits.argmax(-1) == target.argmax(-1)).float().mean().item())
            before = shifted(made)
    return total, agreed


def make_optimizers(head: Head) -> list[torch.optim.Optimizer]:
    matrices = [p for p in head.parameters() if p.ndim == 2]
    norms = [p for p in head.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(norms, betas=(0.9, 0.95), weight_decay=0.0)]


def train(model: LlamaForCausalLM, head: Head, stream: Tensor, steps: int, path: Path) -> list[float]:
    """Train up to `steps`, from the checkpoint at `path` if it exists. Return the shares of agreement at the end."""
    optimizers, step = make_optimizers(head), 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        head.load_state_dict(state["head"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        step = state["step"]
    smooth, started = [0.0] * UNROLLED, time.monotonic()
    last_saved = started
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("training", total=steps, completed=step)
        while step < steps:
            for optimizer, peak in zip(optimizers, (MUON_RATE, ADAM_RATE), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = peak * rate(step, steps)
            loss, agreed = losses(model, head, batch_at(stream, step, 10 * steps)[:WINDOWS])
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            smooth = agreed if step == 1 else [0.98 * a + 0.02 * b for a, b in zip(smooth, agreed, strict=True)]
            progress.update(task, completed=step)
            if step % REPORT_EVERY == 0:
                shares = ", ".join(f"{share:.3f}" for share in smooth)
                seconds = time.monotonic() - started
                progress.console.print(f"step {step}, {seconds:.0f} s: loss {loss.item():.3f}, agreement {shares}",
                                       soft_wrap=True)  # fmt: skip
            if step == steps or time.monotonic() - last_saved > CHECKPOINT_SECONDS:
                state = {"step": step, "head": head.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
                torch.save(state, beside := path.with_suffix(".part"))
                os.replace(beside, path)
                last_saved = time.monotonic()
    return smooth


def export(head: Head, out: Path) -> None:
    """Add the head to the model's weights, and its number of layers to config.json."""
    weights = out / "model.safetensors"
    with safe_open(weights, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if not name.startswith("mtp.")}  # noqa: SIM118
    own = {f"mtp.{name}": tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors | own, beside := weights.with_suffix(".part"), {"format": "pt"})
    os.replace(beside, weights)
    config = json.loads((out / "config.json").read_text())
    config["mtp_num_hidden_layers"], config["mtp_intermediate_size"] = 1, INNER
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model's head for draft tokens.")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "train_mtp", help="holds the checkpoint")
    parser.add_argument("--out", type=Path, default=EMBEDDED)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    texts, _ = split(collect(Path(sysconfig.get_paths()["stdlib"])))
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    stream = torch.tensor(
        [id for text in texts.values() for id in [0, *tokenizer.encode(text, add_special_tokens=False).ids]]
    )
    model = LlamaForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).requires_grad_(False)
    torch.manual_seed(SEED)
    head = Head(model.config)
    print(f"{sum(p.numel() for p in head.parameters()):,} parameters")
    train(model, head, stream, options.steps, options.work / "checkpoint.pt")
    export(head, options.out)


if __name__ == "__main__":
    main()
