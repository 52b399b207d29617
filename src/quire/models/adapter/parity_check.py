"""The trial of a transformers model before it is served: a small copy must give the same results as eager attention.

A config does not show how the model's code handles masks, windows, positions or a cache. So a model of the same type,
with random weights and small layers, computes a mixed batch of prompts, chunks of prompts and single tokens, and each
sequence alone with eager attention. The logits of both must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.cache.storage import KVCache, group_spec
from quire.errors import Unsupported
from quire.models.adapter.model import AdaptedModel
from quire.models.adapter.per_sequence import Apart
from quire.models.adapter.ragged import Together
from quire.models.adapter.toy_model import VOCAB, shrink
from quire.ops import Backend

BLOCK_SIZE, MAX_LEN = 4, 16
TOLERANCE = 1e-4  # of the largest logit
# Rows of each sequence in each step: whole prompts and chunks of prompts, together with single tokens.
STEPS: tuple[dict[int, int], ...] = ({0: 5, 1: 1}, {0: 3, 1: 1, 2: 11}, {0: 1, 2: 1}, {1: 2, 0: 1, 2: 1})


class Verdict(NamedTuple):
    """The difference between the small model and eager attention."""

    error: float  # the largest difference of two logits
    scale: float  # the largest logit


def check(model: type, config: Any, backend: Backend, way: type[Together | Apart] = Together) -> Verdict:
    """Compare a small copy of a model with eager attention over whole sequences.

    model: a causal language model's class; config: the checkpoint's; way: to run steps through it.
    Raises Unsupported, with the reason, if there is no small copy, it cannot be served, or its logits differ.
    """
    eager, ours = _pair(model, config, way.implementation)
    try:
        with torch.inference_mode():
            served = AdaptedModel(ours, backend, MAX_LEN, way=way)
            verdict = _compared(eager, served)
    except Unsupported:
        raise
    except Exception as error:
        raise Unsupported(f"a small copy of it fails: {_line(error)}") from error
    if not verdict.error <= TOLERANCE * max(1.0, verdict.scale):  # NaN included
        raise Unsupported(
            f"a small copy of it gives other results than with eager attention: logits up to {verdict.scale:.2g} "
            f"differ by {verdict.error:.2g}"
        )
    return verdict


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _pair(model: type, config: Any, implementation: str) -> tuple[Any, Any]:
    """Create two small models with the same weights: with eager attention, and with that implementation."""
    try:
        small = type(config).from_dict(shrink(config.to_dict()))
        made = [_made(model, type(config).from_dict(small.to_dict()), name) for name in ("eager", implementation)]
        randomise(made[0])
        made[1].load_state_dict(made[0].state_dict())
    except Exception as error:
        raise Unsupported(f"no small copy of it can be made: {_line(error)}") from error
    return made[0], made[1]


def _made(model: Any, config: Any, attention: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        made = model._from_config(config, attn_implementation=attention, dtype=torch.float32)
    return made.eval()


def randomise(model: nn.Module) -> None:
    """Set random weights that are large enough for every part to affect the logits, unlike initial weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if weight.dim() > 1:
                weight.copy_(noise * weight.shape[-1] ** -0.5)
            else:
                weight.add_(noise, alpha=0.1)


def _compared(eager: Any, served: AdaptedModel) -> Verdict:
    generator = torch.Generator().manual_seed(1)
    lengths = [sum(step.get(s, 0) for step in STEPS) for s in range(3)]
    config = eager.config.get_text_config()
    vocab_size = min(VOCAB, getattr(config, "vocab_size", VOCAB))  # `shrink` keeps a smaller one
    texts = [torch.randint(0, vocab_size, (length,), generator=generator) for length in lengths]
    padding = getattr(config, "pad_token_id", None)
    if padding is not None:  # some models do not count padding tokens in positions
        texts = [torch.where(text == padding, (padding + 1) % vocab_size, text) for text in texts]
    expected = [_alone(eager, text) for text in texts]
    got: list[list[Tensor]] = [[] for _ in texts]
    for s, logits in packed(served, texts):
        got[s].append(logits)
    differences = [(torch.cat(rows) - logits).abs().max() for rows, logits in zip(got, expected, strict=True)]
    return Verdict(float(torch.stack(differences).max()), float(torch.cat(expected).abs().max()))


def _alone(eager: Any, text: Tensor) -> Tensor:
    # No positions are passed: the model's defaults are the reference for ours.
    logits: Tensor = eager(input_ids=text[None], use_cache=False).logits[0]
    return logits.float()


def packed(served: AdaptedModel, texts: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Return the text's index and the logits [rows, V] of each chunk, in the order of STEPS."""
    shape, blocks = served.config, -(-MAX_LEN // BLOCK_SIZE)
    num_blocks = blocks * len(texts)
    cache = KVCache(shape.groups, num_blocks, BLOCK_SIZE, served.dtype)
    for kv in (cache.kv(layer) for group in shape.groups for layer in group.layers):
        kv.k.fill_(float("nan"))  # slots that were not written must not be read
        kv.v.fill_(float("nan"))
    tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).view(len(texts), blocks)
    done = [0] * len(texts)
    out = []
    for step in STEPS:
        pieces = [(s, done[s], done[s] + new) for s, new in step.items()]
        positions = torch.cat([torch.arange(start, end) for _, start, end in pieces])
        rows_of = torch.cat([torch.full((end - start,), s) for s, start, end in pieces])
        slots = tables[rows_of, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        starts = torch.tensor([0, *step.values()]).cumsum(0).int()
        ends = torch.tensor([end for _, _, end in pieces]).int()
        plans = [
            served.backend.plan(
                group_spec(group, BLOCK_SIZE, num_blocks, served.dtype), starts, ends, tables[list(step)].int(), slots
            )
            for group in shape.groups
        ]
        tokens = torch.cat([texts[s][start:end] for s, start, end in pieces])
        logits = served.logits(served.run(tokens, positions, cache, plans))
        for (s, _, end), part in zip(pieces, torch.split(logits, list(step.values())), strict=True):
            out.append((s, part))
            done[s] = end
    return out
