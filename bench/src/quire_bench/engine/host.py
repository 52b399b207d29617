"""The host's time of a step, on a device that takes none.

The model is a `FakeModel`: it computes nothing and always has the same logits. Everything else is the engine itself:
scheduler, block manager, batch, attention plan, sampler, and text. What remains of a step's time is the host's part of
it, on any machine.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from quire import ops
from quire.cache.groups import CacheGroup, Heads
from quire.cache.storage import KVCache
from quire.config import engine_config
from quire.engine.engine import Engine, build_engine
from quire.engine.graphs import GraphRunner
from quire.engine.loops import OverlappedLoop
from quire.engine.runner import Runner
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.request_factory import RequestFactory, RequestOptions, TokenizedPrompt
from quire.frontend.tokenizer import Tokenizer, find_tokenizer
from quire.models import locate
from quire.models.batch import Batch
from quire.models.files import files_of
from quire.models.lora.slots import Loras
from quire.models.model import ModelShape, WeightBytes
from quire.ops.collectives import Communicator
from quire.ops.program import Plan
from quire.request import SamplingParams, StructuredOutputsParams

PARTS = ("plan", "lay out", "attention plan", "sample", "commit", "text", "other")
CASES: Mapping[str, Mapping[str, Any]] = {  # sampling parameters
    "greedy": {"temperature": 0.0, "detokenize": False},
    "text": {"temperature": 0.8},
    "stop": {"temperature": 0.8, "stop": ["\n\nimport qux", "\x00"]},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.8, "logprobs": 2},
    "grammar": {"temperature": 0.8, "structured_outputs": StructuredOutputsParams(regex="[a-z ]*")},
}
CONTEXT = 100  # tokens of a prompt
VOCABULARY = 320  # tokens that the fake model draws from: the arithmetic of sampling is the device's
_now = time.thread_time
WARM_UP = 8  # steps that are not counted


@dataclass(frozen=True)
class FakeShape:
    """The sizes of a model with one small layer."""

    vocab_size: int
    hidden_size: int = 8
    layer_width: int = 8
    groups: tuple[CacheGroup, ...] = (CacheGroup((0,), None, Heads(1, 1, 8)),)


class FakeModel:
    """A model that computes nothing. Row r of each step has row r of the same table of logits."""

    origin = "a fake model"
    quantisation = None
    dtype = torch.float32
    max_model_len = 4_096
    eos_token_ids: frozenset[int] = frozenset()
    weight_bytes = WeightBytes()
    rows_are_batch_invariant = True
    capturable = True
    exchange: Communicator | None = None
    loras: Loras | None = None

    def __init__(self, vocab_size: int, most_rows: int) -> None:
        self.config: ModelShape = FakeShape(vocab_size)
        self.whole = self.config
        generator = torch.Generator().manual_seed(0)
        self._logits = torch.randn(most_rows, vocab_size, generator=generator)
        self._hidden = torch.zeros(most_rows * CONTEXT, 8)
        self.logits_seconds = 0.0

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[Plan], rows: Tensor | None = None) -> Tensor:
        """Return hidden states of zeros."""
        return self._hidden[: len(batch.token_ids) if rows is None else len(rows)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the first rows of the table, as a copy, since the sampler changes it."""
        start = _now()
        found = self._logits[: len(hidden)].clone()
        self.logits_seconds += _now() - start
        return found


class Clock:
    """Seconds of each part, without the parts inside it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._within = [0.0]  # seconds of the timed calls inside each open call

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time added to that part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._within.append(0.0)
            start = _now()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = _now() - start
                self.seconds[part] += seconds - self._within.pop()
                self._within[-1] += seconds

        return call


@dataclass(frozen=True)
class HostTime:
    """The host's time of a decoding step.

    Attributes:
        sequences: rows of each step.
        case: see `CASES`.
        milliseconds: median of the steps.
        parts: milliseconds of each part, mean of the steps.
    """

    sequences: int
    case: str
    milliseconds: float
    parts: Mapping[str, float]

    @property
    def microseconds_each(self) -> float:
        """Microseconds of a step for each sequence."""
        return 1e3 * self.milliseconds / self.sequences


def measure(sequences: int, case: str, steps: int = 48, *, overlapped: bool = False, backend: str = "cpu") -> HostTime:
    """Decode with `sequences` requests for `steps` steps.

    overlapped: plan each step while the one before is computed, and replay graphs, as on a GPU.
    """
    tokenizer = cast(Tokenizer, find_tokenizer(files_of(locate(None, None))))
    engine, model = make_engine(sequences, backend, overlapped=overlapped)
    processor = OutputProcessor(engine, tokenizer)
    with prepared(engine, tokenizer) as factory:
        _add(factory, processor, sequences, SamplingParams(**CASES[case], max_tokens=WARM_UP + steps + 8, seed=1))
        while any(request.num_generated < 1 for request in engine.scheduler.requests.values()):
            list(processor.process(engine.step()))
        for _ in range(WARM_UP):
            list(processor.process(engine.step()))
        clock = Clock()
        _time_parts(engine, processor, clock)
        seconds = []
        gc.collect()
        gc.disable()  # as servers do
        try:
            for _ in range(steps):
                model.logits_seconds, start = 0.0, _now()
                processor.process(engine.step())
                seconds.append(_now() - start - model.logits_seconds)
        finally:
            gc.enable()
        assert all(request.num_generated >= steps for request in engine.scheduler.requests.values())
    clock.seconds["other"] += sum(seconds) - sum(clock.seconds.values())
    parts = {part: 1e3 * total / steps for part, total in clock.seconds.items()}
    return HostTime(sequences, case, 1e3 * statistics.median(seconds), parts)


def make_engine(sequences: int, backend: str = "cpu", *, overlapped: bool = False) -> tuple[Engine, FakeModel]:
    """Return an engine with a fake model for that many sequences."""
    model = FakeModel(VOCABULARY, sequences)
    config = engine_config(
        max_num_seqs=sequences,
        max_num_batched_tokens=max(2_048, sequences),
        num_blocks=sequences * 32,
        num_speculative_tokens=0,
    )
    engine = build_engine(model, ops.load(backend), config)
    if overlapped:
        engine.loop = OverlappedLoop()
        max_blocks = -(-model.max_model_len // config.cache.block_size)
        engine.runner = GraphRunner(cast(Runner, engine.runner), sequences, max_blocks, lambda function: function)
    return engine, model


@contextmanager
def prepared(engine: Engine, tokenizer: Tokenizer) -> Iterator[RequestFactory]:
    """Yield the factory of the engine's requests."""
    factory = RequestFactory.of(engine, tokenizer, {})
    try:
        yield factory
    finally:
        factory.close()
        engine.close()


def _add(factory: RequestFactory, processor: OutputProcessor, count: int, params: SamplingParams) -> None:
    ended: deque[Any] = deque()
    tokenized = [TokenizedPrompt(None, [*array("i", [5 + i % 300, 5 + i // 300]), *range(5, 3 + CONTEXT)], "") for i in range(count)]
    for output, requests in factory.generations(tokenized, params, None, None):
        for request in requests:
            processor.add(request, output, ended, is_streamed=False)


def _time_parts(engine: Engine, processor: OutputProcessor, clock: Clock) -> None:
    """Add the time of the parts of an engine's steps to the clock from now on."""
    scheduler, runner = engine.scheduler, engine.runner
    eager = runner.runner if isinstance(runner, GraphRunner) else cast(Runner, runner)
    parts: list[tuple[object, str, str]] = [
        (scheduler, "plan", "plan"),
        (scheduler, "plan_ahead", "plan"),
        (scheduler, "commit", "commit"),
        (engine, "flatten", "lay out"),
        (eager, "update", "attention plan"),
        (eager, "finish", "sample"),
    ]
    if isinstance(runner, GraphRunner):
        parts.append((runner, "_prepared", "attention plan"))
    for owner, name, part in parts:
        setattr(owner, name, clock.timed(part, getattr(owner, name)))
    process = processor.process
    setattr(processor, "process", clock.timed("text", lambda events: list(process(events))))  # noqa: B010
