"""Runs a program in one call of the native library.

A call of an operator from Python costs some microseconds, which exceeds the work itself for small models and few rows.
Each native operator gives the same bits as the operator of the same name in this backend.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, addressof, c_int64, c_void_p
from dataclasses import replace
from threading import Lock
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from quire.errors import BadStride, BadValue, Unsupported
from quire.ops import native
from quire.ops import program as op
from quire.ops.checks.tensors import check_tensor
from quire.ops.choice import Choice
from quire.ops.cpu import recurrent
from quire.ops.cpu.exchange import MemoryExchange, gather_params
from quire.ops.cpu.experts import ExpertLinears, ExpertsRoom
from quire.ops.cpu.linear import PackedLinear
from quire.ops.cpu.lora import PackedLoraTable, check_slots
from quire.ops.cpu.recurrent import CpuRecurrentPlan
from quire.ops.cpu.worklist import CpuPlan, Layout, layout
from quire.ops.memory import in_huge_pages
from quire.ops.plan import locked
from quire.ops.program import LayerCaches, Observer, Operator, Place, Plan, Program
from quire.ops.recurrent.calls import Convolution, Recurrence
from quire.ops.recurrent.records import RecurrentCache, RecurrentSpec, check_cache
from quire.ops.spec import AttentionSpec, PagedKV

Described = TypeVar("Described", Operator, Choice)
Cached = op.Write | op.Attend | op.Convolve | op.GatedDelta | op.StateSpace | op.ScanRows
CachedParams: TypeAlias = (
    native.WriteParams | native.AttentionParams | native.ConvolutionParams | native.RecurrenceParams | native.ScanParams
)
HOST = torch.device("cpu")


class NativeExecutor:
    """A program in the form of the native library. Engines on several threads may share it."""

    @staticmethod
    def serves(program: Program) -> bool:
        """Return True if the library supports the program's dtype and exchanges, and all linears are packed for it."""
        composed = op.AttendWithin, op.Select
        if program.dtype not in native.DTYPES or any(isinstance(step, composed) for step in program.operators):
            return False
        if not all(isinstance(linear, PackedLinear) for linear in program.linears):
            return False
        if not all(
            isinstance(step.table, PackedLoraTable) for step in program.operators if isinstance(step, op.AddLora)
        ):
            return False
        if not all(isinstance(columns.exchange, MemoryExchange) for columns in program.columns):
            return False
        projections = [part for step in program.operators if isinstance(step, op.Project) for part in step.parts]
        packed = [cast(PackedLinear, part.linear) for part in projections]
        return all(linear.dtype == linear.out_dtype == program.dtype for linear in packed)

    def __init__(self, program: Program, library: native.Library | None = None) -> None:
        """Lower the program. Raises BadValue if it has more buffers than the library supports."""
        self.observer: Observer | None = None
        self.program = program
        # The caller's buffers come first; the executor allocates the others.
        own = [name for name in program.buffers if name not in (program.input.buffer, program.output.buffer)]
        names = list(dict.fromkeys((program.input.buffer, program.output.buffer, *own)))
        if len(names) > native.MAX_BUFFERS:
            raise BadValue(f"a program has {len(names)} buffers; it must have at most {native.MAX_BUFFERS}")
        self._buffers = {name: i for i, name in enumerate(names)}
        self._library = library or native.default()
        self._num_given = len(names) - len(own)
        dtype = native.DTYPES[program.dtype]
        self._strides = {name: program.buffers[name] for name in names}  # of rows, in elements
        for name in own:  # linears read them in place
            self._strides[name] = self._library("row_stride", self._strides[name], dtype)
        self._own_width = sum(self._strides[name] for name in own)
        self._kept: list[object] = []  # objects that the operators point to
        # The structures that refer to the cache of each layer and group.
        self._cached: defaultdict[tuple[int, int], list[CachedParams]] = defaultdict(list)
        self._linears: list[native.LinearParams] = []
        self._projections: list[tuple[PackedLinear, int]] = []  # with the stride of x
        self._loras: list[native.LoraParams] = []
        self._num_slots = 0  # of adapters
        self._lora_room = 0  # fp32 numbers for each row
        self._rows = 0  # for which memory is allocated
        self._experts = ExpertsRoom()
        self._scratch = torch.empty(0, dtype=program.dtype)
        self._copy = torch.empty(0)
        self._lora_copy = torch.empty(0)
        # Of each layer: the spec that its cache was checked against, and the cache's layout.
        self._bound: list[tuple[AttentionSpec | RecurrentSpec, Layout]] = []
        # Of each group: the last spec with the right sizes.
        self._known: dict[int, AttentionSpec | RecurrentSpec] = {}
        self._lock = Lock()
        parts = [(i, part) for i, operator in enumerate(program.operators) for part in _parts(operator)]
        self._operator_of = [i for i, _ in parts]  # of each op: a joined linear has several
        ops = [self._lowered(part) for _, part in parts]
        self._ops = (native.Op * len(ops))(*ops)
        self._sizes: dict[int, set[tuple[str, object]]] = {}  # of each group: required fields of its plan's spec
        for operator in program.operators:
            if isinstance(operator, Cached):
                self._sizes.setdefault(operator.group, set()).update(
                    _sizes(operator).items(), [("dtype", program.dtype)]
                )

    # ------------------------------------------------------------------------------------------ lowering it

    def _lowered(self, operator: Operator) -> native.Op:
        operator = self._held(operator)
        match operator:
            case op.Project(linear=linear):
                return self._linear(operator, cast(PackedLinear, linear))
            case op.Normalize(x=x, out=out, weight=weight, bias=bias, eps=eps, residual=residual, heads=heads):
                offset = None if bias is None else bias.data_ptr()
                params = native.NormParams(weight.data_ptr(), offset, heads, len(weight), eps)
                return self._op(operator, params, x, residual, out)
            case op.Rotate(q=q, k=k, cos=cos, sin=sin, head_dim=dim):
                rope = native.RopeParams(cos.data_ptr(), sin.data_ptr(), *cos.shape, q.size // dim, k.size // dim, dim)
                return self._op(operator, rope, q, k)
            case op.Write(k=k, v=v, layer=layer, group=group):
                write = native.WriteParams()
                self._cached[layer, group].append(write)
                return self._op(operator, write, k, v, group=group)
            case op.Attend(q=q, out=out, layer=layer, group=group, head_dim=dim, alibi_slopes=slopes, sinks=sinks):
                attention = native.AttentionParams(
                    alibi_slopes=None if slopes is None else slopes.data_ptr(),
                    sinks=None if sinks is None else sinks.data_ptr(),
                    scale=dim**-0.5 if operator.scale is None else operator.scale,
                    softcap=operator.softcap or 0.0,
                    chunk=operator.chunk or 0,
                )
                self._cached[layer, group].append(attention)
                return self._op(operator, attention, q, None, out, group=group)
            case op.AttendWithin() | op.Select():
                raise Unsupported(f"{operator.kind} is composed of other operators: see `serves`")
            case op.Activate(x=x, out=out, activation=activation):
                return self._op(operator, native.ActivationParams.of(activation, out.size), x, None, out)
            case op.Multiply(x=x, out=out) | op.Add(x=x, out=out) | op.Copy(x=x, out=out):
                return self._op(operator, native.EachParams(out.size), x, None, out)
            case op.Scale(x=x, factor=factor):
                return self._op(operator, native.EachParams(x.size, factor=factor), x, None, x)
            case op.Keep(buffers=buffers):
                places: list[Place | None] = [*buffers, None]
                return self._op(operator, native.EachParams(), buffers[0], places[1], places[2])
            case op.MixExperts(x=x, layer=layer, out=out, seen=seen):
                linears = ExpertLinears.of(replace(layer, choice=self._held(layer.choice)))
                experts = linears.params()
                self._experts.add(linears, experts)
                return self._op(operator, experts, x, seen or x, out)
            case op.Gate(x=x, out=out):
                return self._op(operator, native.GateParams(x.size, out.size), x, None, out)
            case op.GatedNormalize(x=x, gate=gate, out=out, weight=weight, eps=eps, heads=heads):
                first, dim = operator.first == "gate", len(weight) // heads
                gated = native.GatedNormParams(weight.data_ptr(), heads, dim, eps, first)
                return self._op(operator, gated, x, gate, out)
            case op.Convolve(x=x, out=out):
                weight = operator.weight.T.contiguous()
                self._kept.append(weight)
                convolution = Convolution(weight, operator.bias, operator.activation)
                return self._recurrent(operator, recurrent.convolution_params(convolution), x, None, out)
            case op.GatedDelta(qkv=qkv, gates=gates, out=out):
                delta = Recurrence(operator.decay_rate, operator.dt_bias, beta_scale=operator.beta_scale)
                return self._recurrent(operator, recurrent.recurrence_params(delta), qkv, gates, out)
            case op.StateSpace(xbc=xbc, dt=dt, out=out, decay_rate=rate, dt_bias=bias):
                space = Recurrence(rate, bias, operator.skip, operator.dt_limits)
                return self._recurrent(operator, recurrent.recurrence_params(space), xbc, dt, out)
            case op.ScanRows(x=x, gates=gates, side=side, out=out):
                scan = recurrent.scan_params(operator.scan)
                (scan.side_columns,) = self._columns(side)
                return self._recurrent(operator, scan, x, gates, out)
            case op.Gather(x=x, columns=columns, out=out):
                return self._op(operator, gather_params(columns), x, None, out)
            case op.AddLora(x=x, table=table, out=out):
                packed = cast(PackedLoraTable, table)
                lora = packed.params()
                self._kept.append(packed)
                self._loras.append(lora)
                self._num_slots = packed.num_slots
                self._lora_room = max(self._lora_room, packed.room)
                return self._op(operator, lora, x, None, out)

    def _held(self, described: Described) -> Described:
        """Return a copy with its tensors in fp32, whose memory stays valid if the originals are set or resized."""
        held = {name: x.detach().float().contiguous() for name, x in vars(described).items() if isinstance(x, Tensor)}
        self._kept += (x.numpy() for x in held.values())  # torch does not resize memory that numpy refers to
        return cast(Described, replace(cast(Any, described), **held)) if held else described

    def _recurrent(
        self,
        operator: op.Convolve | op.GatedDelta | op.StateSpace | op.ScanRows,
        params: native.ConvolutionParams | native.RecurrenceParams | native.ScanParams,
        x: Place,
        y: Place | None,
        out: Place,
    ) -> native.Op:
        self._cached[operator.layer, operator.group].append(params)
        return self._op(operator, params, x, y, out, group=operator.group)

    def _linear(self, operator: op.Project, packed: PackedLinear) -> native.Op:
        params = packed.params()
        self._linears.append(params)
        self._projections.append((packed, self._strides[operator.x.buffer]))
        return self._op(operator, params, operator.x, None, operator.out)

    def _op(
        self,
        operator: Operator,
        params: Structure,
        x: Place,
        y: Place | None = None,
        out: Place | None = None,
        group: int = 0,
    ) -> native.Op:
        self._kept.append(params)
        return native.Op(native.OPS.index(operator.kind), group, *self._columns(x, y, out), addressof(params))

    def _columns(self, *places: Place | None) -> list[native.NativeColumns]:
        return [
            native.NativeColumns(-1, 0)
            if place is None
            else native.NativeColumns(self._buffers[place.buffer], place.first)
            for place in places
        ]

    # ------------------------------------------------------------------------------------------ running it

    def __call__(
        self,
        x: Tensor,  # [T, width], contiguous: the input; overwritten
        positions: Tensor,  # int64 [T], contiguous
        caches: LayerCaches,
        plans: Sequence[Plan],  # one per cache group or state kind, with T tokens each
        rows: Tensor | None = None,  # int64 [R], contiguous, ascending
        lora_slots: Tensor | None = None,  # int32 [T], contiguous
    ) -> Tensor:
        """Run the program and return the output: [T, width], or [R, width].

        Raises BadValue for a position outside a table, for rows out of order, and for plans that are missing or are for
        other tokens; BadShape, BadDtype, BadStride or BadValue for a tensor that is not as described.
        """
        program = self.program
        count = x.shape[0]
        _check("x", x, (count, program.input.size), program.dtype)
        _check("positions", positions, (count,), torch.int64)
        if rows is not None:
            _check("rows", rows, (rows.numel(),), torch.int64)
        if lora_slots is not None:
            _check("lora_slots", lora_slots, (count,), torch.int32)
            check_slots(lora_slots, self._num_slots)
        own = self._own(plans)
        if program.output == program.input:
            out, given = x, [x]
        else:
            out = torch.empty(count, program.output.size, dtype=program.dtype)
            given = [x, out]
        with self.prepared(given, positions, caches, own, rows, lora_slots) as params:
            self._run(params, positions, rows)
        return out if rows is None else out[: len(rows)]

    def _own(self, plans: Sequence[Plan]) -> list[CpuPlan | CpuRecurrentPlan]:
        if len(plans) <= max(self._sizes, default=-1):
            raise BadValue(f"given are {len(plans)} plans; the program has {max(self._sizes) + 1} cache groups")
        for plan in plans:
            if not isinstance(plan, (CpuPlan, CpuRecurrentPlan)):
                raise BadValue(f"a plan is a {type(plan).__name__}; make it with the cpu backend")
        return cast(list[CpuPlan | CpuRecurrentPlan], list(plans))

    def _check_plans(self, plans: Sequence[CpuPlan | CpuRecurrentPlan], count: int) -> None:
        """Check the properties that an update of a plan may change, and its sizes. Its lock must be held."""
        for plan in plans:
            if plan.num_tokens != count or not (isinstance(plan, CpuRecurrentPlan) or plan.writable):
                raise BadValue(f"a plan is for {plan.num_tokens} tokens, the program for {count}; update it with slots")
        for group, wanted in self._sizes.items():
            spec = plans[group].spec
            if spec is self._known.get(group):
                continue
            for name, value in wanted:
                if getattr(spec, name, None) != value:
                    raise BadValue(f"a plan is for {spec}; the program has {name}={value} in group {group}")
            self._known[group] = spec

    def _bind(self, caches: LayerCaches, plans: Sequence[CpuPlan | CpuRecurrentPlan]) -> None:
        """Point the layers' attention and recurrences to these caches."""
        layers = [(plans[group], caches.layer(layer)) for layer, group in self._cached]
        bound = [(plan.spec, layout(cache)) for plan, cache in layers]
        if bound == self._bound:
            return
        found = [_native_cache(plan, cache) for plan, cache in layers]
        for cache, users in zip(found, self._cached.values(), strict=True):  # after all caches were checked
            for params in users:
                params.cache = cache
        self._bound = bound

    @contextmanager
    def prepared(
        self,
        given: Sequence[Tensor],  # the caller's buffers, of T rows each
        positions: Tensor,  # int64 [T], contiguous
        caches: LayerCaches,
        plans: Sequence[CpuPlan | CpuRecurrentPlan],
        rows: Tensor | None = None,  # int64 [R], contiguous, ascending
        lora_slots: Tensor | None = None,  # int32 [T], contiguous
    ) -> Iterator[native.ProgramParams]:
        """Yield the native library's description of a run. Meanwhile no other thread uses the program or the plans."""
        with self._lock, locked(plans):
            count = len(positions)
            self._check_plans(plans, count)
            self._bind(caches, plans)
            self._reserve(count)
            address, size = self._scratch.data_ptr(), self.program.dtype.itemsize
            buffers = [x.data_ptr() for x in given]
            for stride in list(self._strides.values())[self._num_given :]:
                buffers.append(address)
                address += count * stride * size
            yield native.ProgramParams(
                ops=self._ops,
                num_ops=len(self._ops),
                positions=positions.data_ptr(),
                plans=(c_void_p * len(plans))(*(plan.view for plan in plans)),
                buffers=(c_void_p * native.MAX_BUFFERS)(*buffers),
                strides=(c_int64 * native.MAX_BUFFERS)(*self._strides.values()),
                rows=count,
                kept=None if rows is None else rows.data_ptr(),
                num_kept=-1 if rows is None else len(rows),
                lora_slots=None if lora_slots is None else lora_slots.data_ptr(),
                dtype=native.DTYPES[self.program.dtype],
                threads=torch.get_num_threads(),
            )

    def _run(self, params: native.ProgramParams, positions: Tensor, rows: Tensor | None) -> None:
        seconds = None if self.observer is None else torch.zeros(len(self._ops), dtype=torch.float64)
        params.seconds = None if seconds is None else seconds.data_ptr()
        start = time.perf_counter()
        beyond = self._library("program", params)
        kind = None if beyond < 0 else self.program.operators[self._operator_of[beyond]].kind
        if kind in ("gather", "experts"):
            raise cast(MemoryExchange, next(iter(self.program.columns)).exchange).loss()
        if kind == "keep":
            raise BadValue(f"rows to keep are {rows}; they must ascend within 0..{len(positions) - 1}")
        if kind is not None:
            raise BadValue(f"a position lies beyond its table: {positions.min()} to {positions.max()}")
        if self.observer is not None and seconds is not None:
            by_operator = torch.zeros(len(self.program.operators), dtype=torch.float64)
            by_operator.index_add_(0, torch.tensor(self._operator_of), seconds)
            for kind, took in zip(self.program.kinds, by_operator.tolist(), strict=True):
                self.observer(kind, start, took)
                start += took

    def _reserve(self, count: int) -> None:
        """Allocate memory for `count` rows."""
        if count <= self._rows:
            return
        self._rows = 0
        self._scratch = self._copy = self._lora_copy = torch.empty(0)  # freed before larger ones are allocated
        self._scratch = in_huge_pages((count * self._own_width,), self.program.dtype)
        sizes = [packed.copy_size(count, stride) for packed, stride in self._projections]
        self._copy = torch.empty(max(sizes, default=0))
        for params in self._linears:
            params.copy = self._copy.data_ptr()
        self._lora_copy = torch.empty(count * self._lora_room)
        for lora in self._loras:
            lora.room = self._lora_copy.data_ptr()
        self._experts.reserve(count)
        self._rows = count


def _parts(operator: Operator) -> Sequence[Operator]:
    """Return the operators that the library runs in sequence for one operator."""
    return operator.parts if isinstance(operator, op.Project | op.Copy) else [operator]


def _sizes(operator: Cached) -> dict[str, int]:
    """Return the fields that the spec of the operator's plan must have."""
    match operator:
        case op.Attend(q=q, out=out, head_dim=dim):
            return {"num_heads": q.size // dim, "head_dim": dim, "dim_v": out.size * dim // q.size}
        case op.Write(k=k, v=v, head_dim=dim):
            return {"num_kv_heads": k.size // dim, "head_dim": dim, "dim_v": v.size * dim // k.size}
        case op.Convolve(x=x, weight=weight):
            return {"width": x.size, "taps": weight.shape[1]}
        case op.GatedDelta(qkv=x, out=out) | op.StateSpace(xbc=x, out=out):
            heads = len(operator.decay_rate)
            return {"num_heads": heads, "value_width": out.size, "key_width": (x.size - out.size) // 2}
        case op.ScanRows(rule="delta", x=x, gates=gates, out=out, rate=rate):
            keys, heads = (x.size - out.size) // 2, len(rate)
            return {"num_heads": heads, "value_width": out.size, "key_width": keys, "dim_decay": gates.size // heads}
        case op.ScanRows(out=out, rate=rate):
            heads, dim_k, dim_v = rate.shape
            return {"num_heads": heads, "value_width": out.size, "dim_k": dim_k, "dim_decay": dim_v}


def _native_cache(plan: CpuPlan | CpuRecurrentPlan, cache: PagedKV | RecurrentCache) -> Structure:
    """Check a layer's cache against the plan, and return its native structure."""
    if isinstance(plan, CpuRecurrentPlan):
        check_cache(cast(RecurrentCache, cache), plan.spec)
        return recurrent.records(cast(RecurrentCache, cache))
    return plan.check(cast(PagedKV, cache)).params


def _check(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check_tensor(name, x, shape, dtype, HOST)
    if not x.is_contiguous():
        raise BadStride(f"{name} has strides {x.stride()} for shape {shape}; it must be contiguous")
