"""Attention alone: how much of the memory's and of the arithmetic units' speed it reaches.

Decode is measured in bytes of KV a second against what the machine reads, prefill in floating-point operations a second
against what it multiplies; both ceilings are measured between the runs, because a shared machine's speed drifts. Only
scores that are not masked count as work. A cache is larger than the processor's own, and calls take turns on its parts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from quire import ops
from quire.cache.groups import CacheGroup, Heads
from quire.cache.storage import KVCache
from quire.errors import ConfigError
from quire.ops import native
from quire.ops.memory import in_huge_pages
from quire.ops.weights.rounding import quantised_rows
from quire_bench.kernels import onednn
from quire_bench.plot import drawn
from quire_bench.threads import counted

CACHE_BYTES = 1024 * 2**20  # of K and V that decode goes round in, several times a last-level cache
READ_BYTES = CACHE_BYTES  # or a part of it would stay in the caches


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One call of attention: every sequence has the same lengths."""

    batch: int  # S
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    context_len: int
    query_len: int = 1
    block_size: int = 32
    dtype: str = "bfloat16"
    kv_dtype: str | None = None  # of the cache: "int8", or None for the same
    scattered: bool = True  # blocks in random order, not one after the other

    @property
    def name(self) -> str:
        """The shape in a few letters."""
        kind = "decode" if self.query_len == 1 else f"q{self.query_len}"
        return (
            f"{kind} S{self.batch} {self.num_heads}/{self.num_kv_heads} D{self.head_dim} ctx{self.context_len} "
            f"B{self.block_size} {self.dtype}{f', {self.kv_dtype} cache' if self.kv_dtype else ''}"
            f"{'' if self.scattered else ' in order'}"
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call has to read, scales included."""
        row = self.head_dim * getattr(torch, self.kv_dtype or self.dtype).itemsize
        if self.kv_dtype:
            row += torch.float32.itemsize
        return int(2 * self.batch * self.num_kv_heads * self.context_len * row)

    @property
    def operations(self) -> int:
        """Floating-point operations of a call, masked scores left out."""
        first = self.context_len - self.query_len + 1
        pairs = self.batch * sum(range(first, self.context_len + 1))
        return 4 * self.num_heads * self.head_dim * pairs

    def spec(self, copies: int, **fields: Any) -> ops.AttentionSpec:
        """The attention over a cache that holds the sequences that many times. fields: others of the AttentionSpec."""
        given: dict[str, Any] = {"kv_dtype": None if self.kv_dtype is None else getattr(torch, self.kv_dtype)}
        return ops.AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=self.block_size,
            num_blocks=copies * self.batch * -(-self.context_len // self.block_size),
            dtype=getattr(torch, self.dtype),
            **(given | fields),
        )

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Query starts, int32 [S+1], and context lengths, int32 [S], on the host."""
        starts = torch.arange(0, self.batch * self.query_len + 1, self.query_len, dtype=torch.int32)
        return starts, torch.full((self.batch,), self.context_len, dtype=torch.int32)

    def tables(self, copies: int) -> Tensor:
        """The block tables of that many copies, int32 [copies, S, M] on the host: the same ones each time."""
        order = torch.arange(self.spec(copies).num_blocks)
        if self.scattered:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(0))]
        return order.int().view(copies, self.batch, -1)


def _shapes(*changes: dict[str, Any], **base: Any) -> tuple[Shape, ...]:
    return tuple(Shape(**(base | change)) for change in changes)


_DECODE = {"batch": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "context_len": 1024}
SETS: dict[str, tuple[Shape, ...]] = {
    "peers": (  # what vLLM's CPU kernel is measured on
        *_shapes(
            {},
            {"batch": 8, "head_dim": 128, "context_len": 4096},
            {"num_heads": 12, "num_kv_heads": 12, "context_len": 872},
            {"batch": 1, "head_dim": 128, "context_len": 16384},
            **_DECODE,
        ),
        *_shapes(
            {"num_heads": 12, "num_kv_heads": 12, "head_dim": 64, "context_len": 1024, "query_len": 1024},
            {"head_dim": 64},
            {"head_dim": 128},
            {"head_dim": 128, "batch": 4, "query_len": 256},
            **{"batch": 1, "num_heads": 32, "num_kv_heads": 8, "context_len": 2048, "query_len": 2048},
        ),
    ),
    "groups": _shapes(*({"num_heads": 8 * g} for g in (1, 3, 4, 7, 8)), **_DECODE),
    "mqa": _shapes(  # a single long context with a single KV head: is it divided, and read once for all query heads?
        {}, {"num_heads": 8}, batch=1, num_heads=1, num_kv_heads=1, head_dim=128, context_len=16384
    ),
    "dims": _shapes(*({"head_dim": d} for d in (64, 80, 128, 256)), **_DECODE),
    "blocks": _shapes(*({"block_size": b} for b in (1, 16, 32, 128, 256)), **_DECODE),
    "scatter": _shapes({"block_size": 16}, {"block_size": 16, "scattered": False}, **_DECODE),
    "contexts": _shapes(
        *({"batch": max(1, 32768 // n), "context_len": n} for n in (128, 512, 2048, 8192, 32768)), **_DECODE
    ),
    "batches": _shapes(*({"batch": s} for s in (1, 4, 16, 64)), **_DECODE),
    "long": _shapes({"batch": 1, "context_len": 16384}, {"batch": 16}, **(_DECODE | {"head_dim": 128})),
    "dtypes": tuple(
        replace(shape, dtype=dtype)
        for dtype in ("bfloat16", "float16", "float32")
        for shape in _shapes({}, {"batch": 1, "context_len": 2048, "query_len": 2048}, **_DECODE)
    ),
    "int8": tuple(
        replace(shape, kv_dtype=kv_dtype)
        for shape in _shapes(
            {"batch": 8, "head_dim": 128, "context_len": 4096},
            {},
            {"batch": 1, "head_dim": 128, "context_len": 2048, "query_len": 2048},
            {"batch": 1, "context_len": 2048, "query_len": 2048},
            **_DECODE,
        )
        for kv_dtype in (None, "int8")
    ),
}


@dataclass(frozen=True)
class Ceilings:
    """The best rates of the machine, between the calls: medians."""

    read: float  # GB/s of memory, all threads
    multiply: float  # GFLOP/s: of oneDNN's bf16 product for bf16, of multiply-adds in registers otherwise


@dataclass(frozen=True)
class Figure:
    """The times of one shape."""

    shape: Shape
    seconds: tuple[float, ...]
    sdpa_seconds: tuple[float, ...]  # of torch's attention over contiguous K and V; empty where it was not run
    ceilings: Ceilings
    threads: int

    @property
    def rate(self) -> float:
        """GB/s of KV in decode, GFLOP/s otherwise, by the median run."""
        work = self.shape.kv_bytes if self.shape.query_len == 1 else self.shape.operations
        return work / statistics.median(self.seconds) / 1e9

    @property
    def fraction(self) -> float:
        """The rate as a share of the ceiling."""
        return self.rate / (self.ceilings.read if self.shape.query_len == 1 else self.ceilings.multiply)

    @property
    def speedup(self) -> float | None:
        """The speed relative to torch's attention over contiguous K and V."""
        return statistics.median(self.sdpa_seconds) / statistics.median(self.seconds) if self.sdpa_seconds else None

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return {
            **asdict(self.shape),
            "name": self.shape.name,
            "seconds": list(self.seconds),
            "sdpa_seconds": list(self.sdpa_seconds),
            "rate": self.rate,
            "unit": "GB/s of KV" if self.shape.query_len == 1 else "GFLOP/s",
            "threads": self.threads,
            "ceiling_read": self.ceilings.read,
            "ceiling_multiply": self.ceilings.multiply,
            "fraction": self.fraction,
            "speedup_over_sdpa": self.speedup,
        }


@contextmanager
def instruction_set(isa: str | None) -> Iterator[str]:
    """Run the cpu backend's kernels for that instruction set; its name. None: the best one here."""
    library = native.load(isa)
    with patch.object(native, "default", lambda: library):
        yield library.isa


def chosen(names: list[str]) -> tuple[Shape, ...]:
    """The shapes of these sets, each once; all of them for "all". Raises ConfigError for an unknown name."""
    if unknown := [name for name in names if name not in SETS and name != "all"]:
        raise ConfigError(f"there is no set of shapes {unknown[0]!r}; there are: {', '.join(SETS)}, all")
    wanted = SETS if "all" in names else names
    return tuple(dict.fromkeys(shape for name in wanted for shape in SETS[name]))


def measure(backend: ops.Backend, shape: Shape, runs: int, sdpa_runs: int) -> Figure:
    """Time one shape, the ceilings in between."""
    call, threads = _paged(backend, shape), torch.get_num_threads()
    dense = _dense(shape) if sdpa_runs else None
    reader, multiplier = read_rate(threads), product_rate(shape.dtype, threads)
    call()
    seconds, sdpa, read, multiply = [], [], [], []
    for i in range(runs):
        read.append(reader())
        seconds.append(seconds_of(call))
        multiply.append(multiplier())
        if dense is not None and i < sdpa_runs:
            sdpa.append(seconds_of(dense))
    ceilings = Ceilings(statistics.median(read), statistics.median(multiply))
    return Figure(shape, tuple(seconds), tuple(sdpa), ceilings, threads)


def overhead(backend: ops.Backend) -> float:
    """Seconds of a call that has next to nothing to compute, `out` given, on the calling thread."""
    shape = Shape(batch=1, num_heads=1, num_kv_heads=1, head_dim=16, context_len=1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        call = _paged(backend, shape, copies=1)
        return statistics.median(seconds_of(lambda: [call() for _ in range(100)]) / 100 for _ in range(50))
    finally:
        torch.set_num_threads(before)


def plot(figures: list[Figure], path: Path) -> None:
    """Bars of the shares of the ceilings. Raises ConfigError where they cannot be drawn."""
    with drawn(path, 1, 1, (9, 1 + 0.35 * len(figures))) as (_, [[axes]]):
        names = [f"{figure.shape.name}, {counted(figure.threads)}" for figure in figures]
        axes.barh(names, [100 * figure.fraction for figure in figures])
        axes.invert_yaxis()
        axes.set_xlabel("% of the memory's read bandwidth (decode) or of the product rate (prefill)")


def _paged(backend: ops.Backend, shape: Shape, copies: int | None = None) -> Callable[[], object]:
    """A call over the next part of a cache that is larger than the processor's own."""
    if copies is None:
        copies = max(1, -(-CACHE_BYTES // shape.kv_bytes)) if shape.query_len == 1 else 1
    spec = shape.spec(copies)
    kv = filled_cache(spec)
    plans = [backend.plan(spec, *shape.lengths(), table) for table in shape.tables(copies)]
    q = random_numbers(shape.batch * shape.query_len, shape.num_heads, shape.head_dim, dtype=spec.dtype)
    out, turn = torch.empty_like(q), iter(range(2**62))
    return lambda: backend.attention(q, kv, plans[next(turn) % copies], out=out)


def _dense(shape: Shape) -> Callable[[], object]:
    """Torch's attention over contiguous K and V."""
    dtype = getattr(torch, shape.dtype)
    k, v = (
        random_numbers(shape.batch, shape.num_kv_heads, shape.context_len, shape.head_dim, dtype=dtype)
        for _ in range(2)
    )
    q = random_numbers(shape.batch, shape.num_heads, shape.query_len, shape.head_dim, dtype=dtype)
    whole = shape.query_len == shape.context_len
    mask = None
    if not whole and shape.query_len > 1:
        position = torch.arange(shape.context_len - shape.query_len, shape.context_len)[:, None]
        mask = torch.arange(shape.context_len) <= position
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=whole, enable_gqa=True)


def filled_cache(spec: ops.AttentionSpec) -> ops.PagedKV:
    """A cache full of numbers that lies where the engine's does: on a CPU in huge pages if there are any."""
    group = CacheGroup((0,), heads=Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim))
    kv = KVCache((group,), spec.num_blocks, spec.block_size, spec.cache_dtype, spec.device).kv(0)
    piece = random_numbers(*kv.k.shape[1:], dtype=spec.dtype).to(spec.device)
    if kv.k_scale is None or kv.v_scale is None:
        piece = piece.to(spec.cache_dtype)
    else:
        piece, scales = quantised_rows(piece)
        kv.k_scale[:], kv.v_scale[:] = scales, scales.flip(0)
    kv.k[:], kv.v[:] = piece, piece.flip(0)
    return kv


def random_numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Small random numbers: one stretch of them, repeated."""
    out = torch.empty(shape, dtype=dtype)
    flat, piece = out.view(-1), torch.randn(2**18).to(dtype)
    for at in range(0, len(flat), len(piece)):
        flat[at : at + len(piece)] = piece[: len(flat) - at]
    return out


def read_rate(threads: int) -> Callable[[], float]:
    """A measurement: GB/s that all threads together read."""
    memory, results = in_huge_pages((READ_BYTES,), torch.uint8, touched=READ_BYTES), torch.zeros(threads)
    library = native.default()

    def read() -> None:
        library("read", memory.data_ptr(), READ_BYTES, results.data_ptr(), threads)

    return lambda: READ_BYTES / seconds_of(read) / 1e9


def product_rate(dtype: str, threads: int) -> Callable[[], float]:
    """A measurement: GFLOP/s of all threads together, of a bf16 product, or of multiply-adds."""
    if dtype == "bfloat16" and onednn.lacking() is None:
        x, weight = random_numbers(512, 2048, dtype=torch.bfloat16), random_numbers(2048, 2048, dtype=torch.bfloat16)
        product = onednn.prepacked(weight, len(x))
        return lambda: 2 * 512 * 2048 * 2048 / seconds_of(lambda: product(x)) / 1e9
    results, library, rounds = torch.zeros(threads), native.default(), 1_000_000

    def multiply() -> float:
        start = time.perf_counter()
        operations = library("multiply", rounds, results.data_ptr(), threads)
        return float(threads * operations / (time.perf_counter() - start) / 1e9)

    return multiply


def seconds_of(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
