"""Recurrences whose decay differs between the elements of a state: KDA, Mamba-1, RG-LRU.

`quire.ops.recurrent` has the formulas and the dimensions. A program has a head and some of its Dv columns, whose state
it keeps in registers and updates row by row. It begins with the state before the piece of its first row. Rows of that
piece that earlier steps have computed are added from their record, by the same operations.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.recurrent.calls import Scan
from quire.ops.recurrent.records import PIECE, RecurrentCache
from quire.ops.triton.functions import exp, is_finite, sigmoid, softplus
from quire.ops.triton.launch import on_device_of
from quire.ops.triton.recurrent_plan import TritonRecurrentPlan

COLUMNS, WARPS = 32, 4
C = tl.constexpr(PIECE)
EPS = tl.constexpr(1e-6)  # of the L2 norm of queries and keys


@triton.jit
def _faded(S, decay, rate, DELTA: tl.constexpr):
    """Return the state after its decay: e^g of each key element for DELTA, else dt of each column."""
    if DELTA:
        faded = S * decay[:, None]
    else:
        faded = S * exp(rate * decay[None, :])
    return faded


@triton.jit
def _one_minus_exp(x):
    """Return 1 - e^x for x <= 0, without cancellation."""
    p = 1.0 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720 + x / 5040)))))
    return tl.where(x > -0.5, -x * p, 1.0 - exp(x))


@triton.jit
def scan_columns(
    x, gates, side, out, rate, bias, skip, state, keys, updates, decays, nonfinite,
    starts, lens, offsets, records, x_token, gates_token, side_token,
    state_record, keys_record, updates_record, decays_record, beta_scale, floor, scale,
    HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM_K: tl.constexpr, DIM_V: tl.constexpr,
    K_TILE: tl.constexpr, TILE: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Compute some columns of a head, row by row of a sequence."""
    DELTA: tl.constexpr = RULE == "delta"
    LRU: tl.constexpr = RULE == "lru"
    seq = tl.program_id(0)
    start = tl.load(starts + seq)
    end = tl.load(lens + seq)
    first = end - (tl.load(starts + seq + 1) - start)
    if first == end:
        return
    records += 2 * tl.load(offsets + seq).to(tl.int64)
    head = tl.program_id(1)
    k_head = head // (HEADS // K_HEADS)
    dim = tl.arange(0, K_TILE)
    column = tl.program_id(2) * TILE + tl.arange(0, TILE)
    has_dim, has_column = dim < DIM_K, column < DIM_V
    has = has_dim[:, None] & has_column[None, :]
    at_state = head * DIM_K * DIM_V + dim[:, None] * DIM_V + column[None, :]
    value = head * DIM_V + column
    stores_keys = has_dim & (head % (HEADS // K_HEADS) == 0) & (tl.program_id(2) == 0)

    if DELTA:
        rates = tl.load(rate + head)
        biases = tl.load(bias + head * DIM_K + dim, mask=has_dim, other=0.0)
    else:
        rates = tl.load(rate + at_state, mask=has, other=0.0)
        biases = tl.load(bias + value, mask=has_column, other=0.0)
    S = tl.zeros([K_TILE, TILE], tl.float32)
    if first >= C:
        S = tl.load(state + tl.load(records).to(tl.int64) * state_record + at_state, mask=has, other=0.0)

    # ---- rows that earlier steps have computed
    record = tl.load(records + 1).to(tl.int64)
    for t in tl.range(0, first % C, num_stages=1):
        key = tl.load(keys + record * keys_record + (k_head * C + t) * DIM_K + dim, mask=has_dim, other=0.0)
        u = tl.load(updates + record * updates_record + (head * C + t) * DIM_V + column, mask=has_column, other=0.0)
        of_row = decays + record * decays_record
        if DELTA:
            decay = tl.load(of_row + (head * C + t) * DIM_K + dim, mask=has_dim, other=0.0)
        else:
            decay = tl.load(of_row + (head * C + t) * DIM_V + column, mask=has_column, other=0.0)
        S = _faded(S, decay, rates, DELTA) + key[:, None] * u[None, :]

    # ---- rows of this step
    for position in tl.range(first, end, num_stages=1):
        row = (start + position - first).to(tl.int64)
        piece, t = position // C - first // C, position % C
        record = tl.load(records + 2 * piece + 1).to(tl.int64)
        kept = record >= 0
        if DELTA:
            queries = x + row * x_token + k_head * DIM_K + dim
            query = tl.load(queries, mask=has_dim, other=0.0).to(tl.float32)
            key = tl.load(queries + K_HEADS * DIM_K, mask=has_dim, other=0.0).to(tl.float32)
            query *= tl.rsqrt(tl.sum(query * query, 0) + EPS) * scale
            key *= tl.rsqrt(tl.sum(key * key, 0) + EPS)
            v = tl.load(x + row * x_token + 2 * K_HEADS * DIM_K + value, mask=has_column, other=0.0).to(tl.float32)
            raw = tl.load(gates + row * gates_token + head * DIM_K + dim, mask=has_dim, other=0.0).to(tl.float32)
            raw += biases
            g = rates * softplus(raw)
            if floor < 0:
                g = floor * sigmoid(-rates * raw)
            decay = exp(g)
            S = _faded(S, decay, rates, DELTA)
            beta = sigmoid(tl.load(side + row * side_token + head).to(tl.float32)) * beta_scale
            u = (v - tl.sum(S * key[:, None], 0)) * beta
            odd = tl.sum((is_finite(decay) == 0).to(tl.int32), 0)
            to_decays = decays + record * decays_record + (head * C + t) * DIM_K + dim
            tl.store(to_decays, decay, mask=has_dim & kept & (tl.program_id(2) == 0))
        else:
            v = tl.load(x + row * x_token + value, mask=has_column, other=0.0).to(tl.float32)
            raw = tl.load(gates + row * gates_token + value, mask=has_column, other=0.0).to(tl.float32) + biases
            if LRU:
                key = tl.where(has_dim, 1.0, 0.0)
                query = key
                decay = sigmoid(raw)
                of_input = tl.load(side + row * side_token + value, mask=has_column, other=0.0).to(tl.float32)
                of_input += tl.load(bias + HEADS * DIM_V + value, mask=has_column, other=0.0)
                u = sigmoid(of_input) * v
                least = tl.load(rate + value, mask=has_column, other=0.0)
                u = tl.where(position > 0, u * tl.sqrt(_one_minus_exp(2.0 * least * decay)), u)
            else:
                queries = side + row * side_token + k_head * DIM_K + dim
                query = tl.load(queries, mask=has_dim, other=0.0).to(tl.float32)
                key = tl.load(queries + K_HEADS * DIM_K, mask=has_dim, other=0.0).to(tl.float32)
                decay = softplus(raw)
                u = decay * v
            S = _faded(S, decay, rates, DELTA)
            odd = tl.sum(((is_finite(decay) == 0) & has_column).to(tl.int32), 0)
            to_decays = decays + record * decays_record + (head * C + t) * DIM_V + column
            tl.store(to_decays, decay, mask=has_column & kept)
        tl.store(keys + record * keys_record + (k_head * C + t) * DIM_K + dim, key, mask=stores_keys & kept)
        to_updates = updates + record * updates_record + (head * C + t) * DIM_V + column
        tl.store(to_updates, u, mask=has_column & kept)
        S += key[:, None] * u[None, :]
        result = tl.sum(S * query[:, None], 0)
        if skip is not None:
            result += tl.load(skip + value, mask=has_column, other=0.0) * v
        tl.store(out + row * HEADS * DIM_V + value, result.to(out.dtype.element_ty), mask=has_column)
        odd += tl.sum((is_finite(u) == 0).to(tl.int32), 0) + tl.sum((is_finite(key) == 0).to(tl.int32), 0)
        tl.store(nonfinite + row, 1, mask=odd > 0)
        after = tl.load(records + 2 * piece + 2, mask=t == C - 1, other=-1).to(tl.int64)
        tl.store(state + after * state_record + at_state, S, mask=has & (after >= 0))


def scan(
    x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv] or [T, Hv * Dv]
    gates: Tensor,  # [T, Hv * Dk] or [T, Hv * Dv]
    side: Tensor,  # [T, Hv], [T, 2 * Hk * Dk] or [T, Hv * Dv]
    weights: Scan,
    cache: RecurrentCache,
    plan: TritonRecurrentPlan,
) -> Tensor:
    """Compute a scan: [T, Hv * Dv]."""
    spec, (rule, rate, bias, skip, beta_scale, floor) = plan.spec, weights
    out = torch.empty(len(x), spec.value_width, dtype=x.dtype, device=x.device)
    if out.numel():
        records = cache.state, cache.keys, cache.updates, cache.decays
        tile = min(COLUMNS, triton.next_power_of_2(spec.dim_v))
        with on_device_of(out):
            scan_columns[(plan.num_seqs, spec.num_heads, triton.cdiv(spec.dim_v, tile))](
                x, gates, side, out, rate.contiguous(), bias.contiguous(), skip, *records, plan.nonfinite,
                plan.starts, plan.lens, plan.offsets, plan.records,
                x.stride(0), gates.stride(0), side.stride(0), *(one.stride(0) for one in records),
                beta_scale, floor, 1 / math.sqrt(spec.dim_k),
                spec.num_heads, spec.num_k_heads, spec.dim_k, spec.dim_v,
                triton.next_power_of_2(spec.dim_k), tile, rule,
                num_warps=WARPS, num_stages=1, enable_fp_fusion=False,
            )  # fmt: skip
    return out
