"""Draw token ids and compute log-probabilities from logits.

A row's draw depends only on its own logits, parameters and random number; ties go to the lowest token id. So sums over
the vocabulary must not depend on how they are split. A CPU uses cumulative sums, which run in order, because a
plain sum may be split among threads. A GPU splits every sum, so it sums integers.

Both ways to draw choose alike. The CPU's inspects values, to rank no more tokens than necessary. The GPU's never does,
since each read of a value waits for all queued work: the parameters alone determine which rows are drawn, and how.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from quire.engine.plan import INVALID_TOKEN
from quire.engine.transfer import receive, send
from quire.models.batch import Masks, SamplingRows
from quire.ops import Backend
from quire.request import TokenLogprobs

TILE = 128  # tokens per group; first only the best one of each counts
CANDIDATES = 1_024  # tokens of a row that are ranked first; more if they do not contain its nucleus
DRAWN_BY_CPU = 2**21  # logits that a CPU draws from at a time; each needs several float64 numbers, 100 MiB in all
FEW_LOGITS = 2**17  # numbers up to which numpy finds the best ones faster, in one thread, than torch
FEW = 4  # a mask that leaves less than 1/FEW of the tokens is worth gathering them
UNIT = 2**44  # weight of the best token when weights are integers: 2**18 of them add up to less than 2**63
DRAWN_NUMBERS = 2**22  # logits that a GPU draws from at a time; each needs about ten numbers of 8 bytes


def sample(
    logits: Tensor,  # fp32 [R, V]; changed in place
    rows: SamplingRows,
    backend: Backend,
) -> Tensor:
    """Draw one token per row: int64 [R], INVALID_TOKEN if no logit is finite.

    Order: biases, penalties, forbidden tokens, masks, then greedy choice, or temperature, min-p, top-k, top-p and a
    draw.
    """
    if rows.bias_rows.numel() or rows.penalty_rows.numel() or rows.banned_rows.numel():
        _change(logits, rows)
    if rows.masks is not None:
        _mask(logits, rows.masks)
    are_few = logits.is_cpu and logits.numel() <= FEW_LOGITS
    tokens, best, valid = (_best_of_few if are_few else _best)(logits)
    if rows.draws:
        draw = _draw_looking if logits.is_cpu else _draw_blindly
        draw(logits, best, valid, rows, backend, tokens)
    if are_few and valid.numpy().all():
        return tokens
    return torch.where(valid, tokens, INVALID_TOKEN)


def _change(
    logits: Tensor,  # fp32 [R, V]; changed in place
    rows: SamplingRows,
) -> None:
    """Add the biases, apply the penalties, and forbid the banned tokens. No row has a token twice in a list."""
    bias_row, bias_token, bias, row, token, count, repetition, frequency, presence, banned_row, banned_token = send(
        [
            rows.bias_rows,
            rows.bias_tokens,
            rows.bias,
            rows.penalty_rows,
            rows.penalty_tokens,
            rows.penalty_counts,
            rows.repetition,
            rows.frequency,
            rows.presence,
            rows.banned_rows,
            rows.banned_tokens,
        ],
        logits.device,
    )
    logits[bias_row, bias_token] += bias
    value, factor = logits[row, token], repetition[row]
    value = torch.where(value > 0, value / factor, value * factor)
    logits[row, token] = value - frequency[row] * count - presence[row] * (count > 0)
    logits.index_put_((banned_row, banned_token), logits.new_full((), -torch.inf))


def _mask(
    logits: Tensor,  # fp32 [R, V]; changed in place
    masks: Masks,
) -> None:
    """Forbid the tokens that the rows' masks do not allow."""
    vocabulary = logits.shape[1]
    if logits.is_cpu:  # row by row in place with numpy: torch's masked_fill_ takes several times as long
        reach = min(8 * masks.allowed.shape[1], vocabulary)
        unpacked = np.unpackbits(~masks.allowed.numpy(), axis=1, count=reach, bitorder="little").view(np.bool_)
        numbers = logits.numpy()
        for row, one in zip(masks.rows.tolist(), unpacked, strict=True):
            np.copyto(numbers[row, :reach], -np.inf, where=one)
            numbers[row, reach:] = -np.inf
        return
    rows, allowed = send([masks.rows, masks.allowed], logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    forbidden = ((allowed[:, :, None] >> bits & 1) == 0).flatten(1)[:, :vocabulary]
    forbidden = pad(forbidden, (0, vocabulary - forbidden.shape[1]), value=True)
    logits.index_copy_(0, rows, logits[rows].masked_fill_(forbidden, -torch.inf))


# ------------------------------------------------------------------------------------------------ on a CPU


def _best(
    logits: Tensor,  # fp32 [R, V]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's best token, its logit [R, 1], and whether that is finite [R].

    Of equal logits the first is the best; NaN counts as the largest.
    """
    tokens = _argmax(logits) if logits.is_cpu else logits.argmax(-1)
    best = logits.gather(1, tokens[:, None])
    return tokens, best, best.flatten().abs() < torch.inf  # equivalent to `isfinite`, in fewer launches


def _best_of_few(
    logits: Tensor,  # fp32 [R, V], on the host
) -> tuple[Tensor, Tensor, Tensor]:
    """Equivalent of `_best` for so few numbers that a call of torch takes longer than the arithmetic."""
    numbers = logits.numpy()
    tokens = numbers.argmax(-1)
    best = numbers[np.arange(len(tokens)), tokens]
    return torch.from_numpy(tokens), torch.from_numpy(best[:, None]), torch.from_numpy(np.isfinite(best))


def _argmax(
    logits: Tensor,  # fp32 [R, V]
) -> Tensor:
    """Return logits.argmax(-1): int64 [R]. That reads one number at a time; this does so only in the best tile."""
    rows, vocabulary = logits.shape
    whole = vocabulary // TILE
    best = logits[:, : whole * TILE].view(rows, whole, TILE).amax(-1)
    if whole * TILE < vocabulary:
        best = torch.cat([best, logits[:, whole * TILE :].amax(-1, keepdim=True)], 1)
    first = best.argmax(-1) * TILE
    # Clamped indices come after the index that they duplicate.
    places = (first[:, None] + torch.arange(TILE)).clamp(max=vocabulary - 1)
    best_place: Tensor = logits.gather(1, places).argmax(-1)
    return first + best_place


def _draw_looking(
    logits: Tensor,  # fp32 [R, V]
    best: Tensor,  # fp32 [R, 1]
    valid: Tensor,  # bool [R]
    rows: SamplingRows,
    backend: Backend,
    tokens: Tensor,  # int64 [R]; those of rows with a temperature are replaced
) -> None:
    drawing = torch.from_numpy(valid.numpy() & (rows.temperature.numpy() > 0))
    if rows.masks is not None:
        _draw_among_few(logits, best, rows, rows.masks, drawing, tokens)
    if not rows.cuts and logits.numel() <= FEW_LOGITS:
        _draw_from_few(logits, best, rows, drawing.numpy(), tokens)
        return
    parts: Sequence[Tensor | slice]
    if logits.numel() <= DRAWN_BY_CPU and drawing.all():
        parts = [slice(None)]  # views instead of copies
    else:
        parts = torch.split(torch.nonzero(drawing).flatten(), max(1, DRAWN_BY_CPU // logits.shape[1]))
    for drawn in parts:
        # Relative to the best logit nothing overflows, however low the temperature, and min-p is a plain threshold.
        weights = torch.exp((logits[drawn] - best[drawn]).double() / rows.temperature[drawn, None])
        weights.masked_fill_(weights < rows.min_p[drawn, None], 0.0)
        tokens[drawn] = _draw(
            logits[drawn], weights, rows.top_k[drawn], rows.top_p[drawn], rows.uniforms[drawn], backend
        )


def _draw_among_few(
    logits: Tensor,  # fp32 [R, V]
    best: Tensor,  # fp32 [R, 1]
    rows: SamplingRows,
    masks: Masks,
    drawing: Tensor,  # bool [R], the rows to draw; cleared for rows that are drawn here
    tokens: Tensor,  # int64 [R]; changed in those rows
) -> None:
    """Draw the rows whose masks allow few tokens from those only, with numpy, which is faster on small arrays.

    The token is the same: the other tokens have no weight, and sums run in order.
    """
    vocabulary, masked = logits.shape[1], masks.rows
    whole = drawing[masked] & (rows.top_k[masked] >= vocabulary) & (rows.top_p[masked] >= 1.0)
    allowed = masks.allowed.numpy()[:, : -(-vocabulary // 8)]
    few = whole.numpy() & (np.bitwise_count(allowed).sum(1, dtype=np.int64) <= vocabulary // FEW)
    if not few.any():
        return
    bits = np.unpackbits(allowed[few], axis=1, count=min(8 * allowed.shape[1], vocabulary), bitorder="little")
    place, ids = np.divmod(np.flatnonzero(bits.view(np.bool_)), bits.shape[1])
    chosen = masked[torch.from_numpy(few)]
    row = chosen.numpy()[place]
    relative = (logits.numpy()[row, ids] - best.numpy()[row, 0]).astype(np.float64) / rows.temperature.numpy()[row]
    weights = torch.from_numpy(relative).exp_().numpy()
    weights[weights < rows.min_p.numpy()[row]] = 0.0
    counts = np.bincount(place, minlength=len(chosen))
    starts = counts.cumsum() - counts
    padded = np.zeros((len(chosen), counts.max()))
    padded[place, np.arange(len(ids)) - starts[place]] = weights
    drawn = _invert_few(torch.from_numpy(padded), rows.uniforms.numpy()[chosen.numpy()])
    tokens[chosen] = torch.from_numpy(ids[starts + drawn])
    drawing[chosen] = False


def _draw_from_few(
    logits: Tensor,  # fp32 [R, V]
    best: Tensor,  # fp32 [R, 1]
    rows: SamplingRows,
    drawing: NDArray[np.bool_],  # [R], the rows to draw, none of which has top_k, top_p or min_p
    tokens: Tensor,  # int64 [R]; changed in those rows
) -> None:
    """Draw from few logits with numpy, which takes half of torch's time for them. The tokens are the same."""
    drawn = slice(None) if drawing.all() else np.flatnonzero(drawing)
    with np.errstate(over="ignore"):  # -inf is right
        relative = (logits.numpy()[drawn] - best.numpy()[drawn]).astype(np.float64)
    relative /= rows.temperature.numpy()[drawn, None]
    weights = torch.from_numpy(relative).exp_()
    tokens.numpy()[drawn] = _invert_few(weights, rows.uniforms.numpy()[drawn])


def _draw(
    logits: Tensor,  # fp32 [R, V]
    weights: Tensor,  # fp64 [R, V], unnormalized probabilities
    top_k: Tensor,  # int64 [R]
    top_p: Tensor,  # fp32 [R]
    uniforms: Tensor,  # fp64 [R]
    backend: Backend,
) -> Tensor:
    """Draw a token per row: int64 [R], by the inverse of the cumulative distribution."""
    cut = (top_k < weights.shape[1]) | (top_p < 1.0)
    if not cut.any():
        return _invert(weights, uniforms)
    tokens = torch.empty(len(weights), dtype=torch.int64, device=weights.device)
    if not cut.all():
        tokens[~cut] = _invert(weights[~cut], uniforms[~cut])
    count, pending = CANDIDATES, torch.nonzero(cut).flatten()
    while len(pending):
        count = min(count, weights.shape[1])
        ids = backend.top_k(logits[pending], count)  # [P, count]
        ranked, limit = weights[pending].gather(1, ids), top_k[pending, None]
        ranked[torch.arange(count, device=ranked.device) >= limit] = 0.0
        cumulative = ranked.cumsum(-1)
        among_all = limit.flatten() >= weights.shape[1]  # the nucleus is a share of the whole vocabulary
        total = torch.where(among_all, weights[pending].cumsum(-1)[:, -1], cumulative[:, -1])[:, None]
        share = top_p[pending, None] * total
        complete = (limit.flatten() <= count) | (count == weights.shape[1])
        held = complete | (among_all & (cumulative[:, -1:] >= share).flatten())
        ranked[cumulative - ranked >= share] = 0.0  # better tokens already make up the share
        drawn = ids.gather(1, _invert(ranked, uniforms[pending])[:, None]).flatten()
        tokens[pending[held]] = drawn[held]
        count, pending = 8 * count, pending[~held]
    return tokens


def _invert(
    weights: Tensor,  # fp64 [R, V]
    uniforms: Tensor,  # fp64 [R]
) -> Tensor:
    """Return the first index per row whose cumulative weight exceeds the share `uniforms` of the total: int64 [R]."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).flatten()


def _invert_few(
    weights: Tensor,  # fp64 [R, V]
    uniforms: NDArray[np.float64],  # [R]
) -> NDArray[np.int64]:
    """Equivalent of `_invert`, with numpy."""
    cumulative = weights.numpy().cumsum(-1)
    total = cumulative[:, -1:]
    target = np.minimum(uniforms[:, None] * total, np.nextafter(total, 0.0))
    found: NDArray[np.int64] = (cumulative > target).argmax(-1)
    return found


# ------------------------------------------------------------------------------------------------ on a GPU


def _draw_blindly(
    logits: Tensor,  # fp32 [R, V]
    best: Tensor,  # fp32 [R, 1]
    valid: Tensor,  # bool [R]
    rows: SamplingRows,
    backend: Backend,
    tokens: Tensor,  # int64 [R]; those of rows with a temperature are replaced
) -> None:
    vocabulary = logits.shape[1]
    drawn, cut = rows.temperature > 0, (rows.top_k < vocabulary) | (rows.top_p < 1.0)
    whole, ranked = (torch.nonzero(drawn & some).flatten() for some in (~cut, cut))
    order = torch.cat([whole, ranked])
    if not len(order):
        return
    given = [order, *(x[order] for x in (rows.temperature, rows.min_p, rows.top_k, rows.top_p, rows.uniforms))]
    there = send(given, logits.device)
    most = max(1, DRAWN_NUMBERS // vocabulary)
    parts = [slice(start, min(start + most, len(whole))) for start in range(0, len(whole), most)]
    parts += [slice(start, start + most) for start in range(len(whole), len(order), most)]
    for part in parts:
        index, temperature, min_p, top_k, top_p, uniforms = (x[part] for x in there)
        # A row without a finite logit draws a token like the others, which is not used.
        kept, top = (torch.where(valid[index, None], x[index], 0.0) for x in (logits, best))
        weights = torch.exp((kept - top).double() / temperature[:, None])
        weights = (torch.where(weights < min_p[:, None], 0.0, weights) * UNIT).long()
        if part.start < len(whole):
            chosen = _invert_integers(weights, uniforms)
        else:
            ids = backend.top_k(kept, min(vocabulary, int(given[3][part].max())))
            chosen = ids.gather(1, _draw_rank(weights, ids, top_k, top_p, uniforms)[:, None]).flatten()
        tokens.index_copy_(0, index, chosen)


def _draw_rank(
    weights: Tensor,  # int64 [R, V]
    ids: Tensor,  # int64 [R, k], the tokens that may be kept, the best first
    top_k: Tensor,  # int64 [R]
    top_p: Tensor,  # fp32 [R]
    uniforms: Tensor,  # fp64 [R]
) -> Tensor:
    """Return the index in `ids` that each row draws: int64 [R]."""
    rank = torch.arange(ids.shape[1], device=ids.device)
    ranked = torch.where(rank < top_k[:, None], weights.gather(1, ids), 0)
    cumulative = ranked.cumsum(-1)
    among_all = top_k >= weights.shape[1]  # the nucleus is a share of the whole vocabulary
    share = top_p.double() * torch.where(among_all, weights.sum(-1), cumulative[:, -1]).double()
    # A token is dropped if better tokens already make up the share.
    return _invert_integers(torch.where((cumulative - ranked).double() < share[:, None], ranked, 0), uniforms)


def _invert_integers(
    weights: Tensor,  # int64 [R, V]
    uniforms: Tensor,  # fp64 [R]
) -> Tensor:
    """Equivalent of `_invert` in integers, except for the share."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    target = torch.minimum((uniforms[:, None] * total.double()).long(), total - 1)
    return torch.searchsorted(cumulative, target, right=True).flatten()


# ------------------------------------------------------------------------------------------- log-probabilities


def token_logprobs(
    logits: Tensor,  # fp32 [R, V]
    tokens: Tensor,  # int64 [R]
    num_logprobs: Tensor,  # int64 [R], on the host
    backend: Backend,
) -> Callable[[], list[TokenLogprobs]]:
    """Return a function that reads, per row, the logprob and rank of its token, and its most probable tokens.

    Of equal ones the lower id ranks first. Call it when all queued work is done.
    """
    logprobs = logits - backend.logsumexp(logits)[:, None]
    chosen = logprobs.gather(1, tokens[:, None])
    ids = torch.arange(logits.shape[1], device=logits.device)
    better = (logprobs > chosen) | ((logprobs == chosen) & (ids < tokens[:, None]))  # of equal ones the lower id first
    ranks = better.sum(-1) + 1
    best = backend.top_k(logits, int(num_logprobs.max())) if len(logits) else tokens[:, None]  # [R, most]
    found = [receive(x) for x in (tokens, chosen.flatten(), ranks, best, logprobs.gather(1, best))]

    def read() -> list[TokenLogprobs]:
        return [
            TokenLogprobs(token, value, rank, tuple(zip(row_best[:count], row_values[:count], strict=True)))
            for token, value, rank, row_best, row_values, count in zip(
                *(x.tolist() for x in found), num_logprobs.tolist(), strict=True
            )
        ]

    return read
