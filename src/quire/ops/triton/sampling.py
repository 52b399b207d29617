"""Operators of samplers and routers: logsumexp, top_k, top_k_softmax.

A row's result does not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import on_device_of

TILE = 4096  # logits that a program loads at a time

LOW = 0xFFFFFFFF  # the lower half of an int64


@triton.jit
def _shift(top):
    """Return the number to subtract before the exponential: the maximum, or 0 if it is infinite, to avoid NaN."""
    return tl.where(tl.abs(top) == float("inf"), 0.0, top)


@triton.jit
def logsumexp_row(logits, out, size, logits_row, TILE: tl.constexpr):
    """Compute logsumexp of a row. Each lane has its own sum and maximum, so that lanes are combined only once."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_row
    lane = tl.arange(0, TILE)
    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, size, TILE):
        logit = tl.load(logits + first + lane, mask=first + lane < size, other=float("-inf"))
        new_top = tl.maximum(top, logit)
        shift = _shift(new_top)
        total = total * tl.exp(top - shift) + tl.exp(logit - shift)
        top = new_top
    shift = _shift(tl.max(top, 0))
    total = tl.sum(total * tl.exp(top - shift), 0)
    tl.store(out + row, shift + tl.log(total))


def logsumexp(
    logits: Tensor,  # fp32 [R, V]
) -> Tensor:
    """Compute log(sum(exp(logits))) of each row: fp32 [R]."""
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        tile = min(triton.next_power_of_2(max(1, size)), TILE)
        with on_device_of(logits):
            logsumexp_row[(rows,)](logits, out, size, logits.stride(0), tile, num_warps=max(1, min(16, tile // 256)))
    return out


def top_k(
    logits: Tensor,  # fp32 [R, V], no NaN
    k: int,
) -> Tensor:
    """Return the ids of the k largest logits of each row, largest first and ties by the lower id: int64 [R, k].

    torch's top-k has no defined order of equal values. So its input is distinct integers: the upper half is the logit
    as an integer of the same order, the lower half the id counted from the end.
    """
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered.long() << 32) | (LOW - ids)
    # For all of a row a sort is enough; torch.topk would select first.
    best = keys.sort(dim=-1, descending=True).values if k == logits.shape[1] else torch.topk(keys, k, dim=-1).values
    return LOW - (best & LOW)


def top_k_softmax(
    logits: Tensor,  # fp32 [R, V], no NaN, the largest of a row finite
    k: int,
) -> tuple[Tensor, Tensor]:
    """Return the ids of `top_k`, int64 [R, k], and each one's value of the row's softmax, fp32 [R, k]."""
    ids = top_k(logits, k)
    return ids, (logits.gather(1, ids) - logsumexp(logits)[:, None]).exp()
