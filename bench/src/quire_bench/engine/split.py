"""Where the time of a step goes: the engine's parts against the clock, each without the parts within it.

Functions are timed where they stand, in the engine, the runner, the model and the backend, and only while somebody
looks: a run that counts knows nothing of it. On a GPU each part is waited for, and no graph is replayed, so that what
is queued counts where it belongs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor

from quire.cache.storage import KVCache
from quire.engine import engine as engine_room
from quire.engine import runner as runner_room
from quire.engine.engine import Engine
from quire.engine.graphs import GraphRunner
from quire.engine.runner import Runner
from quire.errors import Unsupported
from quire.llm import LLM
from quire.models.decoder import Decoder, Layer
from quire.models.experts import Experts, Mlp
from quire.models.linear import Linear
from quire.models.native import NativeLayers
from quire.ops import AttentionPlan
from quire.ops import gather as gather_backend
from quire.request import Event
from quire.text import OutputProcessor, RequestOutput

SMALL = "small operators"
PARTS = ("plan", "flatten", "update", "gather", "linears", "attention", "cache write", SMALL, "sampling", "commit",
         "detokenize", "other")  # fmt: skip
# What the functions of a backend and the operators of the native library count as; those not named are small.
OPERATORS = {
    **{"attention": "attention", "write_kv": "cache write"},
    **dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "rope", "swiglu", "gelu"), SMALL),
}
NATIVE = {"linear": "linears", "experts": "linears", "attention": "attention", "write": "cache write"}
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

    def split(self, total: float) -> dict[str, float]:
        """Seconds of each part of a run that took `total`; "other" has the rest."""
        named = {part: seconds for part, seconds in self._seconds.items() if part != "other"}
        return named | {"other": total - sum(named.values())}


@contextmanager
def recorded(llm: LLM, processor: OutputProcessor) -> Iterator[Timeline]:
    """While this is open, the calls of this engine and of this processor are noted.

    Raises Unsupported for a model that transformers computes: its parts are not known.
    """
    engine, decoder = llm.engine, llm.decoder
    if not isinstance(decoder, Decoder):
        raise Unsupported("the time of a step is split for models of Quire's own decoder; this one is transformers'")
    timeline = Timeline(torch.cuda.synchronize if decoder.device.type == "cuda" else lambda: None)
    with ExitStack() as stack:

        def put(owner: object, name: str, value: object) -> None:
            stack.enter_context(patch.object(owner, name, value))

        def time_calls(owner: object, parts: Mapping[str, str]) -> None:
            for name, part in parts.items():
                put(owner, name, timeline.timed(part, name, getattr(owner, name)))

        def process(events: Sequence[Event]) -> list[tuple[Event, RequestOutput]]:
            return list(untimed(events))

        untimed = processor.process
        put(processor, "process", timeline.timed("detokenize", "detokenize", process))
        runner = _eager(engine)
        put(engine, "runner", runner)
        time_calls(engine, {"step": "other"})
        time_calls(engine.scheduler, {"plan": "plan", "commit": "commit"})
        time_calls(engine_room, {"flatten": "flatten"})
        time_calls(runner_room, {"update": "update"})
        time_calls(runner, {"run": "other", "move": "cache write", "finish": "sampling"})
        time_calls(decoder, {"forward": SMALL, "lm_head": "linears"})
        if decoder.native_layers is not None:
            put(decoder, "native_layers", _timed_layers(decoder.native_layers, timeline))
            yield timeline
            return
        time_calls(decoder.ops, OPERATORS)
        if decoder.ops.NAME == gather_backend.NAME:
            time_calls(gather_backend, {"gather": "gather"})
        put(decoder, "layers", [_timed_linears(layer, timeline) for layer in decoder.layers])
        yield timeline


def _eager(engine: Engine) -> Runner:
    """The engine's runner that runs step by step."""
    runner = engine.runner
    return runner.runner if isinstance(runner, GraphRunner) else cast(Runner, runner)


def _timed_linears(layer: Layer, timeline: Timeline) -> Layer:
    """The layer, its linears noted."""

    def timed(owner: object, name: str) -> Linear:
        return timeline.timed("linears", name, getattr(owner, name))

    def timed_mlp(mlp: Mlp) -> Mlp:
        return Mlp(timed(mlp, "mlp_in"), timed(mlp, "mlp_out"))

    def timed_experts(experts: Experts) -> Experts:
        mlps = [timed_mlp(expert) for expert in experts.experts]
        return replace(experts, router=timed(experts, "router"), experts=mlps)

    mlp = timed_experts(layer.mlp) if isinstance(layer.mlp, Experts) else timed_mlp(layer.mlp)
    return replace(layer, qkv=timed(layer, "qkv"), output=timed(layer, "output"), mlp=mlp)


def _timed_layers(layers: NativeLayers, timeline: Timeline) -> Callable[..., Tensor]:
    """The layers, each operator noted as the native library timed it."""
    kinds = layers.kinds

    def call(
        residual: Tensor, positions: Tensor, cache: KVCache, plans: Sequence[AttentionPlan], rows: Tensor | None
    ) -> Tensor:
        seconds = torch.zeros(len(kinds), dtype=torch.float64)
        start = time.perf_counter()
        hidden = layers(residual, positions, cache, plans, rows, seconds)
        for kind, took in zip(kinds, seconds.tolist(), strict=True):
            timeline.add(NATIVE.get(kind, SMALL), kind, start, took)
            start += took
        return hidden

    return call


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
