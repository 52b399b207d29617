"""Linears alone: what they read, and how they stand to oneDNN's.

Weights for few rows are taken in turn out of a pool that is larger than the processor's caches, so that each is read
from memory. All calls that are compared take turns, and the memory's read rate is measured between them. Of all times
the lower quartile counts, and of read rates the upper one: what else runs on a machine only ever takes time away.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from quire.ops.cpu.linear import PackedLinear, Packer
from quire_bench.kernels import onednn
from quire_bench.kernels.attention import random_numbers, seconds_of

FEW_ROWS = 128  # up to which weights come from memory; more rows take longer to multiply than a weight to read
LEAST_ROUNDS = 3
STRETCHES = 5  # that a measurement is cut into, the read rate between them

Call = Callable[[], object]


@dataclass(frozen=True)
class LinearShape:
    """A linear of a model, in bf16."""

    model: str
    in_size: int
    out_size: int

    @property
    def name(self) -> str:
        """The shape in a few letters."""
        return f"{self.model} {self.in_size} -> {self.out_size}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight."""
        return 2 * self.in_size * self.out_size

    def operations(self, rows: int) -> int:
        """Floating-point operations of a call."""
        return 2 * rows * self.in_size * self.out_size


@dataclass(frozen=True)
class LinearFigure:
    """The times of calls with a number of rows, and the machine's rates meanwhile: quartiles on the better side."""

    shape: LinearShape
    rows: int
    seconds: float
    one_row_seconds: float | None  # of calls in the same turns; None for many rows
    onednn_seconds: float | None  # None where there is no such product
    read: float  # GB/s of memory

    @property
    def rate(self) -> float:
        """GFLOP/s."""
        return self.shape.operations(self.rows) / self.seconds / 1e9


def measure(shape: LinearShape, rows: int, memory: Tensor, reader: Callable[[], float], seconds: float) -> LinearFigure:
    """Time one shape with that many rows for about so many seconds.

    memory: uint8, whose size is that of the pool; it is written over. reader: what `attention.read_rate` returns.
    """
    weight = random_numbers(shape.out_size, shape.in_size, dtype=torch.bfloat16)
    x = random_numbers(rows, shape.in_size, dtype=torch.bfloat16)
    packed = Packer()(weight)
    few = rows <= FEW_ROWS
    ours = _copies(packed, memory) if few else [packed]
    turn = cycle(ours)
    calls: dict[str, Call] = {"rows": lambda: next(turn)(x)}
    if few:
        calls["one row"] = lambda: next(turn)(x[:1])
    if onednn.lacking() is None:
        calls["oneDNN"] = _in_turn(partial(onednn.prepacked(weight, rows), x) for _ in ours)
    taken, read = _alternate(calls, reader, seconds)
    return LinearFigure(shape, rows, taken["rows"], taken.get("one row"), taken.get("oneDNN"), read)


def _copies(packed: PackedLinear, memory: Tensor) -> list[PackedLinear]:
    """Return the copies that fit in that memory, or the linear itself if none fits."""
    size = len(packed.packed)
    places = memory[: len(memory) // size * size].view(-1, size)
    places.copy_(packed.packed)
    return [replace(packed, packed=place) for place in places] or [packed]


def _in_turn(calls: Iterable[Call]) -> Call:
    """A call of the next one."""
    turn = cycle(list(calls))

    def call() -> object:
        return next(turn)()

    return call


def _alternate(
    calls: Mapping[str, Call], reader: Callable[[], float], seconds: float
) -> tuple[dict[str, float], float]:
    """Seconds of each call, all of them in turns, and the read rate between stretches of turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    read = []
    for _ in range(STRETCHES):
        read.append(reader())
        until, rounds = time.perf_counter() + seconds / STRETCHES, 0
        while rounds < LEAST_ROUNDS or time.perf_counter() < until:
            for name, call in calls.items():
                taken[name].append(seconds_of(call))
            rounds += 1
    return {name: statistics.quantiles(found, n=4)[0] for name, found in taken.items()}, statistics.quantiles(
        read, n=4
    )[2]
