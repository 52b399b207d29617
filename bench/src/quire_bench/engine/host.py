"""The host's time of a decoding step, on a device that takes none.

The model is a `FakeModel`, which computes nothing and always has the same logits. Everything else is real: scheduler,
block manager, batch, attention plan, sampler, text, and the server's routes. So what a step takes is the host's part
of it, on any machine.
"""

from __future__ import annotations

import asyncio
import gc
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType
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
from quire.frontend.outputs import RequestOutput
from quire.frontend.request_factory import RequestFactory, TokenizedPrompt
from quire.frontend.tokenizer import Tokenizer, find_tokenizer
from quire.models import locate
from quire.models.batch import Batch
from quire.models.files import files_of
from quire.models.lora.slots import Loras
from quire.models.model import ModelShape, WeightBytes
from quire.models.pooling import Pooler
from quire.models.pooling_config import PoolingConfig
from quire.ops.collectives import Communicator
from quire.ops.program import Plan
from quire.request import SamplingParams, StructuredOutputsParams
from quire.server.run import build_parts
from quire.server.server_config import ServerConfig

PARTS = ("plan", "lay out", "attention plan", "sample", "commit", "text", "other")
CASES: Mapping[str, Mapping[str, Any]] = MappingProxyType(  # sampling parameters
    {
        "greedy": {"temperature": 0.0, "detokenize": False},
        "text": {"temperature": 0.8},
        "stop": {"temperature": 0.8, "stop": ["never drawn", "nor this"]},
        "penalties": {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
        "logprobs": {"temperature": 0.8, "logprobs": 2},
        "grammar": {"temperature": 0.8, "structured_outputs": StructuredOutputsParams(regex="[a-z ]*")},
    }
)
VOCABULARY = 96  # few, since the arithmetic over a vocabulary is the device's
CONTEXT = 100  # tokens of a prompt
WARM_UP = 8  # steps that are not counted
MOST_STEPS = 256  # steps until all prompts are computed
BLOCKS = 48  # for each sequence


@dataclass(frozen=True)
class FakeShape:
    """The sizes of a model with one small layer."""

    vocab_size: int = VOCABULARY
    hidden_size: int = 8
    layer_width: int = 8
    groups: tuple[CacheGroup, ...] = (CacheGroup((0,), None, Heads(1, 1, 8)),)
    num_token_ids: int = VOCABULARY
    causal: bool = True
    has_head: bool = True


class FakeModel:
    """A model that computes nothing. Row r of every step has row r of the same table of logits."""

    origin = "a model that computes nothing"
    quantisation = None
    dtype = torch.float32
    max_model_len = 4_096
    eos_token_ids: frozenset[int] = frozenset()
    weight_bytes = WeightBytes()
    rows_are_batch_invariant = True
    capturable = True
    pooler = Pooler(PoolingConfig(size=8))
    exchange: Communicator | None = None
    loras: Loras | None = None
    draft_head = None
    config: ModelShape = FakeShape()
    whole: ModelShape = config

    def __init__(self, most_rows: int) -> None:
        """most_rows: of the logits."""
        self._logits = torch.randn(most_rows, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.seconds = 0.0  # time of copying logits, which is the device's

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[Plan], rows: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return hidden states of zeros."""
        return torch.zeros(batch.token_ids.shape[0] if rows is None else rows.shape[0], 8)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return rows of the table, as a copy, since the sampler changes them."""
        start = time.perf_counter()
        found = self._logits[: hidden.shape[0]].clone()
        self.seconds += time.perf_counter() - start
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
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.seconds[part] += seconds - self._within.pop()
                self._within[-1] += seconds

        return call


@dataclass(frozen=True)
class HostTime:
    """The host's time of a decoding step.

    Attributes:
        case: see `CASES`.
        sequences: rows of each step.
        milliseconds: median of the steps.
        quick: milliseconds that a tenth of the steps took at most; on a busy machine the better measure.
        parts: mean milliseconds of each part, with what timing them takes.
    """

    case: str
    sequences: int
    milliseconds: float
    quick: float
    parts: Mapping[str, float]

    @property
    def microseconds_each(self) -> float:
        """Microseconds of the median step for each sequence."""
        return 1e3 * self.milliseconds / self.sequences

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {**asdict(self), "microseconds_each": self.microseconds_each}


def measure(case: str, sequences: int, steps: int = 128, *, overlapped: bool = False) -> HostTime:
    """Decode with that many sequences for `steps` steps.

    overlapped: plan each step while the one before it is computed, and replay graphs, as on a GPU.
    """
    tokenizer = cast(Tokenizer, find_tokenizer(files_of(locate(None, None))))
    engine, model = make_engine(sequences, overlapped=overlapped)
    processor = OutputProcessor(engine, tokenizer)
    with _factory(engine, tokenizer) as factory:
        _add_prompts(
            factory, processor, sequences, SamplingParams(**CASES[case], max_tokens=steps + MOST_STEPS, seed=1)
        )
        while any(request.num_generated < WARM_UP for request in engine.scheduler.requests.values()):
            list(processor.process(engine.step()))
        seconds = _step_seconds(engine, processor, model, steps)
        clock = Clock()
        _time_parts(engine, processor, clock)
        whole = _step_seconds(engine, processor, model, steps // 2)
    clock.seconds["other"] += sum(whole) - sum(clock.seconds.values())
    parts = {part: 1e3 * total / len(whole) for part, total in clock.seconds.items()}
    quick = statistics.quantiles(seconds, n=10, method="inclusive")[0]
    return HostTime(case, sequences, 1e3 * statistics.median(seconds), 1e3 * quick, parts)


def make_engine(sequences: int, *, overlapped: bool = False) -> tuple[Engine, FakeModel]:
    """Return an engine for that many sequences, and its model. overlapped: see `measure`."""
    model = FakeModel(sequences)
    config = engine_config(
        max_num_seqs=sequences,
        max_num_batched_tokens=max(2_048, sequences),
        num_blocks=sequences * BLOCKS,
        num_speculative_tokens=0,
    )
    engine = build_engine(model, ops.load("cpu"), config)
    if overlapped:
        engine.loop = OverlappedLoop()
        max_blocks = -(-model.max_model_len // config.cache.block_size)
        engine.runner = GraphRunner(cast(Runner, engine.runner), sequences, max_blocks, lambda function: function)
    return engine, model


@contextmanager
def _factory(engine: Engine, tokenizer: Tokenizer) -> Iterator[RequestFactory]:
    factory = RequestFactory.of(engine, tokenizer, {})
    try:
        yield factory
    finally:
        factory.close()
        engine.close()


def _prompt(number: int) -> list[int]:
    """Return one of many prompts that share no block."""
    count = VOCABULARY - 5
    return [5 + i % count for i in (number, number // count, *range(CONTEXT - 2))]


def _add_prompts(factory: RequestFactory, processor: OutputProcessor, count: int, params: SamplingParams) -> None:
    ended: deque[RequestOutput] = deque()
    prompts = [TokenizedPrompt(None, _prompt(number)) for number in range(count)]
    for output, requests in factory.generations(prompts, params, None, None):
        for request in requests:
            processor.add(request, output, ended, is_streamed=False)


def _step_seconds(engine: Engine, processor: OutputProcessor, model: FakeModel, steps: int) -> list[float]:
    """Return the seconds of each of these steps, with text."""
    seconds = []
    gc.collect()
    gc.disable()  # as servers do
    try:
        for _ in range(steps):
            model.seconds, start = 0.0, time.perf_counter()
            outputs = list(processor.process(engine.step()))
            seconds.append(time.perf_counter() - start - model.seconds)
            if failed := [event.error for event, _ in outputs if event.error]:
                raise RuntimeError(f"a step failed: {failed[0]}")
    finally:
        gc.enable()
    return seconds


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
    processor.process = clock.timed("text", lambda events: list(process(events)))  # type: ignore[method-assign]


def measure_http(streams: int, tokens: int = 64) -> float:
    """Return the microseconds per token that the server's event loop takes for that many streams of completions.

    Requests enter and leave at the application, so that sockets and a client take none of it.
    """
    parts = build_parts({"num_blocks": streams * BLOCKS, "max_num_seqs": streams}, ServerConfig(port=0))
    cast(Runner, parts.llm.engine.runner).model = FakeModel(streams)
    app = parts.app()
    body = {"model": parts.service.model.names[0], "max_tokens": tokens, "stream": True, "ignore_eos": True}

    async def ask(number: int) -> None:
        sent = [json.dumps({**body, "prompt": _prompt(number)}).encode()]
        never = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not sent:
                await never.wait()  # the client stays
            return {"type": "http.request", "body": sent.pop(), "more_body": False}

        async def send(message: Mapping[str, Any]) -> None:
            if message.get("status", 200) != 200:
                raise RuntimeError(f"the server answers with status {message['status']}")

        headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions",
                 "query_string": b"", "headers": headers, "scheme": "http", "http_version": "1.1", "root_path": "",
                 "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "asgi": {"version": "3.0"}}  # fmt: skip
        await app(scope, receive, send)

    async def run() -> float:
        async with app.router.lifespan_context(app):
            await asyncio.gather(*map(ask, range(streams)))
            start = time.thread_time()
            await asyncio.gather(*map(ask, range(streams)))
            return time.thread_time() - start

    return 1e6 * asyncio.run(run()) / (streams * tokens)
