"""From logits to token ids and log-probabilities.

A row's draw depends on its own logits, parameters and random number only, and ties go to the lowest token id. So sums
over the vocabulary are cumulative ones, which are formed in order: a plain sum may be split among threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.batch import SamplingRows
from quire.engine.plan import INVALID_TOKEN
from quire.ops import Ops
from quire.request import TokenLogprobs

CANDIDATES = 1_024  # tokens of a row that are ranked at first; more if they do not hold its nucleus
MAX_DRAWN_ROWS = 16  # rows at a time that hold several float64 numbers a token: some 100 MiB for a vocabulary of 128k


def sample(
    logits: Tensor,  # fp32 [R, V]; changed in place
    rows: SamplingRows,
    ops: Ops,
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
        tokens[drawn] = _draw(logits[drawn], weights, rows.top_k[drawn], rows.top_p[drawn], rows.uniforms[drawn], ops)
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
    logits: Tensor,  # fp32 [R, V]
    weights: Tensor,  # fp64 [R, V], unnormalised probabilities
    top_k: Tensor,  # int64 [R]
    top_p: Tensor,  # fp32 [R]
    uniforms: Tensor,  # fp64 [R]
    ops: Ops,
) -> Tensor:
    """A token a row: int64 [R], by the inverse of the cumulative distribution."""
    cut = (top_k < weights.shape[1]) | (top_p < 1.0)
    tokens = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    if not cut.all():
        tokens[~cut] = _invert(weights[~cut], uniforms[~cut])
    count, pending = CANDIDATES, torch.nonzero(cut).flatten()
    while len(pending):
        count = min(count, weights.shape[1])
        ids = ops.top_k(logits[pending], count)  # [P, count]
        ranked, limit = weights[pending].gather(1, ids), top_k[pending, None]
        ranked[torch.arange(count, device=ranked.device) >= limit] = 0.0
        cumulative = ranked.cumsum(-1)
        among_all = limit.flatten() >= weights.shape[1]  # the nucleus is a share of the whole vocabulary
        total = torch.where(among_all, weights[pending].cumsum(-1)[:, -1], cumulative[:, -1])[:, None]
        share = top_p[pending, None] * total
        complete = (limit.flatten() <= count) | (count == weights.shape[1])
        held = complete | (among_all & (cumulative[:, -1:] >= share).flatten())
        ranked[cumulative - ranked >= share] = 0.0  # better tokens hold the share already
        drawn = ids.gather(1, _invert(ranked, uniforms[pending])[:, None]).flatten()
        tokens[pending[held]] = drawn[held]
        count, pending = 8 * count, pending[~held]
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
    ops: Ops,
) -> list[TokenLogprobs]:
    """The logprob and rank of each row's token, and its most probable tokens, of equal ones the lower id first."""
    logprobs = logits - ops.logsumexp(logits)[:, None]
    chosen = logprobs.gather(1, tokens[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    better = (logprobs > chosen) | ((logprobs == chosen) & (ids < tokens[:, None]))  # of equal ones the lower id
    ranks = better.sum(-1) + 1
    best = ops.top_k(logits, int(num_logprobs.max())) if len(logits) else tokens[:, None]  # [R, most]
    values = logprobs.gather(1, best)
    return [
        TokenLogprobs(token, value, rank, tuple(zip(row_best[:count], row_values[:count], strict=True)))
        for token, value, rank, row_best, row_values, count in zip(
            tokens.tolist(),
            chosen.flatten().tolist(),
            ranks.tolist(),
            best.tolist(),
            values.tolist(),
            num_logprobs.tolist(),
            strict=True,
        )
    ]
