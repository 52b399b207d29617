"""Layers with a recurrent state: the causal convolution, and the recurrences of the gated delta rule and of Mamba-2.

`quire.ops.recurrent` has the formulas and the dimensions. A program of the convolution has some channels of one piece.
A program of a recurrence has a head and some of its Dv columns, and iterates over the sequence's pieces. Row t of a
piece is row t of every tile, even if it is the only row of a step, so its sums have one order for every division into
steps: the rows before it are computed, or read from their record. Products are in fp32, with the elements of keys in
ascending order.

A state does not fit the registers: from piece to piece it is stored in memory, in its record or, without a record, in
temporary memory of the sequence. A step of one row reads it once.

In the delta rule, row t depends on the updates of the rows before it:

    u_t = r_t - Σ_{j<t} beta_t · e^{G_t - G_j} · (k_j·k_t) · u_j    where    r_t = beta_t · (v_t - e^{G_t} · Sᵀk_t)

It is one sum over a tile whose rows before t hold u and whose row t holds r.

Missing rows are zeros. A weight of 0 does not exclude numbers that are not finite: those of u are left out of the
product, and rows that see them become NaN. Rows of a matrix product do not affect each other.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.recurrent.calls import Convolution, Recurrence
from quire.ops.recurrent.records import PIECE, RecurrentCache
from quire.ops.triton.functions import exp, is_finite, sigmoid, softplus
from quire.ops.triton.launch import on_device_of
from quire.ops.triton.recurrent_plan import TritonRecurrentPlan

CHANNELS = 128  # of a program of the convolution
COLUMNS, WARPS, STAGES = 64, 8, 2  # of a program of a recurrence

C = tl.constexpr(PIECE)
DEPTH = tl.constexpr(16)  # elements of the keys that are multiplied at a time; more would exceed the registers
EPS = tl.constexpr(1e-6)  # of the L2 norm of queries and keys


@triton.jit
def _sequence(starts, lens, offsets, records, seq):
    """Return a sequence's first row in the step, the positions of that row and after the last, and its records."""
    start = tl.load(starts + seq)
    end = tl.load(lens + seq)
    first = end - (tl.load(starts + seq + 1) - start)
    return start, first, end, records + 2 * tl.load(offsets + seq).to(tl.int64)


# ------------------------------------------------------------------------------------------------- convolution


@triton.jit
def _known(x, inputs, tail, position, first, end, channel, here, x_token, W: tl.constexpr, TAPS: tl.constexpr):
    """Load the inputs at these positions, of the step or before it; zeros before the sequence's start."""
    base = first // C * C  # the records are those of this position
    slot = position.to(tl.int64)[:, None]
    in_step = here & (slot >= first) & (slot < end)
    in_piece = here & (slot >= base) & (slot < first)
    in_tail = here & (slot >= 0) & (slot < base)
    new = tl.load(x + (slot - first) * x_token + channel, mask=in_step, other=0.0)
    piece = tl.load(inputs + (slot - base) * W + channel, mask=in_piece, other=0.0)
    before = tl.load(tail + (slot - (base - TAPS + 1)) * W + channel, mask=in_tail, other=0.0)
    return tl.where(slot >= first, new, tl.where(slot >= base, piece, before))


@triton.jit
def convolve_piece(
    x, weight, bias, out, tail, inputs, starts, lens, offsets, records, x_token, tail_record, inputs_record,
    W: tl.constexpr, TAPS: tl.constexpr, TAIL_TILE: tl.constexpr, TILE: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of a piece, and store the inputs of its rows in its records."""
    start, first, end, records = _sequence(starts, lens, offsets, records, tl.program_id(0))
    piece = first // C + tl.program_id(1)
    if (first == end) | (piece > end // C):
        return
    channel = tl.program_id(2) * TILE + tl.arange(0, TILE)
    has = channel < W
    here = has[None, :]
    at = channel[None, :]
    x += start.to(tl.int64) * x_token
    out += start.to(tl.int64) * W
    old_tail = tail + tl.load(records).to(tl.int64) * tail_record
    old_inputs = inputs + tl.load(records + 1).to(tl.int64) * inputs_record
    position = piece * C + tl.arange(0, C)
    new = ((position >= first) & (position < end))[:, None] & here
    total = tl.zeros([C, TILE], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=has, other=0.0)[None, :]
    for tap in range(TAPS):
        source = position - TAPS + 1 + tap
        known = _known(x, old_inputs, old_tail, source, first, end, at, new, x_token, W, TAPS)
        total = tl.fma(
            tl.load(weight + channel * TAPS + tap, mask=has, other=0.0)[None, :], known.to(tl.float32), total
        )
    if SILU:
        total *= sigmoid(total)
    step_row = (position - first).to(tl.int64)[:, None]
    tl.store(out + step_row * W + at, total.to(out.dtype.element_ty), mask=new)

    records += 2 * tl.program_id(1)
    record = tl.load(records + 1).to(tl.int64)
    kept = tl.load(x + step_row * x_token + at, mask=new, other=0.0)
    to = inputs + record * inputs_record + tl.arange(0, C)[:, None] * W + at
    tl.store(to, kept, mask=new & (record >= 0))
    if TAPS > 1:
        record = tl.load(records).to(tl.int64)
        if (tl.program_id(1) > 0) & (record >= 0):
            row = tl.arange(0, TAIL_TILE)
            mask = (row < TAPS - 1)[:, None] & here
            source = piece * C - TAPS + 1 + row
            known = _known(x, old_inputs, old_tail, source, first, end, at, mask, x_token, W, TAPS)
            tl.store(tail + record * tail_record + row[:, None] * W + at, known, mask=mask)


def convolve(
    x: Tensor,  # [T, W]
    convolution: Convolution,
    cache: RecurrentCache,
    plan: TritonRecurrentPlan,
) -> Tensor:
    """Compute the causal convolution of each channel: [T, W]."""
    weight, bias, activation = convolution
    width, taps = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        tile = min(CHANNELS, triton.next_power_of_2(width))
        with on_device_of(x):
            convolve_piece[(plan.num_seqs, plan.num_pieces, triton.cdiv(width, tile))](
                x, weight.contiguous(), bias, out, cache.tail, cache.inputs, *_step(plan),
                x.stride(0), cache.tail.stride(0), cache.inputs.stride(0),
                width, taps, triton.next_power_of_2(max(1, taps - 1)), tile, activation == "silu",
            )  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------------- recurrences


@triton.jit
def _row_of(x, row, t):
    """Return element t of a vector."""
    return tl.sum(tl.where(row == t, x, 0.0), 0)


@triton.jit
def _slice(x, x_token, token, new, first, DIM_K: tl.constexpr):
    """Load elements first..first + DEPTH of the new rows' keys or queries; zeros in the other rows."""
    dim = first + tl.arange(0, DEPTH)
    at = x + token[:, None] * x_token + dim[None, :]
    return tl.load(at, mask=new[:, None] & (dim < DIM_K)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _scale_of(x, x_token, token, new, NORMED: tl.constexpr, DIM_K: tl.constexpr):
    """Return the factor of each row of keys or queries: 1 / its L2 norm if NORMED, otherwise 1."""
    square = tl.zeros([C, DEPTH], tl.float32)
    if not NORMED:
        return tl.full([C], 1.0, tl.float32)
    for first in tl.range(0, DIM_K, DEPTH):
        part = _slice(x, x_token, token, new, first, DIM_K)
        square += part * part
    return tl.rsqrt(tl.sum(square, 1) + EPS)


@triton.jit
def _keys(k, x_token, token, new, scale, kept, old, first, DIM_K: tl.constexpr):
    """Return elements first..first + DEPTH of a piece's keys. The old ones are read from the record `kept`."""
    dim = first + tl.arange(0, DEPTH)
    at = kept + tl.arange(0, C)[:, None] * DIM_K + dim[None, :]
    before = tl.load(at, mask=old[:, None] & (dim < DIM_K)[None, :], other=0.0)
    return tl.where(old[:, None], before, _slice(k, x_token, token, new, first, DIM_K) * scale[:, None])


@triton.jit
def _before(state, passed, record, state_record, slot, STATE: tl.constexpr):
    """Return the address of the state before a piece: its record or, without one, the temporary memory `passed`."""
    at = passed + slot.to(tl.int64) * STATE
    if record >= 0:
        at = state + record.to(tl.int64) * state_record
    return at


@triton.jit
def recur_columns(
    q, k, v, gates, out, decay_rate, dt_bias, skip, state, keys, updates, decays, passed, nonfinite,
    starts, lens, offsets, records, slots, dt_low, dt_high, beta_scale, scale,
    x_token, gates_token, state_record, keys_record, updates_record, decays_record,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a head, piece by piece of a sequence. Without `skip` it is the gated delta rule."""
    start, first, end, records = _sequence(starts, lens, offsets, records, tl.program_id(0))
    if first == end:
        return
    DELTA: tl.constexpr = skip is None
    STATE: tl.constexpr = HEADS * DIM_K * DIM_V
    slot = tl.load(slots + tl.program_id(0))
    head = tl.program_id(1)
    k_head = head // (HEADS // K_HEADS)
    row = tl.arange(0, C)
    depth = tl.arange(0, DEPTH)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    has_column = (column < DIM_V)[None, :]
    stores_keys = (head % (HEADS // K_HEADS) == 0) & (tl.program_id(2) == 0)
    rate = tl.load(decay_rate + head)
    offset = tl.load(dt_bias + head)

    q += k_head * DIM_K
    k += k_head * DIM_K
    v += head * DIM_V
    gates += head
    out += head * DIM_V
    state += head * DIM_K * DIM_V
    passed += head * DIM_K * DIM_V
    keys += k_head * C * DIM_K
    updates += head * C * DIM_V
    decays += head * C

    for piece in tl.range(first // C, tl.cdiv(end, C), num_stages=1):
        of_piece = records + 2 * (piece - first // C)
        low = tl.maximum(first - piece * C, 0)
        high = tl.minimum(end - piece * C, C)
        new = (row >= low) & (row < high)
        old = row < low
        token = (start + piece * C - first + row).to(tl.int64)
        record = tl.load(of_piece + 1).to(tl.int64)
        kept = keys + record * keys_record
        before = _before(state, passed, tl.load(of_piece), state_record, slot, STATE)

        # ---- the rows' log-decays, and their sums
        step = tl.load(gates + token * gates_token, mask=new, other=0.0).to(tl.float32)
        if DELTA:
            beta = sigmoid(step) * beta_scale
            decay = tl.load(gates + token * gates_token + HEADS, mask=new, other=0.0).to(tl.float32)
            decay = rate * softplus(decay + offset)
        else:
            beta = softplus(step + offset)
            beta = tl.where(beta < dt_low, dt_low, tl.where(beta > dt_high, dt_high, beta))
            decay = rate * beta
        to_decays = decays + record * decays_record + row
        G = tl.load(to_decays, mask=old, other=0.0)
        total = _row_of(G, row, low - 1)
        for t in tl.range(low, high, num_stages=1):
            total += _row_of(decay, row, t)
            G = tl.where(row == t, total, G)
        tl.store(to_decays, G, mask=new & (tl.program_id(2) == 0) & (record >= 0))
        fading = exp(G)[:, None]
        between = exp(G[None, :] - G[:, None])  # [j, t]

        # ---- products with the state and with the rows' keys
        finite = is_finite(decay).to(tl.int32)
        of_keys = _scale_of(k, x_token, token, new, DELTA, DIM_K)
        of_queries = _scale_of(q, x_token, token, new, DELTA, DIM_K)
        if DELTA:
            of_queries *= scale
        recalled = tl.zeros([C, TILE], tl.float32)
        result = tl.zeros([C, TILE], tl.float32)
        alike = tl.zeros([C, C], tl.float32)  # k_j·k_t at [j, t]
        asked = tl.zeros([C, C], tl.float32)  # k_j·q_t
        for begin in tl.range(0, DIM_K, DEPTH):
            dim = begin + depth
            at = dim[:, None] * DIM_V + column[None, :]
            has = (dim < DIM_K)[:, None] & has_column & (piece > 0)
            part = tl.load(before + at, mask=has, other=0.0)
            key = _keys(k, x_token, token, new, of_keys, kept, old, begin, DIM_K)
            query = _slice(q, x_token, token, new, begin, DIM_K) * of_queries[:, None]
            mask = new[:, None] & (dim < DIM_K)[None, :] & stores_keys & (record >= 0)
            tl.store(kept + row[:, None] * DIM_K + dim[None, :], key, mask=mask)
            finite &= tl.min(is_finite(key).to(tl.int32), 1)
            result = tl.dot(query, part, result, input_precision="ieee")
            asked = tl.dot(key, tl.trans(query), asked, input_precision="ieee")
            if DELTA:
                recalled = tl.dot(key, part, recalled, input_precision="ieee")
                alike = tl.dot(key, tl.trans(key), alike, input_precision="ieee")

        # ---- updates
        in_updates = new[:, None] & has_column
        value = tl.load(v + token[:, None] * x_token + column[None, :], mask=in_updates, other=0.0).to(tl.float32)
        to_updates = updates + record * updates_record + row[:, None] * DIM_V + column[None, :]
        U = tl.load(to_updates, mask=old[:, None] & has_column, other=0.0)
        if DELTA:
            U = tl.where(new[:, None], beta[:, None] * (value - fading * recalled), U)
            same = (row[:, None] == row[None, :]).to(tl.float32)
            weight = tl.where(row[:, None] < row[None, :], -beta[None, :] * between * alike, same)
            for t in tl.range(low, high, num_stages=1):
                of_row = tl.sum(tl.where(row[None, :] == t, weight, 0.0), 1)
                update = tl.sum(tl.where((row <= t)[:, None], of_row[:, None] * U, 0.0), 0)
                U = tl.where((row == t)[:, None], update[None, :], U)
        else:
            U = tl.where(new[:, None], beta[:, None] * value, U)
        tl.store(to_updates, U, mask=in_updates & (record >= 0))

        # ---- results
        is_number = is_finite(U)
        broken = tl.min(tl.where(is_number, C, row[:, None]), 0)  # the first row of a column that is not finite
        weight = tl.trans(tl.where(row[:, None] <= row[None, :], between * asked, 0.0))
        mixed = tl.dot(weight, tl.where(is_number, U, 0.0), input_precision="ieee")
        mixed = tl.where(row[:, None] >= broken[None, :], float("nan"), mixed)
        result = fading * result + mixed
        if not DELTA:
            result += tl.load(skip + head) * value
        to_out = out + token[:, None] * HEADS * DIM_V + column[None, :]
        tl.store(to_out, result.to(out.dtype.element_ty), mask=in_updates)
        finite &= tl.min(is_number.to(tl.int32), 1)
        tl.store(nonfinite + token, 1, mask=new & (finite == 0))

        # ---- the state before the next piece, if there is one
        record = tl.load(of_piece + 2, mask=high == C, other=-1)
        if (high == C) & ((record >= 0) | (end > (piece + 1) * C)):
            after = _before(state, passed, record, state_record, slot, STATE)
            last = _row_of(G, row, C - 1)
            faded = exp(last - G)[:, None]
            for begin in tl.range(0, DIM_K, DEPTH):
                dim = begin + depth
                at = dim[:, None] * DIM_V + column[None, :]
                has = (dim < DIM_K)[:, None] & has_column
                part = tl.load(before + at, mask=has & (piece > 0), other=0.0)
                key = faded * _keys(k, x_token, token, new, of_keys, kept, old, begin, DIM_K)
                part = tl.dot(tl.trans(key), U, exp(last) * part, input_precision="ieee")
                tl.store(after + at, part, mask=has)
            tl.debug_barrier()  # other threads read the stored state


def recur(
    x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv]
    gates: Tensor,  # [T, 2 * Hv] or [T, Hv]
    recurrence: Recurrence,
    cache: RecurrentCache,
    plan: TritonRecurrentPlan,
) -> Tensor:
    """Compute the gated delta rule or Mamba-2's recurrence: [T, Hv * Dv]."""
    spec = plan.spec
    decay_rate, dt_bias, skip, dt_limits, beta_scale = recurrence
    q, k, v = recurrence.parts(x, spec)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if out.numel():
        records = cache.state, cache.keys, cache.updates, cache.decays
        passed = cache.state.new_empty(plan.num_passing, *cache.state.shape[1:])
        with on_device_of(out):
            recur_columns[(plan.num_seqs, spec.num_heads, triton.cdiv(spec.dim_v, COLUMNS))](
                q, k, v, gates, out, decay_rate, dt_bias, skip, *records, passed, plan.nonfinite,
                *_step(plan), plan.slots, *dt_limits, beta_scale, 1 / math.sqrt(spec.dim_k),
                v.stride(0), gates.stride(0), *(x.stride(0) for x in records),
                spec.num_heads, spec.num_k_heads, spec.dim_k, spec.dim_v, COLUMNS,
                num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=False,
            )  # fmt: skip
    return out


def _step(plan: TritonRecurrentPlan) -> tuple[Tensor, ...]:
    return plan.starts, plan.lens, plan.offsets, plan.records
