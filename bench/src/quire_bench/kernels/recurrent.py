"""Layers that keep a state: how much of the memory's and of the arithmetic units' speed their operators reach.

Decode is measured over the 32 steps of a piece, one of which writes the next state, in bytes of states and rows
against what the machine reads; prefill in floating-point operations against its multiply-adds in fp32. Both
ceilings are measured between the runs, because a shared machine's speed drifts. Layers take turns, so that their states
are larger than the processor's caches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quire import ops
from quire.ops.recurrent import PIECE, RecurrentCache, RecurrentPlan, RecurrentSpec, num_pieces
from quire_bench.kernels.attention import product_rate, random_numbers, read_rate, seconds_of

STATE_BYTES = 256 * 2**20  # of all layers' states


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """Layers of one kind in one step: every sequence has as many rows."""

    rule: Literal["delta", "ssd"]
    batch: int  # S
    num_heads: int  # Hv
    num_k_heads: int  # Hk
    dim_k: int  # Dk
    dim_v: int  # Dv
    taps: int  # K
    query_len: int = 1  # 1: decode
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """The shape in a few letters."""
        kind = "decode" if self.query_len == 1 else f"q{self.query_len}"
        return f"{self.rule} {kind} S{self.batch} {self.num_heads}/{self.num_k_heads} D{self.dim_k}x{self.dim_v}"

    @property
    def width(self) -> int:
        """W: channels of the convolution."""
        return 2 * self.num_k_heads * self.dim_k + self.num_heads * self.dim_v

    @property
    def state_bytes(self) -> int:
        """Bytes of all sequences' states in one layer."""
        return 4 * self.batch * self.num_heads * self.dim_k * self.dim_v

    @property
    def step_bytes(self) -> float:
        """Bytes that decode moves in one layer on average: states, a 32nd of them written, half of the rows."""
        rows = 4 * self.batch * PIECE * (self.num_k_heads * self.dim_k + self.num_heads * self.dim_v)
        return self.state_bytes * (1 + 1 / PIECE) + rows / 2

    @property
    def operations(self) -> int:
        """Floating-point operations of the products with the state in one layer: recalled, and brought up to date."""
        products = 3 if self.rule == "delta" else 2
        return 2 * products * self.batch * self.query_len * self.num_heads * self.dim_k * self.dim_v

    def spec(self) -> RecurrentSpec:
        """With two records of each sequence's states, and one of its rows."""
        return RecurrentSpec(
            num_heads=self.num_heads,
            num_k_heads=self.num_k_heads,
            dim_k=self.dim_k,
            dim_v=self.dim_v,
            width=self.width,
            taps=self.taps,
            num_states=2 * self.batch,
            num_rows=self.batch,
            dtype=getattr(torch, self.dtype),
        )

    def plan(self, backend: ops.Backend, first: int) -> RecurrentPlan:
        """Of the step that begins at that token: it goes on from even states, and writes odd ones."""
        end, batch = first + self.query_len, self.batch
        pieces = num_pieces(first, end)
        states, rows = torch.full((2, batch, max(2, pieces)), -1, dtype=torch.int32)
        states[:, 0] = 2 * torch.arange(batch) if first >= PIECE else -1
        if pieces > 1:
            states[:, pieces - 1] = 2 * torch.arange(batch) + 1
        rows[:, 0 if first % PIECE else pieces - 1] = torch.arange(batch) if first % PIECE or end % PIECE else -1
        starts = torch.arange(0, batch * self.query_len + 1, self.query_len, dtype=torch.int32)
        return backend.recurrent_plan(self.spec(), starts, torch.full((batch,), end, dtype=torch.int32), states, rows)


@dataclass(frozen=True)
class RecurrentFigure:
    """What one layer took, and the ceilings meanwhile: medians."""

    shape: RecurrentShape
    convolution_seconds: float  # of a step
    recurrence_seconds: float  # of a step
    ceiling: float  # GB/s of memory in decode, GFLOP/s of multiply-adds otherwise

    @property
    def rate(self) -> float:
        """GB/s in decode, GFLOP/s otherwise, of the recurrence."""
        work = self.shape.step_bytes if self.shape.query_len == 1 else self.shape.operations
        return work / self.recurrence_seconds / 1e9

    @property
    def fraction(self) -> float:
        """The rate as a share of the ceiling."""
        return self.rate / self.ceiling

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        unit = "GB/s" if self.shape.query_len == 1 else "GFLOP/s"
        return asdict(self) | {"name": self.shape.name, "rate": self.rate, "unit": unit, "fraction": self.fraction}


QWEN3_5: dict[str, Any] = {"num_heads": 16, "num_k_heads": 16, "dim_k": 128, "dim_v": 128, "taps": 4}  # of 0.8B
MAMBA2: dict[str, Any] = {"num_heads": 48, "num_k_heads": 1, "dim_k": 128, "dim_v": 64, "taps": 4}  # Granite 4 Tiny


def shapes() -> list[RecurrentShape]:
    """Decode of few and many sequences, and prefill, of the gated delta rule and of Mamba-2."""
    cases = [(batch, 1) for batch in (1, 8, 32)] + [(1, 2048)]
    delta = [RecurrentShape(rule="delta", batch=batch, query_len=rows, **QWEN3_5) for batch, rows in cases]
    return delta + [RecurrentShape(rule="ssd", batch=batch, query_len=rows, **MAMBA2) for batch, rows in cases]


def measure(backend: ops.Backend, shape: RecurrentShape, runs: int) -> RecurrentFigure:
    """Time both operators in turn, the ceiling in between."""
    threads = torch.get_num_threads()
    decodes = shape.query_len == 1
    ceiling = read_rate(threads) if decodes else product_rate("float32", threads)
    convolve, recur, calls = _calls(backend, shape)
    convolve(), recur()
    rounds = [(seconds_of(convolve), ceiling(), seconds_of(recur)) for _ in range(runs)]
    convolution, rate, recurrence = (statistics.median(column) for column in zip(*rounds, strict=True))
    return RecurrentFigure(shape, convolution / calls, recurrence / calls, rate)


def _calls(backend: ops.Backend, shape: RecurrentShape) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Both operators in all layers, in decode for the steps of a piece; and how many calls that is."""
    decodes = shape.query_len == 1
    layers = max(1, -(-STATE_BYTES // shape.state_bytes)) if decodes else 1
    spec = shape.spec()
    caches = [_filled(spec) for _ in range(layers)]
    plans = [shape.plan(backend, PIECE + t) for t in range(PIECE)] if decodes else [shape.plan(backend, 0)]
    rows = shape.batch * shape.query_len
    x = random_numbers(rows, shape.width, dtype=spec.dtype)
    gates = random_numbers(rows, (2 if shape.rule == "delta" else 1) * shape.num_heads, dtype=spec.dtype)
    weight = random_numbers(shape.width, shape.taps, dtype=torch.float32)
    decay_rate, bias = -torch.rand(shape.num_heads), torch.zeros(shape.num_heads)

    def convolve() -> None:
        for plan in plans:
            for cache in caches:
                backend.convolve(x, weight, None, "silu", cache, plan)

    def recur() -> None:
        for plan in plans:
            for cache in caches:
                _recur(backend, shape, x, gates, decay_rate, bias, cache, plan)

    return convolve, recur, len(plans) * layers


def _recur(
    backend: ops.Backend,
    shape: RecurrentShape,
    x: Tensor,  # [T, W]
    gates: Tensor,  # [T, 2 * Hv] or [T, Hv]
    decay_rate: Tensor,  # fp32 [Hv]
    bias: Tensor,  # fp32 [Hv]
    cache: RecurrentCache,
    plan: RecurrentPlan,
) -> Tensor:
    if shape.rule == "delta":
        return backend.gated_delta(x, gates, decay_rate, bias, cache, plan)
    return backend.state_space(x, gates, decay_rate, bias, bias, (0.0, 1.0), cache, plan)


def _filled(spec: RecurrentSpec) -> RecurrentCache:
    """Records full of numbers, small ones so that nothing grows beyond bounds."""
    cache = RecurrentCache.allocate(spec)
    for name, x in cache.tensors().items():
        x.copy_(random_numbers(*x.shape, dtype=x.dtype) * 0.05)
        if name == "decays":
            x.fill_(-0.1)
    return cache
