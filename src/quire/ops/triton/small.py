"""The small operators of a decoder: norms, rope, gates and activations, with sums in fp32.

Rows may be strided: they are described as those of [outer, inner, H], and copied if that is not possible.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.activation import FUNCTIONS, Activation
from quire.ops.checks.small import check_positions
from quire.ops.recurrent.calls import GatedNorm
from quire.ops.rows import as_rows, count_rows, row_strides
from quire.ops.triton.functions import exp, sigmoid
from quire.ops.triton.launch import check_dtype, on_device_of

NORM_TILE = 8192  # elements of a row that a program loads at a time; a longer row is read again
PART_TILE = 1024  # elements of a row that a program of an activation computes
ROPE_TILE = 2048  # pairs that a program rotates


@triton.jit
def _row(x, x_outer, inner, x_inner):
    """Return the address of this program's row."""
    row = tl.program_id(0)
    return x + (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner


@triton.jit
def rms_norm_row(
    x, residual, weight, out, x_outer, inner, x_inner, residual_token, eps,
    H: tl.constexpr, TILE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute RMSNorm of a row. ADD: the row is added to that of the residual, and the sum is normalised."""
    row = tl.program_id(0).to(tl.int64)
    x = _row(x, x_outer, inner, x_inner)
    source = x
    if ADD:
        source = residual + row * residual_token
    out += row * H
    value = tl.zeros([TILE], tl.float32)
    square = tl.zeros([TILE], tl.float32)
    for first in range(0, H, TILE):
        dim = first + tl.arange(0, TILE)
        value = tl.load(x + dim, mask=dim < H, other=0.0).to(tl.float32)
        if ADD:
            value += tl.load(source + dim, mask=dim < H, other=0.0).to(tl.float32)
            rounded = value.to(residual.dtype.element_ty)
            tl.store(source + dim, rounded, mask=dim < H)
            value = rounded.to(tl.float32)
        square += value * value
    scale = tl.rsqrt(tl.sum(square, 0) / H + eps)
    if ADD and H > TILE:
        tl.debug_barrier()  # the row is read again, and other threads may have stored it
    for first in range(0, H, TILE):
        dim = first + tl.arange(0, TILE)
        if H > TILE:
            value = tl.load(source + dim, mask=dim < H, other=0.0).to(tl.float32)
        result = value * scale * tl.load(weight + dim, mask=dim < H, other=0.0).to(tl.float32)
        tl.store(out + dim, result.to(out.dtype.element_ty), mask=dim < H)


@triton.jit
def layer_norm_row(
    x, weight, bias, out, x_outer, inner, x_inner, eps,
    H: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    x = _row(x, x_outer, inner, x_inner)
    out += tl.program_id(0).to(tl.int64) * H
    value = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, H, TILE):
        dim = first + tl.arange(0, TILE)
        value = tl.load(x + dim, mask=dim < H, other=0.0).to(tl.float32)
        total += value
    mean = tl.sum(total, 0) / H
    square = tl.zeros([TILE], tl.float32)
    for first in range(0, H, TILE):
        dim = first + tl.arange(0, TILE)
        if H > TILE:
            value = tl.load(x + dim, mask=dim < H, other=0.0).to(tl.float32)
        centred = tl.where(dim < H, value - mean, 0.0)
        square += centred * centred
    scale = tl.rsqrt(tl.sum(square, 0) / H + eps)
    for first in range(0, H, TILE):
        dim = first + tl.arange(0, TILE)
        if H > TILE:
            value = tl.load(x + dim, mask=dim < H, other=0.0).to(tl.float32)
        result = (value - mean) * scale * tl.load(weight + dim, mask=dim < H, other=0.0).to(tl.float32)
        if BIAS:
            result += tl.load(bias + dim, mask=dim < H, other=0.0).to(tl.float32)
        tl.store(out + dim, result.to(out.dtype.element_ty), mask=dim < H)


@triton.jit
def gated_norm_part(
    x, gate, weight, out, x_token, gate_token, eps,
    HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """Compute the gated norm of one head of one row."""
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    first = tl.program_id(0) % HEADS * DIM
    x += row * x_token + first
    gate += row * gate_token + first
    weight += first
    out += row * HEADS * DIM + first
    value = tl.zeros([TILE], tl.float32)
    factor = tl.zeros([TILE], tl.float32)
    square = tl.zeros([TILE], tl.float32)
    for start in range(0, DIM, TILE):
        dim = start + tl.arange(0, TILE)
        value, factor = _gated(x, gate, dim, DIM, GATE_FIRST)
        square += value * value
    scale = tl.rsqrt(tl.sum(square, 0) / DIM + eps)
    for start in range(0, DIM, TILE):
        dim = start + tl.arange(0, TILE)
        if DIM > TILE:
            value, factor = _gated(x, gate, dim, DIM, GATE_FIRST)
        result = value * scale * tl.load(weight + dim, mask=dim < DIM, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            result *= factor
        tl.store(out + dim, result.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit
def _gated(x, gate, dim, DIM: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Return the input of the norm, and silu of the gate."""
    value = tl.load(x + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    factor = tl.load(gate + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    factor *= sigmoid(factor)
    if GATE_FIRST:
        value *= factor
    return value, factor


@triton.jit
def _turn(
    x, x_head, first, cos, sin,
    HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_TILE: tl.constexpr, PAIR_TILE: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of some heads of one token."""
    pair = tl.arange(0, PAIR_TILE)[None, :]
    head = first + tl.arange(0, HEAD_TILE)[:, None]
    mask = (head < HEADS) & (pair < HALF)
    left = x + head.to(tl.int64) * x_head + pair
    a = tl.load(left, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(left + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(left, (a * cos - b * sin).to(x.dtype.element_ty), mask=mask)
    tl.store(left + HALF, (b * cos + a * sin).to(x.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["positions"])
def rope_row(
    q, k, positions, cos, sin, rows, q_token, q_head, k_token, k_head,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, HEAD_TILE: tl.constexpr, PAIR_TILE: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token, those of k after those of q. A position outside the table is clamped to it."""
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    pair = tl.arange(0, PAIR_TILE)[None, :]
    position = tl.load(positions + token).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), rows - 1)
    c = tl.load(cos + position * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + position * HALF + pair, mask=pair < HALF, other=0.0)
    Q_CHUNKS: tl.constexpr = (Q_HEADS + HEAD_TILE - 1) // HEAD_TILE
    if chunk < Q_CHUNKS:
        _turn(q + token * q_token, q_head, chunk * HEAD_TILE, c, s, Q_HEADS, HALF, HEAD_TILE, PAIR_TILE)
    else:
        _turn(k + token * k_token, k_head, (chunk - Q_CHUNKS) * HEAD_TILE, c, s, K_HEADS, HALF, HEAD_TILE, PAIR_TILE)


@triton.jit
def swiglu_part(gate_up, out, gate_up_token, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Compute SwiGLU of a tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    gate_up += row * gate_up_token
    dim = tl.program_id(1) * TILE + tl.arange(0, TILE)
    gate = tl.load(gate_up + dim, mask=dim < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + SIZE + dim, mask=dim < SIZE, other=0.0).to(tl.float32)
    result = gate / (1.0 + exp(-gate)) * up
    tl.store(out + row * SIZE + dim, result.to(out.dtype.element_ty), mask=dim < SIZE)


@triton.jit
def gate_part(gate, x, gate_token, x_token, SIZE: tl.constexpr, TILE: tl.constexpr, BY_ROW: tl.constexpr):
    """Apply the gate to a tile of one row in place. BY_ROW: the gate has one number per row."""
    row = tl.program_id(0).to(tl.int64)
    dim = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x += row * x_token + dim
    value = tl.load(x, mask=dim < SIZE, other=0.0).to(tl.float32)
    column = dim * 0 if BY_ROW else dim
    value *= sigmoid(tl.load(gate + row * gate_token + column, mask=dim < SIZE, other=0.0).to(tl.float32))
    tl.store(x, value.to(x.dtype.element_ty), mask=dim < SIZE)


@triton.jit
def activate_part(
    x, out, x_token, slope, limit, offset,
    SIZE: tl.constexpr, TILE: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Compute the activation of a tile of one row. FUNCTION: index in `activation.FUNCTIONS`."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_token
    dim = tl.program_id(1) * TILE + tl.arange(0, TILE)
    value = tl.load(x + dim, mask=dim < SIZE, other=0.0).to(tl.float32)
    if LIMITED:
        value = tl.where(value > limit, limit, value)
    if FUNCTION == 0:
        value = value / (1.0 + exp(-slope * value))
    elif FUNCTION == 1:
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif FUNCTION == 2:  # (1 + tanh u) / 2 is 1 / (1 + e^-2u)
        value = value / (1.0 + exp(-1.5957691216057308 * (value + 0.044715 * value * value * value)))
    elif FUNCTION == 3:
        value = tl.where(value < 0.0, 0.0, value)
    elif FUNCTION == 4:
        value = tl.where(value < 0.0, 0.0, value * value)
    else:
        value = tl.where(value == value, sigmoid(value), value)  # NaN stays
    if GATED:
        up = tl.load(x + SIZE + dim, mask=dim < SIZE, other=0.0).to(tl.float32)
        if LIMITED:
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = value * (up + offset)
    tl.store(out + row * SIZE + dim, value.to(out.dtype.element_ty), mask=dim < SIZE)


@triton.jit
def gelu_part(x, out, x_outer, inner, x_inner, H: tl.constexpr, TILE: tl.constexpr, TANH: tl.constexpr):
    """Compute GELU of a tile of one row."""
    x = _row(x, x_outer, inner, x_inner)
    out += tl.program_id(0).to(tl.int64) * H
    dim = tl.program_id(1) * TILE + tl.arange(0, TILE)
    value = tl.load(x + dim, mask=dim < H, other=0.0).to(tl.float32)
    if TANH:  # (1 + tanh u) / 2 is 1 / (1 + e^-2u)
        result = value / (1.0 + exp(-1.5957691216057308 * (value + 0.044715 * value * value * value)))
    else:
        result = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(out + dim, result.to(out.dtype.element_ty), mask=dim < H)


# ---------------------------------------------------------------------------------------------------- norms


def rms_norm(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [H]
    eps: float,
) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) * weight, over the last dimension (Zhang & Sennrich 2019)."""
    return _rms_norm(x, None, weight, eps)


def add_rms_norm(
    x: Tensor,  # [T, H]
    residual: Tensor,  # [T, H], becomes x + residual in place
    weight: Tensor,  # [H]
    eps: float,
) -> Tensor:
    """Add x to the residual in place, and compute rms_norm of the sum."""
    return _rms_norm(x, residual, weight, eps)


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    check_dtype("x", x)
    x, out = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        tile, warps = norm_tile(x.shape[-1])
        of_residual = (x, 0) if residual is None else (residual, residual.stride(0))
        with on_device_of(x):
            rms_norm_row[(count_rows(x),)](
                x,
                of_residual[0],
                weight.contiguous(),
                out,
                *row_strides(x),
                of_residual[1],
                eps,
                x.shape[-1],
                tile,
                residual is not None,
                num_warps=warps,
            )
    return out


def layer_norm(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [H]
    bias: Tensor | None,  # [H]
    eps: float,
) -> Tensor:
    """Compute (x - mean) / sqrt(var + eps) * weight + bias, over the last dimension (Ba et al. 2016)."""
    check_dtype("x", x)
    x, out = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        tile, warps = norm_tile(x.shape[-1])
        weights = weight.contiguous(), (weight if bias is None else bias).contiguous()
        with on_device_of(x):
            layer_norm_row[(count_rows(x),)](
                x, *weights, out, *row_strides(x), eps, x.shape[-1], tile, bias is not None, num_warps=warps
            )
    return out


def gated_norm(x: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor:
    """Compute RMSNorm of each head, before or after the multiplication by silu(gate): [T, H]."""
    weight, eps, heads, first = norm
    check_dtype("x", x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        size = x.shape[1] // heads
        tile, warps = norm_tile(size)
        with on_device_of(x):
            gated_norm_part[(len(x) * heads,)](
                x, gate, weight.contiguous(), out, x.stride(0), gate.stride(0), eps, heads, size, tile, first == "gate",
                num_warps=warps,
            )  # fmt: skip
    return out


def norm_tile(size: int) -> tuple[int, int]:
    """Return the tile for rows of `size` elements, and its number of warps."""
    tile = min(triton.next_power_of_2(size), NORM_TILE)
    return tile, max(1, min(16, tile // 256))


# ----------------------------------------------------------------------------------------------------- rope


def rope(
    q: Tensor,  # [T, Hq, D], rotated in place
    k: Tensor,  # [T, Hkv, D], rotated in place
    positions: Tensor,  # int32 or int64 [T]
    cos: Tensor,  # fp32 [P, D_rot / 2]
    sin: Tensor,  # fp32 [P, D_rot / 2]
) -> None:
    """Rotate the pairs (i, i + D_rot/2) of the first D_rot dimensions by their position's angle (Su et al. 2021).

    Positions on the host are checked. Those on a GPU are not, since that would synchronise: a position outside the
    tables is clamped to them.
    """
    check_dtype("q", q)
    if positions.is_cpu or not len(cos):
        check_positions(positions, len(cos))
    half = cos.shape[1]
    if not len(q) or not half:
        return
    positions = positions.to(q.device, non_blocking=True).contiguous()
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    q_heads, k_heads = q.shape[1], k.shape[1]
    pairs = triton.next_power_of_2(half)
    tile = min(triton.next_power_of_2(max(q_heads, k_heads)), max(1, ROPE_TILE // pairs))
    with on_device_of(q):
        rope_row[(len(q), triton.cdiv(q_heads, tile) + triton.cdiv(k_heads, tile))](
            q,
            k,
            positions,
            cos,
            sin,
            len(cos),
            *q.stride()[:2],
            *k.stride()[:2],
            q_heads,
            k_heads,
            half,
            tile,
            pairs,
        )


# ---------------------------------------------------------------------------------------------- activations


def swiglu(
    gate_up: Tensor,  # [T, 2 * I]: gates, then ups
) -> Tensor:
    """Compute silu(gate) * up: [T, I] (Shazeer 2020)."""
    check_dtype("gate_up", gate_up)
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        rows = gate_up if gate_up.dim() == 2 and gate_up.stride(1) == 1 else gate_up.reshape(-1, 2 * size).contiguous()
        tile = min(triton.next_power_of_2(size), PART_TILE)
        with on_device_of(out):
            swiglu_part[(len(rows), triton.cdiv(size, tile))](rows, out, rows.stride(0), size, tile)
    return out


def gate(
    x: Tensor,  # [T, H], changed in place
    gate: Tensor,  # [T, H] or [T, 1]
) -> None:
    """Multiply x by sigmoid(gate) in place."""
    check_dtype("x", x)
    if x.numel():
        size, by_row = x.shape[1], gate.shape[1] == 1
        tile = min(triton.next_power_of_2(size), PART_TILE)
        with on_device_of(x):
            gate_part[(len(x), triton.cdiv(size, tile))](gate, x, gate.stride(0), x.stride(0), size, tile, by_row)


def activate(
    x: Tensor,  # [T, 2 I] with a gate, else [T, I]
    activation: Activation,
) -> Tensor:
    """Compute the activation between the linears of an MLP: [T, I]."""
    check_dtype("x", x)
    size = activation.out_size(x.shape[1])
    out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    if out.numel():
        rows = x if x.stride(1) == 1 else x.contiguous()
        tile, limited = min(triton.next_power_of_2(size), PART_TILE), activation.limit is not None
        with on_device_of(x):
            activate_part[(len(rows), triton.cdiv(size, tile))](
                rows, out, rows.stride(0), activation.slope, activation.limit or 0.0, activation.offset,
                size, tile, FUNCTIONS.index(activation.function), activation.gated, limited,
            )  # fmt: skip
    return out


def gelu(
    x: Tensor,  # [..., I]
    approximate: Literal["none", "tanh"],
) -> Tensor:
    """Compute GELU in its exact (erf) or its tanh form (Hendrycks & Gimpel 2016)."""
    check_dtype("x", x)
    x, out = as_rows(x), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        size = x.shape[-1]
        tile = min(triton.next_power_of_2(size), PART_TILE)
        with on_device_of(x):
            gelu_part[(count_rows(x), triton.cdiv(size, tile))](
                x, out, *row_strides(x), size, tile, approximate == "tanh"
            )
    return out
