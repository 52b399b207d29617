"""The operators on a GPU: decode, prefill, cascades, and which tiles serve them best.

Decode is reported in bytes of KV a second, prefill in floating-point operations a second; the ceilings run among the
contestants. Blocks lie in random order unless a case says otherwise. A decode goes round in 1 GiB of KV and more.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from quire import ops
from quire_bench.gpu.common import Bench, Call, Contestant, copy, product, race, read
from quire_bench.kernels import cascade as cascades
from quire_bench.kernels.attention import Shape, filled_cache
from quire_bench.kernels.cascade import CascadeFigure, CascadeShape

ROTATED_BYTES = 2**30  # of K and V that the calls of a decode go round in
NARROW = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}

_LLAMA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
DECODE = {
    "64 x 4096": Shape(batch=64, context_len=4096, **_LLAMA),
    "8 x 32768": Shape(batch=8, context_len=32768, **_LLAMA),
    "1 x 131072": Shape(batch=1, context_len=131072, **_LLAMA),
    "gpt2 64 x 1024": Shape(batch=64, num_heads=12, num_kv_heads=12, head_dim=64, context_len=1024, block_size=16),
    "smallest": Shape(batch=1, num_heads=8, num_kv_heads=8, head_dim=64, context_len=16, block_size=16),
}
PREFILL = {
    "8 x 4096 D128": Shape(batch=8, context_len=4096, query_len=4096, **_LLAMA),
    "8 x 4096 D64": Shape(batch=8, context_len=4096, query_len=4096, **(_LLAMA | {"head_dim": 64})),
    "8 x 256 rows of 8192": Shape(batch=8, context_len=8192, query_len=256, **_LLAMA),
}
CASCADE = CascadeShape(batch=256, shared=32768, own=256, **_LLAMA)


def sized(bench: Bench, shape: Shape) -> Shape:
    """The shape, or with --tiny a small one of its kind."""
    if not bench.settings.tiny:
        return shape
    heads = 2 * shape.num_heads // shape.num_kv_heads
    rows = 1 if shape.query_len == 1 else 24 if shape.query_len == shape.context_len else 8
    return replace(
        shape, batch=2, num_heads=heads, num_kv_heads=2, head_dim=16, context_len=24, query_len=rows, block_size=16
    )


@dataclass(frozen=True)
class Paged:
    """A cache full of random numbers, and calls over it."""

    shape: Shape
    backend: ops.Backend
    spec: ops.AttentionSpec
    memory: Tensor  # [N, 2, Hkv, B, D], as the engine's cache has it
    scales: Tensor | None  # fp32 [N, 2, Hkv, B], of int8
    starts: Tensor  # int32 [S+1], host
    lens: Tensor  # int32 [S], host
    tables: Tensor  # int32 [copies, S, M], host: the calls take turns on the copies
    plans: tuple[ops.AttentionPlan, ...]  # one a copy
    q: Tensor  # [T, Hq, D]
    out: Tensor  # [T, Hq, D]

    @property
    def kv(self) -> ops.PagedKV:
        """K and V: two views [N, Hkv, B, D]."""
        scales = () if self.scales is None else (self.scales[:, 0], self.scales[:, 1])
        return ops.PagedKV(self.memory[:, 0], self.memory[:, 1], *scales)

    def turns(self, run: Callable[[int], object]) -> Call:
        """A call that runs over the next copy each time."""
        turn = count()
        return lambda: run(next(turn) % len(self.plans))

    def call(self) -> Call:
        """Quire's attention over the next copy."""
        kv = self.kv
        return self.turns(lambda i: self.backend.attention(self.q, kv, self.plans[i], out=self.out))


def paged(bench: Bench, shape: Shape, *, kv_dtype: torch.dtype | None = None, **spec_fields: Any) -> Paged:
    """A cache and calls of that shape. spec_fields: further fields of the AttentionSpec."""
    dtype: torch.dtype = getattr(torch, shape.dtype)
    kv_dtype = kv_dtype or dtype
    kv_bytes = shape.kv_bytes * kv_dtype.itemsize // dtype.itemsize
    rotated = kv_bytes if bench.settings.tiny or shape.query_len > 1 else ROTATED_BYTES
    copies = min(64, -(-rotated // kv_bytes))
    spec = shape.spec(copies, device=bench.device, kv_dtype=kv_dtype, **spec_fields)
    starts, lens = shape.lengths()
    tables = shape.tables(copies)
    plans = tuple(bench.backend.plan(spec, starts, lens, table) for table in tables)
    q = torch.randn(shape.batch * shape.query_len, shape.num_heads, shape.head_dim, device=bench.device).to(dtype)
    rows = (spec.num_blocks, 2, shape.num_kv_heads, shape.block_size)
    memory = filled(bench, (*rows, shape.head_dim), kv_dtype)
    scales = torch.full(rows, 0.02, device=bench.device) if kv_dtype is torch.int8 else None
    return Paged(shape, bench.backend, spec, memory, scales, starts, lens, tables, plans, q, torch.empty_like(q))


def filled(bench: Bench, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory full of random numbers: some blocks of them, repeated."""
    memory = torch.empty(shape, dtype=dtype, device=bench.device)
    piece = torch.randn(min(1024, shape[0]), *shape[1:], device=bench.device)
    piece = (50 * piece).clamp(-127, 127).to(dtype) if dtype is torch.int8 else piece.to(dtype)
    for at in range(0, shape[0], len(piece)):
        memory[at : at + len(piece)] = piece[: shape[0] - at]
    return memory


def ours(bench: Bench, shape: Shape, work: float, unit: str, **changes: Any) -> Contestant:
    """Quire on that shape."""
    return Contestant(lambda: paged(bench, shape, **changes).call(), work, unit)


def decode(bench: Bench) -> None:
    """Stage: one query row a sequence, in several layouts of the cache."""
    for name, whole in DECODE.items():
        shape = sized(bench, whole)
        wide = replace(shape, block_size=256)
        work = float(shape.kv_bytes)
        contestants = {
            "copy": copy(bench),
            "quire": ours(bench, shape, work, "GB/s"),
            "quire, blocks of 256": ours(bench, wide, work, "GB/s"),
            "quire, blocks in order": ours(bench, replace(shape, scattered=False), work, "GB/s"),
            "quire, contiguous": ours(bench, replace(wide, scattered=False), work, "GB/s"),
        }
        if bench.backend.limits.reproducible:
            contestants["quire, reproducible"] = ours(bench, shape, work, "GB/s", reproducible=True)
        for narrow, dtype in NARROW.items():
            if dtype in bench.backend.limits.kv_dtypes[torch.bfloat16]:
                contestants[f"quire, {narrow}"] = ours(bench, shape, work / 2, "GB/s", kv_dtype=dtype)
        race(bench, name, contestants, "copy", shape=shape.name)
        bench.forget()
        plan_time(bench, name, shape)


def plan_time(bench: Bench, case: str, shape: Shape) -> None:
    """Report what a plan's update takes, once a step."""
    call = paged(bench, shape)
    [plan, *_], [table, *_] = call.plans, call.tables

    def update() -> None:
        plan.update(call.starts, call.lens, table)

    update()
    runs = 2 if bench.settings.tiny else 20
    bench.row(case, "quire, plan", us=1e6 * statistics.median(bench.seconds_of(update) for _ in range(runs)))


def prefill(bench: Bench) -> None:
    """Stage: many query rows a sequence."""
    for name, whole in PREFILL.items():
        shape = sized(bench, whole)
        work = float(shape.operations)
        contestants = {"product": product(bench), "quire": ours(bench, shape, work, "TFLOP/s")}
        if bench.backend.limits.reproducible:
            contestants["quire, reproducible"] = ours(bench, shape, work, "TFLOP/s", reproducible=True)
        for narrow, dtype in NARROW.items():
            if dtype in bench.backend.limits.kv_dtypes[torch.bfloat16]:
                contestants[f"quire, {narrow}"] = ours(bench, shape, work, "TFLOP/s", kv_dtype=dtype)
        race(bench, name, contestants, "product", shape=shape.name)
        bench.forget()
        plan_time(bench, name, shape)


# ------------------------------------------------------------------------------------------------- cascades


def cascade(bench: Bench) -> None:
    """Stage: a prefix that all sequences share, against as many sequences with a prefix of their own."""
    shape = replace(CASCADE, batch=3, shared=64, own=16, head_dim=16) if bench.settings.tiny else CASCADE
    name = f"{CASCADE.batch} x ({CASCADE.shared} shared + {CASCADE.own})"
    contestants = {
        "read": read(bench),
        "product": product(bench),
        "shared tables": Contestant(lambda: cascades.call(bench.backend, shape, shares=True, device=bench.device)),
        "cascade_attention": Contestant(lambda: _levels_call(bench, shape)),
    }
    if not bench.on_gpu or torch.cuda.mem_get_info()[0] > 1.2 * _apart_bytes(shape):
        make = partial(cascades.call, bench.backend, shape, shares=False, device=bench.device)
        contestants["apart"] = Contestant(make, _apart_bytes(shape))
    seconds = race(bench, name, contestants, "read", rounds=3)
    bench.forget()
    if not {"read", "product"} <= seconds.keys():
        return
    read_rate, product_rate = (contestants[who].work / seconds[who] / 1e9 for who in ("read", "product"))
    apart = seconds.get("apart", _apart_bytes(shape) / read_rate / 1e9)
    for who in ("shared tables", "cascade_attention"):
        if who in seconds:
            figure = CascadeFigure(shape, apart, seconds[who], read_rate, product_rate)
            bench.row(
                name,
                f"{who}, speedup",
                value=figure.speedup,
                unit="x",
                share=figure.speedup / figure.roof,
                roof=figure.roof,
                apart_measured="apart" in seconds,
            )


def _apart_bytes(shape: CascadeShape) -> int:
    return shape.batch * (shape.shared + shape.own) * shape.num_kv_heads * shape.head_dim * 4


def _levels_call(bench: Bench, shape: CascadeShape) -> Call:
    """The same, the two levels given."""
    common, own = shape.blocks
    shared = shape.spec(common, device=bench.device, causal=False)
    apart = shape.spec(shape.batch * own, device=bench.device)
    wide = bench.backend.plan(
        shared,
        torch.tensor([0, shape.batch], dtype=torch.int32),
        torch.tensor([shape.shared], dtype=torch.int32),
        torch.randperm(common, dtype=torch.int32)[None],
    )
    fine = bench.backend.plan(
        apart,
        torch.arange(shape.batch + 1, dtype=torch.int32),
        torch.full((shape.batch,), shape.own, dtype=torch.int32),
        torch.randperm(shape.batch * own, dtype=torch.int32).view(shape.batch, own),
    )
    levels = [ops.CascadeLevel(filled_cache(shared), wide), ops.CascadeLevel(filled_cache(apart), fine)]
    q = shape.q(bench.device)
    return lambda: ops.cascade_attention(q, levels, backend=bench.settings.backend)
