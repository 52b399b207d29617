"""The parts of a step's time: those of the engine by the clock, each without the parts within it.

The engine and the runner are stood in for by ones that time their parts, and executors report each operator, only
while somebody looks: a run that counts knows nothing of it. On a GPU each part is waited for, and no graph is replayed,
so that what is queued counts where it belongs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

from quire.engine.engine import Engine
from quire.engine.graphs import GraphRunner
from quire.engine.loops import SequentialLoop
from quire.engine.runner import Runner
from quire.engine.scheduler import Scheduler
from quire.engine.step_events import StepEvents
from quire.errors import Unsupported
from quire.frontend.llm import LLM
from quire.models.decoder import Decoder
from quire.ops.backends.eager import EagerExecutor
from quire.ops.backends.gather import GatherBackend

SMALL = "small operators"
PARTS = ("plan", "flatten", "update", "gather", "linears", "attention", "states", "cache write", SMALL, "sampling",
         "commit", "detokenize", "other")  # fmt: skip
# What the operators of a program count as; those not named are small.
OPERATORS = {"linear": "linears", "experts": "linears", "attention": "attention", "write": "cache write",
             **dict.fromkeys(("convolution", "gated_delta", "state_space"), "states")}  # fmt: skip
PHASES = ("step", "plan", "flatten", "run", "commit", "detokenize")  # what stands in a trace's first row
ROWS = ("engine", "operators")


class Span(NamedTuple):
    """One call."""

    name: str
    part: str
    start: float  # seconds, by time.perf_counter
    seconds: float


class Timeline:
    """The calls of a run, and what its parts took."""

    def __init__(self, wait: Callable[[], object] = lambda: None) -> None:
        """wait: returns when the device has done what is queued."""
        self.spans: list[Span] = []
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._wait = wait
        self._within = [0.0]  # of each open call, seconds of the calls that it made; the first is nobody's
        self._operator_end = 0  # spans that were there when the last operator was noted

    def timed(self, part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its calls noted as that part, but for the calls within them."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._wait()
            self._within.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._wait()
                self.add(part, name, start, time.perf_counter() - start, self._within.pop())

        return call

    def add(self, part: str, name: str, start: float, seconds: float, within: float = 0.0) -> None:
        """Note a call, which spent so much of its time in others that were noted before."""
        self.spans.append(Span(name, part, start, seconds))
        self._seconds[part] += seconds - within
        self._within[-1] += seconds

    def note(self, kind: str, start: float, seconds: float) -> None:
        """Note an operator when it is done; calls that were noted since the one before it were within it."""
        within = sum(span.seconds for span in self.spans[self._operator_end :] if span.start >= start)
        self.add(OPERATORS.get(kind, SMALL), kind, start, seconds, within)
        self._within[-1] -= within  # counted once already
        self._operator_end = len(self.spans)

    def split(self, total: float) -> dict[str, float]:
        """Seconds of each part of a run that took `total`; "other" has the rest."""
        named = {part: seconds for part, seconds in self._seconds.items() if part != "other"}
        return named | {"other": total - sum(named.values())}


class _TimedScheduler:
    """A scheduler whose plans and commits are noted."""

    def __init__(self, scheduler: Scheduler, timeline: Timeline) -> None:
        self._scheduler = scheduler
        self.plan = timeline.timed("plan", "plan", scheduler.plan)
        self.commit = timeline.timed("commit", "commit", scheduler.commit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


class _TimedRunner(Runner):
    """A runner whose steps are noted, by their parts."""

    def __init__(self, runner: Runner, timeline: Timeline) -> None:
        vars(self).update(vars(runner))
        for name, part in (("run", "other"), ("move", "cache write"), ("update", "update"), ("finish", "sampling")):
            setattr(self, name, timeline.timed(part, name, getattr(super(), name)))


class _TimedEngine(Engine):
    """An engine whose steps are noted; the other one's state is used as it is."""

    def __init__(self, engine: Engine, runner: Runner, timeline: Timeline) -> None:
        vars(self).update(vars(engine))
        self._events = StepEvents()
        self.loop = SequentialLoop()  # so that parts do not run at the same time
        self.scheduler = cast(Scheduler, _TimedScheduler(engine.scheduler, timeline))
        self.runner = _TimedRunner(runner, timeline)
        for name, part in (("step", "other"), ("flatten", "flatten")):
            setattr(self, name, timeline.timed(part, name, getattr(super(), name)))


class _TimedGather(GatherBackend):
    """The gathering backend, its copies noted."""

    def __init__(self, timeline: Timeline) -> None:
        self.gather = timeline.timed("gather", "gather", super().gather)  # type: ignore[method-assign]


@contextmanager
def recorded(llm: LLM) -> Iterator[tuple[Engine, Timeline]]:
    """While this is open, the calls of this engine are noted, if it is stepped through the one that is yielded.

    Raises Unsupported for a model that transformers computes: its parts are not known.
    """
    engine, decoder = llm.engine, llm.decoder
    if not isinstance(decoder, Decoder):
        raise Unsupported("the time of a step is split for models of Quire's own decoder; this one is transformers'")
    timeline = Timeline(torch.cuda.synchronize if decoder.device.type == "cuda" else lambda: None)
    layers, forward, lm_head = decoder.layers, decoder.forward, decoder.lm_head
    if decoder.backend.name == "gather":
        decoder.layers = EagerExecutor(_TimedGather(timeline), layers.program)
    decoder.layers.observer = timeline.note
    decoder.forward = timeline.timed(SMALL, "forward", forward)  # type: ignore[method-assign]
    decoder.lm_head = timeline.timed("linears", "lm_head", lm_head)
    try:
        yield _TimedEngine(engine, _eager(engine), timeline), timeline
    finally:
        layers.observer = None
        decoder.layers, decoder.lm_head = layers, lm_head
        del decoder.forward  # the method again


def _eager(engine: Engine) -> Runner:
    """The engine's runner that runs step by step."""
    runner = engine.runner
    return runner.runner if isinstance(runner, GraphRunner) else cast(Runner, runner)


def chrome_trace(runs: Mapping[str, Sequence[Span]]) -> dict[str, object]:
    """The runs by name as chrome://tracing and Perfetto read them: a process each, the engine's phases in one row.

    The format is Google's "Trace Event Format", with times in microseconds.
    """
    events: list[dict[str, object]] = []
    for process, (run, spans) in enumerate(runs.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": run}})
        for row, name in enumerate(ROWS):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}})
        begin = min((span.start for span in spans), default=0.0)
        for span in sorted(spans, key=lambda span: span.start):
            row = 0 if span.name in PHASES else 1
            times = {"ts": 1e6 * (span.start - begin), "dur": 1e6 * span.seconds}
            events.append({"ph": "X", "name": span.name, "cat": span.part, "pid": process, "tid": row, **times})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
