"""Operators on states of attention: merge_states and apply_sinks. A program has some heads of one query token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.launch import check_dtype, on_device_of

TILE = 2048  # elements of an output that a program computes


@triton.jit
def _rows(x, token, x_token, x_head, head, mask, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Load some heads of one token, in fp32."""
    dim = tl.arange(0, DIM_TILE)[None, :]
    at = head.to(tl.int64)[:, None] * x_head + dim
    return tl.load(x + token * x_token + at, mask=mask[:, None] & (dim < DIM), other=0.0).to(tl.float32)


@triton.jit
def _store_rows(out, token, head, value, mask, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr):
    """Store some heads of one token to a contiguous output."""
    dim = tl.arange(0, DIM_TILE)[None, :]
    at = head[:, None] * DIM + dim
    tl.store(out + token * HEADS * DIM + at, value.to(out.dtype.element_ty), mask=mask[:, None] & (dim < DIM))


@triton.jit
def merge_rows(
    out_a, lse_a, out_b, lse_b, out, lse,
    a_token, a_head, lse_a_token, b_token, b_head, lse_b_token,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Merge the states over two sets of keys, for some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    mask = head < HEADS
    a = tl.load(lse_a + token * lse_a_token + head, mask=mask, other=float("-inf"))
    b = tl.load(lse_b + token * lse_b_token + head, mask=mask, other=float("-inf"))
    top = tl.maximum(a, b)
    shift = tl.where(top == float("-inf"), 0.0, top)
    weight_a = tl.exp(a - shift)
    weight_b = tl.exp(b - shift)
    total = weight_a + weight_b
    row_a = _rows(out_a, token, a_token, a_head, head, mask, DIM, DIM_TILE)
    row_b = _rows(out_b, token, b_token, b_head, head, mask, DIM, DIM_TILE)
    # The output of a state without keys may be NaN, and zero times NaN is not zero: leave it out.
    mix = tl.where((weight_a == 0)[:, None], 0.0, weight_a[:, None] * row_a)
    mix += tl.where((weight_b == 0)[:, None], 0.0, weight_b[:, None] * row_b)
    mix = tl.where((total == 0)[:, None], 0.0, mix / total[:, None])  # NaN stays NaN
    _store_rows(out, token, head, mix, mask, HEADS, DIM, DIM_TILE)
    tl.store(lse + token * HEADS + head, top + tl.log(total), mask=mask)


@triton.jit
def sink_rows(
    out, lse, sinks, closed, out_token, out_head, lse_token,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Apply the sinks of some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    mask = head < HEADS
    logit = tl.load(lse + token * lse_token + head, mask=mask, other=float("-inf"))
    sink = tl.load(sinks + head, mask=mask, other=0.0)
    share = tl.where(logit == float("-inf"), 0.0, 1.0 / (1.0 + tl.exp(sink - logit)))
    row = _rows(out, token, out_token, out_head, head, mask, DIM, DIM_TILE)
    _store_rows(closed, token, head, row * share[:, None], mask, HEADS, DIM, DIM_TILE)


def merge_states(
    out_a: Tensor,  # [T, Hq, Dv]
    lse_a: Tensor,  # fp32 [T, Hq]
    out_b: Tensor,  # [T, Hq, Dv]
    lse_b: Tensor,  # fp32 [T, Hq]
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys: out [T, Hq, Dv], LSE fp32 [T, Hq]."""
    check_dtype("out_a", out_a)
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    if out.numel():
        grid, sizes = _split(out)
        strides = *out_a.stride()[:2], lse_a.stride(0), *out_b.stride()[:2], lse_b.stride(0)
        with on_device_of(out):
            merge_rows[grid](out_a, lse_a, out_b, lse_b, out, lse, *strides, *sizes)
    return out, lse


def apply_sinks(
    out: Tensor,  # [T, Hq, Dv]
    lse: Tensor,  # fp32 [T, Hq]
    sinks: Tensor,  # fp32 [Hq]
) -> Tensor:
    """Apply attention sinks to a state: out · e^lse / (e^lse + e^sink)."""
    check_dtype("out", out)
    closed = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if out.numel():
        grid, sizes = _split(out)
        with on_device_of(out):
            sink_rows[grid](out, lse, sinks, closed, *out.stride()[:2], lse.stride(0), *sizes)
    return closed


def _split(
    out: Tensor,  # [T, Hq, Dv]
) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Return the grid for an output; Hq, Dv, and the heads and dimensions of a program's tile."""
    tokens, heads, dim = out.shape
    dims = triton.next_power_of_2(dim)
    tile = min(triton.next_power_of_2(heads), max(1, TILE // dims))
    return (tokens, triton.cdiv(heads, tile)), (heads, dim, tile, dims)
