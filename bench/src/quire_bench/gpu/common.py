"""The common parts of the stages of the GPU benchmark: their settings, the rows that they report, and the clock.

Times on a GPU are taken with events, around calls that are launched one by one and around replays of a captured graph
of them, where they can be captured; the faster of the two medians counts, and both are reported. Contestants run in
turn, forwards and then backwards.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from quire import ops

Row: TypeAlias = dict[str, Any]
Call: TypeAlias = Callable[[], object]

SAMPLE_SECONDS = 0.02  # of one sample: enough calls to fill it are captured together
MOST_CALLS = 200  # in one graph
ROUNDS = 5  # forwards, and as many backwards
STREAM_BYTES = 2**30  # that a copy or a read goes over: many times the GPU's cache
PRODUCT = 8192  # rows and columns of the matrix product


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of all stages."""

    device: str = "cuda"
    backend: str = "triton"
    tiny: bool = False  # shapes that a machine without a GPU runs in seconds
    fa3: str | None = None  # the library of FlashAttention 3 that registers torch.ops._vllm_fa3_C
    nano: str | None = None  # a folder with nano-vllm's source


@dataclass
class Bench:
    """One stage at work: where its rows go, and how long it may take."""

    settings: Settings
    stage: str
    emit: Callable[[Row], None]
    deadline: float = math.inf  # by time.monotonic
    backend: ops.Backend = field(init=False)

    def __post_init__(self) -> None:
        self.backend = ops.load(self.settings.backend, self.settings.device)

    @property
    def device(self) -> str:
        """The device of all tensors."""
        return self.settings.device

    @property
    def on_gpu(self) -> bool:
        """Return whether times are taken with events."""
        return self.device != "cpu"

    @property
    def seconds_left(self) -> float:
        """Until this stage should have ended."""
        return self.deadline - time.monotonic()

    def row(self, case: str, who: str, **figures: Any) -> None:
        """Report what somebody did in one case."""
        self.emit({"stage": self.stage, "case": case, "who": who, **figures})

    def failed(self, case: str, who: str, error: BaseException | str) -> None:
        """Report that nothing was found, and why."""
        shown = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.row(case, who, error=shortened(shown))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Give back the memory of tensors that are gone."""
        if self.on_gpu:
            gc.collect()  # engines and graphs stand in circles
            torch.cuda.empty_cache()

    def seconds_of(self, run: Call) -> float:
        """Wall-clock seconds of one call, the GPU's work included."""
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def spec(self, **fields: Any) -> ops.AttentionSpec:
        """An AttentionSpec on the benchmark's device."""
        return ops.AttentionSpec(device=self.device, **fields)


@dataclass(frozen=True)
class Stage:
    """One part of the benchmark."""

    run: Callable[[Bench], None]
    seconds: float  # that it may take
    beside: bool = False  # runs at the same time as the others of its kind, before what is timed
    compiles: bool = False  # also runs beside these, for the caches of its compilers


def shortened(text: str, most: int = 600) -> str:
    """The text, or its beginning and its end."""
    text = text.strip()
    return text if len(text) <= most else f"{text[: most // 3]} ... {text[-2 * most // 3 :]}"


class Clock:
    """Samples of the seconds that a call takes, launched one by one and, on a GPU, replayed as a captured graph."""

    def __init__(self, call: Call, on_gpu: bool) -> None:
        """Run it until it is compiled, and capture as many calls as fill a sample."""
        self._call, self._on_gpu, self._calls = call, on_gpu, 1
        self.host_seconds = 0.0  # until a call is launched, the GPU still at work
        self.samples: dict[str, list[float]] = {"eager": []}  # seconds of a call
        self._graph: torch.cuda.CUDAGraph | None = None
        call()
        if not on_gpu:
            return
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(3):
            call()
        self.host_seconds = (time.perf_counter() - begin) / 3
        torch.cuda.synchronize()
        took = (time.perf_counter() - begin) / 3
        self._calls = max(3, min(MOST_CALLS, math.ceil(SAMPLE_SECONDS / took)))
        event: Any = torch.cuda.Event
        self._start, self._end = event(enable_timing=True), event(enable_timing=True)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph):
                for _ in range(self._calls):
                    call()
        except Exception:  # it waits for the GPU, say
            torch.cuda.set_stream(stream)  # which a capture that fails does not
            torch.cuda.synchronize()
        else:
            self._graph = graph
            self.samples["graph"] = []
            graph.replay()

    def sample(self) -> None:
        """Take one sample of each kind."""
        if not self._on_gpu:
            start = time.perf_counter()
            self._call()
            self.samples["eager"].append(time.perf_counter() - start)
            return
        self.samples["eager"].append(self._between(lambda: [self._call() for _ in range(self._calls)]))
        if self._graph is not None:
            self.samples["graph"].append(self._between(self._graph.replay))

    def _between(self, run: Call) -> float:
        """Seconds of each of the calls that this makes."""
        self._start.record()
        run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) / 1e3 / self._calls

    @property
    def seconds(self) -> float:
        """The median of the faster kind: a graph launches more quickly, and may launch what it does not need."""
        return min(statistics.median(found) for found in self.samples.values())


@dataclass(frozen=True)
class Contestant:
    """One of those that do the same work."""

    make: Callable[[], Call]  # called once, before anything is timed
    work: float = 0.0  # of a call: bytes, or floating-point operations; 0: only the time is reported
    unit: str = "GB/s"  # or TFLOP/s


PER_UNIT = {"GB/s": 1e9, "TFLOP/s": 1e12}


def race(
    bench: Bench,
    case: str,
    contestants: Mapping[str, Contestant],
    ceiling: str | None = None,
    rounds: int = ROUNDS,
    **more: Any,
) -> dict[str, float]:
    """Time all contestants in turn and report each: name -> median seconds of a call.

    ceiling: the contestant whose rate the others' shares are of. more: goes into every row.
    One that fails is reported and left out.
    """
    clocks: dict[str, Clock] = {}
    for name, contestant in contestants.items():
        if bench.seconds_left < 0:
            bench.failed(case, name, "the stage's time was up")
            continue
        try:
            clocks[name] = Clock(contestant.make(), bench.on_gpu)
        except Exception as error:  # others' code fails in all sorts of ways
            bench.failed(case, name, error)
    rounds = 1 if bench.settings.tiny else rounds
    for order in [list(clocks)] * rounds + [list(reversed(clocks))] * rounds:
        for name in order:
            clocks[name].sample()
    seconds = {name: clock.seconds for name, clock in clocks.items()}
    rates = {name: contestants[name].work / seconds[name] / PER_UNIT[contestants[name].unit] for name in seconds}
    for name, clock in clocks.items():
        figures: Row = {"us": 1e6 * seconds[name]}
        if contestants[name].work:
            figures |= {"value": rates[name], "unit": contestants[name].unit}
            if ceiling in rates:
                figures["share"] = rates[name] / rates[ceiling]
        for kind, found in clock.samples.items():
            figures[f"{kind}_us"] = [round(1e6 * x, 2) for x in (min(found), statistics.median(found), max(found))]
        if bench.on_gpu:
            figures["host_us"] = round(1e6 * clock.host_seconds, 1)
        bench.row(case, name, **figures, **more)
    return seconds


# ------------------------------------------------------------------------------------------------ ceilings


def copy(bench: Bench) -> Contestant:
    """The GPU's own copy; its bytes are read and written."""
    size = 2**16 if bench.settings.tiny else STREAM_BYTES

    def make() -> Call:
        source = torch.randint(0, 127, (size,), dtype=torch.uint8, device=bench.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Contestant(make, 2 * size)


def read(bench: Bench) -> Contestant:
    """A sum over more than fits the cache."""
    size = 2**16 if bench.settings.tiny else 2 * STREAM_BYTES

    def make() -> Call:
        source = torch.randn(size // 4, device=bench.device)
        out = torch.empty((), device=bench.device)
        return lambda: torch.sum(source, dim=0, out=out)

    return Contestant(make, size)


def product(bench: Bench) -> Contestant:
    """A product of large bf16 matrices of random numbers."""
    size = 64 if bench.settings.tiny else PRODUCT

    def make() -> Call:
        a, b = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    return Contestant(make, 2.0 * size**3, "TFLOP/s")


def ceilings(bench: Bench) -> None:
    """Stage: what the machine does at best, and what a launch costs."""
    race(bench, "memory", {"copy": copy(bench), "read": read(bench)})
    race(bench, "product", {"product": product(bench)})
    one = torch.zeros(1, device=bench.device)
    race(bench, "launch", {"smallest kernel": Contestant(lambda: lambda: one.add_(1))})
