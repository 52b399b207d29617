"""From logits to token ids and log-probabilities.

A row's draw depends on its own logits, parameters and random number only, and ties go to the lowest token id.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.batch import SamplingRows
from quire.engine.scheduler import INVALID_TOKEN
from quire.request import TokenLogprobs

MAX_DRAWN_ROWS = 16  # rows at a time that hold several float64 numbers a token: some 100 MiB for a vocabulary of 128k


def sample(
    logits: Tensor,  # fp32 [R, V]; changed in place
    rows: SamplingRows,
) -> Tensor:
    """One token a row: int64 [R], INVALID_TOKEN where no logit is finite.

    Order: penalties, forbidden tokens, then greedy choice, or temperature, min-p, top-k, top-p and a draw.
    """
    _penalise(logits, rows)
    logits[rows.banned_rows, rows.banned_tokens] = -torch.inf
    tokens = logits.argmax(-1)  # of equal logits the first; NaN counts as the largest
    best = logits.gather(1, tokens[:, None])
    valid = torch.isfinite(best.flatten())
    for drawn in torch.split(torch.nonzero(valid & (rows.temperature > 0)).flatten(), MAX_DRAWN_ROWS):
        # Relative to the best logit nothing overflows, however low the temperature, and min-p is a plain threshold.
        weights = torch.exp((logits[drawn] - best[drawn]).double() / rows.temperature[drawn, None])
        weights[weights < rows.min_p[drawn, None]] = 0.0
        tokens[drawn] = _draw(weights, rows.top_k[drawn], rows.top_p[drawn], rows.uniforms[drawn])
    return tokens.masked_fill(~valid, INVALID_TOKEN)


def _penalise(
    logits: Tensor,  # fp32 [R, V]; changed in place
    rows: SamplingRows,
) -> None:
    row, token, count = rows.penalty_rows, rows.penalty_tokens, rows.penalty_counts
    value, factor = logits[row, token], rows.repetition[row]
    value = torch.where(value > 0, value / factor, value * factor)
    logits[row, token] = value - rows.frequency[row] * count - rows.presence[row] * (count > 0)


def _draw(
    weights: Tensor,  # fp64 [R, V], unnormalised probabilities; changed in place
    top_k: Tensor,  # int64 [R]
    top_p: Tensor,  # fp32 [R]
    uniforms: Tensor,  # fp64 [R]
) -> Tensor:
    """A token a row: int64 [R], by the inverse of the cumulative distribution."""
    cut = (top_k < weights.shape[1]) | (top_p < 1.0)
    tokens = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    if not cut.all():
        tokens[~cut] = _invert(weights[~cut], uniforms[~cut])
    if cut.any():
        ranked, order = weights[cut].sort(dim=-1, descending=True, stable=True)
        ranked[torch.arange(ranked.shape[1], device=ranked.device) >= top_k[cut, None]] = 0.0
        before = ranked.cumsum(-1) - ranked  # probability of all better tokens
        ranked[before >= top_p[cut, None] * ranked.sum(-1, keepdim=True)] = 0.0
        tokens[cut] = order.gather(1, _invert(ranked, uniforms[cut])[:, None]).flatten()
    return tokens


def _invert(
    weights: Tensor,  # fp64 [R, V]
    uniforms: Tensor,  # fp64 [R]
) -> Tensor:
    """The first index a row whose cumulative weight exceeds its share `uniforms` of the total: int64 [R]."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).flatten()


def token_logprobs(
    logits: Tensor,  # fp32 [R, V]
    tokens: Tensor,  # int64 [R]
    num_logprobs: Tensor,  # int64 [R]
) -> list[TokenLogprobs]:
    """The logprob and rank of each row's token, and the row's most probable tokens."""
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs.gather(1, tokens[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    better = (logprobs > chosen) | ((logprobs == chosen) & (ids < tokens[:, None]))  # of equal ones the lower id
    ranks = better.sum(-1) + 1
    return [
        TokenLogprobs(token, value, rank, _most_probable(row, count))
        for token, value, rank, row, count in zip(
            tokens.tolist(), chosen.flatten().tolist(), ranks.tolist(), logprobs, num_logprobs.tolist(), strict=True
        )
    ]


def _most_probable(
    logprobs: Tensor,  # fp32 [V]
    count: int,
) -> tuple[tuple[int, float], ...]:
    """The `count` best (token, logprob) of one row, equal ones by token id, which topk alone does not promise."""
    if count == 0:
        return ()
    threshold = logprobs.topk(count).values[-1]
    candidates = torch.nonzero(logprobs >= threshold).flatten()  # ascending ids
    values, order = logprobs[candidates].sort(descending=True, stable=True)
    return tuple(zip(candidates[order[:count]].tolist(), values[:count].tolist(), strict=True))
