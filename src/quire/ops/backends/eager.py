"""Runs a program operator by operator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor

from quire.errors import Unsupported
from quire.ops import program as op
from quire.ops.backend import Backend
from quire.ops.plan import AttentionPlan
from quire.ops.program import LayerCaches, Observer, Operator, Place, Plan, Program
from quire.ops.ragged import relative_attention, window_attention
from quire.ops.recurrent.plan import RecurrentPlan
from quire.ops.recurrent.records import RecurrentCache
from quire.ops.sparse import Selection, select
from quire.ops.spec import PagedKV
from quire.ops.weights.lora import LoraRows


class Hook(Protocol):
    """Sees the buffers and the selection before and after each operator, and may change or replace them."""

    def before(self, index: int, step: Step) -> None:
        """Called before operator `index` of the program."""

    def after(self, index: int, step: Step) -> None:
        """Called after operator `index` of the program."""


class EagerExecutor:
    """Runs a program by calls of a backend's operators, one call for each."""

    def __init__(self, backend: Backend, program: Program) -> None:
        if not backend.has_index and any(isinstance(operator, op.Select) for operator in program.operators):
            raise Unsupported(
                f"backend {backend.name!r} has no sparse attention with an indexer; attention_backend must be "
                "'cpu', 'reference' or 'gather'"
            )
        self.observer: Observer | None = None
        self.hook: Hook | None = None
        self._backend, self.program = backend, program
        self._last_uses = program.last_uses()

    def __call__(
        self,
        x: Tensor,  # [T, width], contiguous: the input; overwritten
        positions: Tensor,  # int64 [T]
        caches: LayerCaches,
        plans: Sequence[Plan],  # one per cache group or state kind
        rows: Tensor | None = None,  # int64 [R], ascending
        lora_slots: Tensor | None = None,  # int32 [T], host
    ) -> Tensor:
        """Run the program and return the output: [T, width], or [R, width]."""
        step = Step(self._backend, self.program, x, positions, caches, plans, rows, lora_slots)
        run = step.run if self.observer is None else partial(_observed, step, self.observer)
        for index, (operator, done_with) in enumerate(zip(self.program.operators, self._last_uses, strict=True)):
            if self.hook is not None:
                self.hook.before(index, step)
            run(operator)
            if self.hook is not None:
                self.hook.after(index, step)
            for buffer in done_with:
                del step.values[buffer]
        return step.values[self.program.output.buffer]


def _observed(step: Step, observer: Observer, operator: Operator) -> None:
    """Synchronise with a GPU before and after the operator, so that its time includes no other work."""
    wait = partial(_wait, step.positions.device)
    wait()
    start = time.perf_counter()
    step.run(operator)
    wait()
    observer(operator.kind, start, time.perf_counter() - start)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Step:
    """One run: the rows of each buffer that was computed so far."""

    def __init__(
        self,
        backend: Backend,
        program: Program,
        x: Tensor,
        positions: Tensor,
        caches: LayerCaches,
        plans: Sequence[Plan],
        rows: Tensor | None,
        lora_slots: Tensor | None,
    ) -> None:
        self.backend, self.program, self.positions, self.caches = backend, program, positions, caches
        self.plans, self.rows = plans, rows
        self.selection: Selection | None = None  # of the last indexer; None: rows attend to all keys that they see
        self.lora_rows = None if lora_slots is None else LoraRows(lora_slots)
        self.values = {program.input.buffer: x}  # [T, width]

    def at(self, place: Place) -> Tensor:
        """Return the columns at a place: [T, size]."""
        value = self.values[place.buffer]
        return value if place.size == value.shape[1] else value[:, place.first : place.first + place.size]

    def heads(self, place: Place, dim: int) -> Tensor:
        """Return the columns at a place, by heads: [T, size / dim, dim]."""
        x = self.at(place)
        return x.view(len(x), place.size // dim, dim)

    def kv(self, operator: op.Write | op.Attend | op.Select) -> tuple[PagedKV, AttentionPlan]:
        """Return the cache and the plan of the layer's attention."""
        return cast(PagedKV, self.caches.layer(operator.layer)), cast(AttentionPlan, self.plans[operator.group])

    def records(
        self, operator: op.Convolve | op.GatedDelta | op.StateSpace | op.ScanRows
    ) -> tuple[RecurrentCache, RecurrentPlan]:
        """Return the records and the plan of the layer's state."""
        cache, plan = self.caches.layer(operator.layer), self.plans[operator.group]
        return cast(RecurrentCache, cache), cast(RecurrentPlan, plan)

    def put(self, place: Place, value: Tensor) -> None:
        """Store a value, [T, ...], at a place. It replaces the buffer if the place is a whole one."""
        if place.size == self.program.buffers[place.buffer]:
            self.values[place.buffer] = value.flatten(1)
        else:
            self.at(place).copy_(value.flatten(1))

    def run(self, operator: Operator) -> None:
        """Run one operator."""
        backend, at = self.backend, self.at
        match operator:
            case op.Project():
                self.put(operator.out, operator.linear(at(operator.x)))
            case op.Normalize():
                self.put(operator.out, self._normalized(operator))
            case op.Rotate(q=q, k=k, head_dim=dim):
                backend.rope(self.heads(q, dim), self.heads(k, dim), self.positions, operator.cos, operator.sin)
            case op.Write(k=k, v=v, head_dim=dim):
                backend.write_kv(self.heads(k, dim), self.heads(v, v.size * dim // k.size), *self.kv(operator))
            case op.Select(q=q, k=k, x=x, weights=weights, top_k=top_k):
                kv, plan = self.kv(operator)
                rows = self.heads(q, k.size), at(k), weights(at(x)).float()
                self.selection = select(backend, *rows, cast(Tensor, kv.index), plan, top_k)
            case op.Attend(selected=True) if self.selection is not None:
                by_head = self.heads(operator.q, operator.head_dim)
                self.put(operator.out, self.selection.attention(by_head, *self.kv(operator), operator.scale))
            case op.Attend():
                attended = backend.attention(
                    self.heads(operator.q, operator.head_dim),
                    *self.kv(operator),
                    scale=operator.scale,
                    alibi_slopes=operator.alibi_slopes,
                    softcap=operator.softcap,
                    sinks=operator.sinks,
                    chunk=operator.chunk,
                )
                self.put(operator.out, attended)
            case op.AttendWithin(rule=rule, head_dim=dim):
                plan = cast(AttentionPlan, self.plans[operator.group])
                starts = plan.query_starts[: plan.num_seqs + 1]
                parts = [self.heads(place, dim) for place in (operator.q, operator.k, operator.v)]
                if isinstance(rule, int):
                    attended = window_attention(backend, parts, starts, operator.scale, rule)
                else:
                    attended = relative_attention(backend, parts, starts, operator.scale, rule)
                self.put(operator.out, attended)
            case op.Activate():
                self.put(operator.out, backend.activate(at(operator.x), operator.activation))
            case op.Multiply():
                at(operator.out).mul_(at(operator.x))
            case op.Add():
                at(operator.out).add_(at(operator.x))
            case op.Copy():
                self.put(operator.out, torch.cat([at(part.x) for part in operator.parts], 1))
            case op.Scale():
                at(operator.x).mul_(operator.factor)
            case op.Keep():
                if self.rows is not None:
                    for place in operator.buffers:
                        self.put(place, at(place)[self.rows])
                    if self.lora_rows is not None:
                        self.lora_rows = self.lora_rows.part(self.rows)
            case op.MixExperts():
                seen = None if operator.seen is None else at(operator.seen)
                self.put(operator.out, backend.experts(at(operator.x), operator.layer, seen))
            case op.Gate():
                backend.gate(at(operator.out), at(operator.x))
            case op.GatedNormalize(weight=weight, eps=eps, heads=heads, first=first):
                normed = backend.gated_norm(at(operator.x), at(operator.gate), weight, eps, heads, first)
                self.put(operator.out, normed)
            case op.Convolve(weight=weight, bias=bias, activation=activation):
                convolved = backend.convolve(at(operator.x), weight, bias, activation, *self.records(operator))
                self.put(operator.out, convolved)
            case op.GatedDelta(decay_rate=rate, dt_bias=bias, beta_scale=scale):
                qkv, gates = at(operator.qkv), at(operator.gates)
                self.put(operator.out, backend.gated_delta(qkv, gates, rate, bias, *self.records(operator), scale))
            case op.ScanRows(x=x, gates=gates, side=side):
                inputs = at(x), at(gates), at(side)
                self.put(operator.out, backend.scan(*inputs, operator.scan, *self.records(operator)))
            case op.StateSpace(decay_rate=rate, skip=skip, dt_bias=bias, dt_limits=limits):
                xbc, dt, records = at(operator.xbc), at(operator.dt), self.records(operator)
                self.put(operator.out, backend.state_space(xbc, dt, rate, skip, bias, limits, *records))
            case op.Gather(columns=columns):
                self.put(operator.out, columns.gathered(at(operator.x)))
            case op.AddLora():
                if self.lora_rows is not None:
                    operator.table.add(at(operator.x), at(operator.out), self.lora_rows)

    def _normalized(self, norm: op.Normalize) -> Tensor:
        x = self.at(norm.x)
        if norm.residual is not None:
            residual = self.at(norm.residual)
            if norm.bias is None:
                return self.backend.add_rms_norm(x, residual, norm.weight, norm.eps)
            x = residual.add_(x)
        if norm.heads > 1:
            x = x.view(len(x), norm.heads, norm.x.size // norm.heads)
        if norm.bias is None:
            return self.backend.rms_norm(x, norm.weight, norm.eps)
        return self.backend.layer_norm(x, norm.weight, norm.bias, norm.eps)
