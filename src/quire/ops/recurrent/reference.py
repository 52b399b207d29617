"""The specification of layers with a recurrent state: plain PyTorch, row by row in the order that `recurrent.py` gives.

Sums are computed in the dtype of the records, fp32 or float64, and rounded once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops.recurrent.calls import Convolution, Recurrence, Scan
from quire.ops.recurrent.plan import RecurrentPlan
from quire.ops.recurrent.records import PIECE, RecurrentCache

EPS = 1e-6  # of the L2 norm of queries and keys


class Sequence(NamedTuple):
    """The tokens of one sequence in a step."""

    rows: slice  # of the step's tokens
    first: int  # position of the first one
    end: int  # position after the last one
    states: list[int]  # state record of each piece, starting with that of the first row; -1: none
    records: list[int]  # row record of each piece


def sequences(plan: RecurrentPlan) -> Iterator[Sequence]:
    """Yield the plan's sequences that have rows."""
    starts = plan.query_starts.tolist()
    for s in range(plan.num_seqs):
        rows, end = slice(starts[s], starts[s + 1]), int(plan.context_lens[s])
        if rows.stop > rows.start:
            first = end - (rows.stop - rows.start)
            yield Sequence(rows, first, end, plan.state_tables[s].tolist(), plan.row_tables[s].tolist())


# ------------------------------------------------------------------------------------------------- convolution


def convolve(
    x: Tensor,  # [T, W]
    convolution: Convolution,
    cache: RecurrentCache,
    plan: RecurrentPlan,
) -> Tensor:
    """Implement `Backend.convolve`."""
    weight, bias, activation = convolution
    taps = weight.shape[1]
    out = torch.zeros_like(x, dtype=weight.dtype)
    for seq in sequences(plan):
        known = torch.cat([_inputs_before(seq, taps, cache), x[seq.rows]])  # [K - 1 + rows, W]
        total = torch.zeros_like(out[seq.rows]) if bias is None else bias.expand_as(out[seq.rows])
        for i in range(taps):
            total = total + weight[:, i] * known[i : i + len(total)].to(weight.dtype)
        out[seq.rows] = F.silu(total) if activation == "silu" else total
        _keep_inputs(seq, taps, known, cache)
    return out.to(x.dtype)


def _inputs_before(seq: Sequence, taps: int, cache: RecurrentCache) -> Tensor:
    """Return the K - 1 inputs before the step's first row: [K - 1, W], zeros before the sequence's start."""
    piece, slot = divmod(seq.first, PIECE)
    before = cache.inputs.new_zeros(taps - 1, cache.inputs.shape[2]) if piece == 0 else cache.tail[seq.states[0]]
    if slot > 0:
        before = torch.cat([before, cache.inputs[seq.records[0], :slot]])
    return before[slot:]


def _keep_inputs(seq: Sequence, taps: int, known: Tensor, cache: RecurrentCache) -> None:
    """Store inputs in the records. `known` is [K - 1 + rows, W], ending with the step's inputs."""
    begin = seq.first // PIECE
    for j in range(seq.end // PIECE - begin + 1):
        boundary = (begin + j) * PIECE
        if j > 0 and seq.states[j] >= 0:
            cache.tail[seq.states[j]] = known[boundary - seq.first :][: taps - 1]
        low, high = max(seq.first, boundary), min(seq.end, boundary + PIECE)
        if seq.records[j] >= 0 and low < high:
            from_first = known[taps - 1 :]
            cache.inputs[seq.records[j], low - boundary : high - boundary] = from_first[
                low - seq.first : high - seq.first
            ]


# ------------------------------------------------------------------------------------------------- recurrences


def recur(
    x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv]
    gates: Tensor,  # [T, 2 * Hv] or [T, Hv]
    recurrence: Recurrence,
    cache: RecurrentCache,
    plan: RecurrentPlan,
) -> Tensor:
    """Implement `Backend.gated_delta` and `Backend.state_space`."""
    spec = plan.spec
    decay_rate, dt_bias, skip, dt_limits, beta_scale = recurrence
    q, k, v = recurrence.parts(x.to(spec.state_dtype), spec)
    q, k = (part.reshape(len(x), spec.num_k_heads, spec.dim_k) for part in (q, k))
    v = v.reshape(len(x), spec.num_heads, spec.dim_v)
    gates = gates.to(spec.state_dtype)
    if skip is None:
        q, k = _normalised(q) * (1 / math.sqrt(spec.dim_k)), _normalised(k)
        b, a = gates.chunk(2, dim=1)
        beta, decay = torch.sigmoid(b) * beta_scale, decay_rate * F.softplus(a + dt_bias)
        out = _recur(q, k, decay, lambda row, recalled: beta[row, :, None] * (v[row] - recalled), cache, plan)
    else:
        step = F.softplus(gates + dt_bias).clamp(*dt_limits)
        out = _recur(q, k, decay_rate * step, lambda row, _: step[row, :, None] * v[row], cache, plan)
        out = out + skip[:, None] * v
    return out.flatten(1).to(x.dtype)


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _recur(
    q: Tensor,  # [T, Hk, Dk]
    k: Tensor,  # [T, Hk, Dk]
    decay: Tensor,  # [T, Hv]: g
    update: Callable[[int, Tensor], Tensor],  # returns u_t [Hv, Dv] of a row, given Sᵀk before it
    cache: RecurrentCache,
    plan: RecurrentPlan,
) -> Tensor:
    """Return o: [T, Hv, Dv]."""
    spec = plan.spec
    out = q.new_zeros(len(q), spec.num_heads, spec.dim_v)
    plan.nonfinite.copy_((~(k.isfinite().all(2).all(1) & decay.isfinite().all(1))).int() | plan.nonfinite)
    for seq in sequences(plan):
        piece = _Piece.before(seq, cache, plan)
        for row, position in zip(range(seq.rows.start, seq.rows.stop), range(seq.first, seq.end), strict=True):
            if position % PIECE == 0 and position > seq.first:
                piece = piece.after()
            out[row] = piece.add(position % PIECE, q[row], k[row], decay[row], partial(update, row))
            if not piece.updates[:, position % PIECE].isfinite().all():
                plan.nonfinite[row] = 1
            j = (position + 1) // PIECE - seq.first // PIECE
            if (position + 1) % PIECE == 0 and seq.states[j] >= 0:
                cache.state[seq.states[j]] = piece.after().state
            record = seq.records[position // PIECE - seq.first // PIECE]
            if record >= 0:
                piece.keep(position % PIECE, record, cache)
    return out


class _Piece(NamedTuple):
    """The state before a piece and its rows so far."""

    state: Tensor  # [Hv, Dk, Dv]
    keys: Tensor  # [Hk, C, Dk]
    updates: Tensor  # [Hv, C, Dv]
    decays: Tensor  # [Hv, C]

    @classmethod
    def empty(cls, state: Tensor, num_k_heads: int) -> _Piece:
        heads, dim_k, dim_v = state.shape
        keys, updates = state.new_zeros(num_k_heads, PIECE, dim_k), state.new_zeros(heads, PIECE, dim_v)
        return cls(state, keys, updates, state.new_zeros(heads, PIECE))

    @classmethod
    def before(cls, seq: Sequence, cache: RecurrentCache, plan: RecurrentPlan) -> _Piece:
        """Read the piece of the sequence's first row from the records."""
        spec, (index, slot) = plan.spec, divmod(seq.first, PIECE)
        zeros = cache.state.new_zeros(spec.num_heads, spec.dim_k, spec.dim_v)
        piece = cls.empty(zeros if index == 0 else cache.state[seq.states[0]], spec.num_k_heads)
        if slot > 0:
            for rows, records in zip(piece[1:], (cache.keys, cache.updates, cache.decays), strict=True):
                rows[:, :slot] = records[seq.records[0], :, :slot]
        return piece

    def add(self, t: int, q: Tensor, k: Tensor, decay: Tensor, update: Callable[[Tensor], Tensor]) -> Tensor:
        """Add row t with q and k [Hk, Dk] and decay [Hv], and return o_t: [Hv, Dv]."""
        self.decays[:, t] = decay + (self.decays[:, t - 1] if t > 0 else 0.0)
        self.keys[:, t] = k
        self.updates[:, t] = update(self._recalled(k, t, t))
        return self._recalled(q, t, t + 1)

    def _recalled(self, x: Tensor, t: int, count: int) -> Tensor:
        """Multiply the state and the first `count` rows by x, [Hk, Dk], with the decays of row t: [Hv, Dv]."""
        groups = len(self.updates) // len(self.keys)
        from_state = torch.einsum("hk,hkv->hv", x.repeat_interleave(groups, 0), self.state)
        faded = torch.exp(self.decays[:, t, None] - self.decays[:, :count])  # [Hv, count]
        weights = faded * torch.einsum("hk,hck->hc", x, self.keys[:, :count]).repeat_interleave(groups, 0)
        mixed = torch.einsum("hc,hcv->hv", weights, self.updates[:, :count])
        return torch.exp(self.decays[:, t, None]) * from_state + mixed

    def after(self) -> _Piece:
        """Return the next piece. This one must be complete."""
        groups = len(self.updates) // len(self.keys)
        last = self.decays[:, -1:]  # [Hv, 1]
        keys = torch.exp(last - self.decays)[..., None] * self.keys.repeat_interleave(groups, 0)
        state = torch.exp(last)[..., None] * self.state + torch.einsum("hck,hcv->hkv", keys, self.updates)
        return self.empty(state, len(self.keys))

    def keep(self, t: int, record: int, cache: RecurrentCache) -> None:
        """Store row t in the records."""
        for rows, records in zip(self[1:], (cache.keys, cache.updates, cache.decays), strict=True):
            records[record, :, t] = rows[:, t]


# -------------------------------------------------------------------------------------------------------- scans


def scan(
    x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv] or [T, Hv * Dv]
    gates: Tensor,  # [T, Hv * Dk] or [T, Hv * Dv]
    side: Tensor,  # [T, Hv], [T, 2 * Hk * Dk] or [T, Hv * Dv]
    weights: Scan,
    cache: RecurrentCache,
    plan: RecurrentPlan,
) -> Tensor:
    """Implement `Backend.scan`."""
    spec = plan.spec
    out = torch.zeros(len(x), spec.num_heads, spec.dim_v, dtype=spec.state_dtype)
    wide, gates, side = (one.to(spec.state_dtype) for one in (x, gates, side))
    rows = _ScanRows(wide, gates, side, weights, plan)
    for seq in sequences(plan):
        index, slot = divmod(seq.first, PIECE)
        state = cache.state[seq.states[0]].clone() if index else cache.state.new_zeros(cache.state.shape[1:])
        for t in range(slot):  # rows that earlier steps computed
            k, u, decay = (records[seq.records[0], :, t] for records in (cache.keys, cache.updates, cache.decays))
            state = rows.faded(state, decay) + rows.outer(k, u)
        for row, position in zip(range(seq.rows.start, seq.rows.stop), range(seq.first, seq.end), strict=True):
            q, k, decay = rows.keys[row][0], rows.keys[row][1], rows.decays[row]
            state = rows.faded(state, decay)
            u = rows.update(row, position, state)
            state = state + rows.outer(k, u)
            out[row] = torch.einsum("hk,hkv->hv", rows.of_heads(q), state)
            if not all(one.isfinite().all() for one in (k, u, decay)):
                plan.nonfinite[row] = 1
            j = position // PIECE - seq.first // PIECE
            if seq.records[j] >= 0:
                for records, one in zip((cache.keys, cache.updates, cache.decays), (k, u, decay), strict=True):
                    records[seq.records[j], :, position % PIECE] = one
            if (position + 1) % PIECE == 0 and seq.states[j + 1] >= 0:
                cache.state[seq.states[j + 1]] = state
    if weights.skip is not None:
        out = out + weights.skip.view(spec.num_heads, spec.dim_v) * rows.values
    return out.flatten(1).to(x.dtype)


class _ScanRows:
    """The queries, keys, decays and updates of a step's rows."""

    def __init__(self, x: Tensor, gates: Tensor, side: Tensor, weights: Scan, plan: RecurrentPlan) -> None:
        spec, (rule, rate, bias, _, scale, floor) = plan.spec, weights
        count, heads, self.weights = len(x), spec.num_heads, weights
        self.groups = heads // spec.num_k_heads
        if rule == "delta":
            keys, values = x[:, : 2 * spec.key_width], x[:, 2 * spec.key_width :]
            keys = _normalised(keys.reshape(count, 2, spec.num_k_heads, spec.dim_k))
            keys[:, 0] *= 1 / math.sqrt(spec.dim_k)
            raw, rates = (gates + bias).view(count, heads, spec.dim_k), rate[:, None]
            log = rates * F.softplus(raw) if floor == 0.0 else floor * torch.sigmoid(-rates * raw)
            self.decays, self.beta = log.exp(), torch.sigmoid(side) * scale
        elif rule == "selective":
            keys, values = side.reshape(count, 2, spec.num_k_heads, spec.dim_k), x
            self.decays = F.softplus(gates + bias).view(count, heads, spec.dim_v)
        else:
            keys, values = x.new_ones(count, 2, 1, 1), x
            self.decays = torch.sigmoid(gates + bias[0]).view(count, heads, spec.dim_v)
            self.inputs = torch.sigmoid(side + bias[1]).view(count, heads, spec.dim_v)
        self.keys, self.values = keys, values.reshape(count, heads, spec.dim_v)

    def of_heads(self, keys: Tensor) -> Tensor:
        """Return the keys or queries of each head of the state: [Hv, Dk]."""
        return keys.repeat_interleave(self.groups, 0)

    def outer(self, k: Tensor, u: Tensor) -> Tensor:
        """Return k uᵀ of each head: [Hv, Dk, Dv]."""
        return self.of_heads(k)[:, :, None] * u[:, None]

    def faded(self, state: Tensor, decay: Tensor) -> Tensor:
        """Return the state after its decay, which is e^g [Hv, Dk], or dt [Hv, Dv]."""
        if self.weights.rule == "delta":
            return decay[:, :, None] * state
        return torch.exp(self.weights.rate * decay[:, None]) * state

    def update(self, row: int, position: int, faded: Tensor) -> Tensor:
        """Return u: [Hv, Dv]."""
        value = self.values[row]
        if self.weights.rule == "delta":
            recalled = torch.einsum("hk,hkv->hv", self.of_heads(self.keys[row][1]), faded)
            return self.beta[row, :, None] * (value - recalled)
        if self.weights.rule == "selective":
            return self.decays[row] * value
        u = self.inputs[row] * value
        return u * torch.sqrt(-torch.expm1(2 * self.weights.rate[:, 0] * self.decays[row])) if position else u
