"""Writes to the cache and copies within it: write_kv, copy_blocks, and swaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.spec import PagedKV
from quire.ops.triton.functions import int8_scale, to_int8
from quire.ops.triton.launch import on_device_of
from quire.ops.triton.worklist import TritonPlan

ROW_TILE = 4096  # elements of a token's K or V that a program loads at a time
COPY_TILE = 2048  # elements of a block that one program copies

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def _write_heads(
    new, new_head, cache, cache_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_TILE: tl.constexpr, DIM_TILE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store one token's row of all heads. If LIMIT is not 0, numbers are clamped to -LIMIT..LIMIT; NaN stays NaN.

    Returns 1 if a stored number is not finite, otherwise 0.
    """
    dim = tl.arange(0, DIM_TILE)[None, :]
    nonfinite = 0
    for first in range(0, HEADS, HEAD_TILE):
        head = first + tl.arange(0, HEAD_TILE)[:, None]
        mask = (head < HEADS) & (dim < DIM)
        row = tl.load(new + head.to(tl.int64) * new_head + dim, mask=mask, other=0.0)
        if LIMIT > 0:
            row = row.to(tl.float32)
            row = tl.where(row > LIMIT, LIMIT, row)
            row = tl.where(row < -LIMIT, -LIMIT, row)
        tl.store(cache + head.to(tl.int64) * cache_head + dim, row.to(cache.dtype.element_ty), mask=mask)
        is_finite = tl.abs(row.to(tl.float32)) < float("inf")
        nonfinite = tl.maximum(nonfinite, tl.max(tl.max(tl.where(is_finite, 0, 1), 1), 0))
    return nonfinite


@triton.jit
def _round_heads(
    new, new_head, cache, cache_head, scales, scale_head,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Store one token's row of all heads as integers with a scale, by the rule of `quire.ops.weights.rounding`.

    Returns 1 if a number of the row is not finite, otherwise 0.
    """
    dim = tl.arange(0, DIM_TILE)[None, :]
    nonfinite = 0
    for first in range(0, HEADS, HEAD_TILE):
        head = first + tl.arange(0, HEAD_TILE)
        mask = (head < HEADS)[:, None] & (dim < DIM)
        row = tl.load(new + head.to(tl.int64)[:, None] * new_head + dim, mask=mask, other=0.0).to(tl.float32)
        magnitude = tl.abs(row)
        largest = tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 1)  # [HEAD_TILE]
        finite = largest < float("inf")
        factor, scale = int8_scale(largest)
        whole = to_int8(tl.where(finite[:, None], row, 0.0) * factor[:, None])
        tl.store(cache + head.to(tl.int64)[:, None] * cache_head + dim, whole, mask=mask)
        tl.store(scales + head.to(tl.int64) * scale_head, scale, mask=head < HEADS)
        nonfinite = tl.maximum(nonfinite, tl.max(tl.where((head < HEADS) & ~finite, 1, 0), 0))
    return nonfinite


@triton.jit
def write_rows(
    k_new, v_new, k, v, k_scale, v_scale, slots, rows_nonfinite,
    k_new_token, k_new_head, v_new_token, v_new_head, k_block, k_head, k_slot, v_block, v_head, v_slot,
    k_scale_block, k_scale_head, k_scale_slot, v_scale_block, v_scale_head, v_scale_slot,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    K_HEADS: tl.constexpr, K_DIMS: tl.constexpr, V_HEADS: tl.constexpr, V_DIMS: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Store K and V of one token at its slot, unless that is negative. Mark a row that is not finite.

    K_HEADS, K_DIMS: the tile of K; V_HEADS, V_DIMS: that of V. k_scale, v_scale: of a cache of int8, otherwise `None`.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block = (slot // BLOCK_SIZE).to(tl.int64)
    offset = (slot % BLOCK_SIZE).to(tl.int64)
    k += block * k_block + offset * k_slot
    v += block * v_block + offset * v_slot
    k_new += token * k_new_token
    v_new += token * v_new_token
    if k_scale is not None:
        k_scale += block * k_scale_block + offset * k_scale_slot
        v_scale += block * v_scale_block + offset * v_scale_slot
        k_nonfinite = _round_heads(k_new, k_new_head, k, k_head, k_scale, k_scale_head, HEADS, D, K_HEADS, K_DIMS)
        v_nonfinite = _round_heads(v_new, v_new_head, v, v_head, v_scale, v_scale_head, HEADS, DV, V_HEADS, V_DIMS)
    else:
        k_nonfinite = _write_heads(k_new, k_new_head, k, k_head, HEADS, D, K_HEADS, K_DIMS, LIMIT)
        v_nonfinite = _write_heads(v_new, v_new_head, v, v_head, HEADS, DV, V_HEADS, V_DIMS, LIMIT)
    if k_nonfinite + v_nonfinite > 0:
        tl.store(rows_nonfinite + token, 1)


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
def copy_part(
    cache, sources, targets, block, head, slot,
    HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy a tile of the elements of one block, counted along dimensions, then slots, then heads."""
    pair = tl.program_id(0)
    source = cache + tl.load(sources + pair).to(tl.int64) * block
    target = cache + tl.load(targets + pair).to(tl.int64) * block
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = i // DIM
    offset = (row // BLOCK_SIZE).to(tl.int64) * head + (row % BLOCK_SIZE).to(tl.int64) * slot + i % DIM
    mask = i < HEADS * BLOCK_SIZE * DIM
    tl.store(target + offset, tl.load(source + offset, mask=mask), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])
def swap_part(source, target, sources, targets, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Copy a tile of the elements of one block from one pool to another."""
    pair = tl.program_id(0)
    source += tl.load(sources + pair).to(tl.int64) * SIZE
    target += tl.load(targets + pair).to(tl.int64) * SIZE
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    tl.store(target + i, tl.load(source + i, mask=i < SIZE), mask=i < SIZE)


def write_kv(
    k_new: Tensor,  # [T, Hkv, D]
    v_new: Tensor,  # [T, Hkv, Dv]
    kv: PagedKV,
    plan: TritonPlan,
) -> None:
    """Store row t's K and V at slot plan.slots[t], that is at offset slot % B of block slot // B; -1 skips it.

    Numbers beyond the range of an fp8 cache, infinities included, are clamped to its largest number; NaN stays NaN.
    GPUs convert fp32 to e5m2 by way of a truncated fp16, so a number barely above the middle of two may be rounded
    down.
    """
    if plan.num_tokens == 0:
        return
    spec, k, D = plan.spec, kv.k, plan.spec.head_dim
    if spec.latent:  # the part of K that is not in V
        k, k_new, D = k[..., spec.dim_v :], k_new[..., spec.dim_v :], D - spec.dim_v
    limit = torch.finfo(spec.cache_dtype).max if spec.cache_dtype in FP8 else 0.0
    with on_device_of(kv.k):
        write_rows[(plan.num_tokens,)](
            k_new,
            v_new,
            k,
            kv.v,
            kv.k_scale,
            kv.v_scale,
            plan.device_slots,
            plan.rows_nonfinite,
            *k_new.stride()[:2],
            *v_new.stride()[:2],
            *kv.k.stride()[:3],
            *kv.v.stride()[:3],
            *scale_strides(kv),
            spec.block_size,
            spec.num_kv_heads,
            D,
            spec.dim_v,
            *_tile(spec.num_kv_heads, D),
            *_tile(spec.num_kv_heads, spec.dim_v),
            LIMIT=limit,
            enable_fp_fusion=not spec.is_scaled,  # rounding to an integer takes two operations, see `to_int8`
        )


def unit(kv: PagedKV) -> int:
    """Return a divisor of all strides: the elements in 16 bytes if rows begin at multiples of 16 bytes, else 1."""
    numbers = 16 // kv.k.element_size()
    for x in (kv.k, kv.v):
        if x.data_ptr() % 16 or any(stride % numbers for stride in x.stride()[:3]):
            return 1
    return numbers


def scale_strides(kv: PagedKV) -> tuple[int, ...]:
    """Return the strides of the scales of K and of V, by block, head and slot, or zeros without scales."""
    if kv.k_scale is None or kv.v_scale is None:
        return (0,) * 6
    return (*kv.k_scale.stride(), *kv.v_scale.stride())


def copy_blocks(kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy block src[i] to block dst[i]: copy-on-write of a shared block before it is written."""
    if not src:
        return
    on_host = torch.tensor([list(src), list(dst)], dtype=torch.int32, pin_memory=kv.k.is_cuda)
    sources, targets = on_host.to(kv.k.device, non_blocking=True)
    with on_device_of(kv.k):
        for x in kv.tensors().values():
            bits = x.view(INTEGERS[x.element_size()])  # floats may lose the payload of NaN
            if x.dim() == 3:  # scales
                bits = bits.unsqueeze(3)
            _, heads, slots, dim = bits.shape
            grid = (len(src), triton.cdiv(heads * slots * dim, COPY_TILE))
            copy_part[grid](bits, sources, targets, *x.stride()[:3], heads, slots, dim, TILE=COPY_TILE)


def block_swapper(src: Sequence[int], dst: Sequence[int], device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """Return a function that copies block src[i] of one pool [N, ...] to block dst[i] of another, called per layer.

    Both pools are contiguous. One of them may be pinned memory of the host, which the GPU reads and writes directly:
    one launch copies all blocks of a layer. Ids are not checked. Copies run on the current stream.
    """
    on_host = torch.tensor([list(src), list(dst)], dtype=torch.int32, pin_memory=device.type == "cuda")
    sources, targets = on_host.to(device, non_blocking=True)

    def swap(source: Tensor, target: Tensor) -> None:
        size = source[0].nbytes
        width = next(width for width in (8, 4, 2, 1) if size % width == 0)
        parts = (x.view(-1).view(INTEGERS[width]) for x in (source, target))
        grid = (len(src), triton.cdiv(size // width, COPY_TILE))
        swap_part[grid](*parts, sources, targets, SIZE=size // width, TILE=COPY_TILE)

    return swap


def _tile(heads: int, dim: int) -> tuple[int, int]:
    """Return the heads and dimensions of a tile of a token's row."""
    dims = triton.next_power_of_2(dim)
    return min(triton.next_power_of_2(heads), max(1, ROW_TILE // dims)), dims
