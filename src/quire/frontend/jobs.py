"""Jobs: units of work of one caller, shared by the event loop and the engine's thread.

The event loop calls `check`, `take` and the methods that wait; the engine's thread calls the others. The event loop
reads the objects that the engine's thread fills only after the job has ended; before that it gets copies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from quire.engine.beam import Hypothesis
from quire.engine.beam_driver import BeamDriver
from quire.engine.engine import Engine
from quire.errors import QuireError
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from quire.frontend.requests import Made
from quire.request import Event, Request, RequestOutputKind


class Delta(NamedTuple):
    """Output of one sample since the previous delta."""

    output: RequestOutput  # its ids are constant; other fields belong to the engine's thread until the job has ended
    sample: int  # index of the sample
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    is_known: bool = False  # the caller already has this delta


class Job(Protocol):
    """A unit of work for an engine's thread."""

    num_samples: int  # most sequences that it runs at the same time
    requests: list[Request]  # the requests that are counted
    ended: asyncio.Event
    error: QuireError | None  # why it ended, if not for the samples' own reasons

    def check(self, engine: Engine) -> None:
        """Raise RequestError if it could never run."""

    def start(self, processor: OutputProcessor) -> None:
        """Queue the job. Raises the errors of Engine.add; then some of its requests may be in the queue."""

    def stop(self, engine: Engine) -> None:
        """Abort the job's requests."""

    def take(self, deltas: list[Any]) -> None:
        """Receive the deltas of a step."""


class GenerationJob:
    """Prompts to continue."""

    def __init__(self, prompts: Sequence[Made]) -> None:
        self.outputs = [output for output, _ in prompts]
        self.requests = [request for _, requests in prompts for request in requests]
        self.num_samples = len(self.requests)
        self.ended = asyncio.Event()
        self.error: QuireError | None = None
        self.num_open = len(self.outputs)  # outputs that have not ended; the engine thread's
        self.prompts = prompts

    def check(self, engine: Engine) -> None:
        """Raise RequestError if one of the prompts could never run."""
        for _, requests in self.prompts:
            engine.check(requests[0])  # represents its siblings

    def start(self, processor: OutputProcessor) -> None:
        """Queue all samples."""
        ended: deque[RequestOutput] = deque()
        for output, requests in self.prompts:
            for request in requests:
                processor.add(request, output, ended)

    def stop(self, engine: Engine) -> None:
        """Abort all samples."""
        for request in self.requests:
            engine.abort(request.id)

    def news(self, output: RequestOutput) -> list[Any]:
        """Return the deltas of an output that has grown, for `take`. Here none before the end."""
        return []

    def take(self, deltas: list[Any]) -> None:
        """Receive the deltas of a step."""


class DeltaJob(GenerationJob):
    """Prompts to continue, with deltas after every step."""

    def __init__(self, prompts: Sequence[Made]) -> None:
        super().__init__(prompts)
        self._reported: dict[tuple[str, int], tuple[int, int]] = {}  # characters, tokens; the engine thread's

    def news(self, output: RequestOutput) -> list[Any]:
        """Return the new part of an output: a Delta for each sample that has one."""
        found = []
        for sample in output.outputs:
            key = (output.request_id, sample.index)
            characters, tokens = self._reported.get(key, (0, 0))
            if characters < 0 or (len(sample.token_ids) == tokens and not sample.finished):
                continue
            logprobs = None if sample.logprobs is None else sample.logprobs[tokens:]
            new = (sample.text[characters:], sample.token_ids[tokens:], logprobs)
            found.append(Delta(output, sample.index, *new, sample.finish_reason, sample.stop_reason, sample.error))
            self.mark_reported(output, sample.index, len(sample.text), len(sample.token_ids), is_whole=sample.finished)
        return found

    def mark_reported(
        self, output: RequestOutput, sample: int, characters: int, tokens: int, *, is_whole: bool
    ) -> None:
        """Note the part of a sample that must not be reported again. With `is_whole` nothing more is reported."""
        self._reported[output.request_id, sample] = (-1, -1) if is_whole else (characters, tokens)


class SnapshotJob(DeltaJob):
    """One prompt to continue, whose output the reader observes at its own pace.

    Deltas between two reads are merged, so that they take no more memory than the output itself.
    """

    def __init__(self, output: RequestOutput, requests: list[Request]) -> None:
        super().__init__([(output, requests)])
        samples = [CompletionOutput(sample.index) for sample in output.outputs]
        self._output = RequestOutput(output.request_id, output.prompt, output.prompt_token_ids, samples)
        self._came = asyncio.Event()
        self._is_delta = requests[0].sampling.output_kind is RequestOutputKind.DELTA

    def take(self, deltas: list[Delta]) -> None:
        """Merge the deltas of a step."""
        for delta in deltas:
            _grow(self._output.outputs[delta.sample], delta)
            # All logprobs of the prompt arrive before the first token.
            self._output.prompt_logprobs = delta.output.prompt_logprobs
            self._output.prefix_report = delta.output.prefix_report
            self._output.metrics = delta.output.metrics
            self._output.num_running -= delta.finish_reason is not None
        self._came.set()

    async def grown(self) -> RequestOutput:
        """Wait until the output has grown since the last call and return a copy, or the new part if that is asked for.

        Raises the job's error.
        """
        await self._came.wait()
        self._came.clear()
        if self.error is not None:
            raise self.error
        samples = [
            replace(one, token_ids=one.token_ids[:], logprobs=None if one.logprobs is None else one.logprobs[:])
            for one in self._output.outputs
        ]
        metrics = self._output.metrics
        grown = replace(self._output, outputs=samples, metrics=None if metrics is None else replace(metrics))
        if self._is_delta:
            for one in self._output.outputs:
                one.text, one.token_ids, one.logprobs = "", [], None if one.logprobs is None else []
        return grown


def _grow(sample: CompletionOutput, delta: Delta) -> None:
    source = delta.output.outputs[delta.sample]
    sample.seed, sample.weights_versions = source.seed, source.weights_versions[:]
    sample.text += delta.text
    sample.token_ids += delta.token_ids
    if delta.logprobs is not None:
        if sample.logprobs is None:
            sample.logprobs, sample.cumulative_logprob = [], 0.0
        sample.logprobs += delta.logprobs
        for token, found in zip(delta.token_ids, delta.logprobs, strict=True):
            sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + found[token].logprob
    sample.finish_reason, sample.stop_reason, sample.error = delta.finish_reason, delta.stop_reason, delta.error


class BeamSearchJob:
    """A beam search."""

    def __init__(self, driver: BeamDriver) -> None:
        self.driver = driver
        self.requests = [driver.request]
        self.fingerprint: str | None = None  # this process computes it
        self.num_samples = len(driver.request_ids)
        self.ended = asyncio.Event()
        self.error: QuireError | None = None

    def check(self, engine: Engine) -> None:
        """Raise RequestError if the search could never run."""
        self.driver.check()

    def start(self, processor: OutputProcessor) -> None:
        """Queue the search."""
        self.driver.start()

    def stop(self, engine: Engine) -> None:
        """Abort the search."""
        self.driver.stop()

    def take(self, deltas: list[Any]) -> None:
        """Do nothing, since a search reports no deltas."""

    @property
    def failure(self) -> str | None:
        """The reason of a failure, or None."""
        return self.driver.error

    def results(self) -> list[Hypothesis]:
        """Return the hypotheses found, best first."""
        return self.driver.results()


class EngineStep(NamedTuple):
    """The result of an engine step, for observers."""

    events: Sequence[Event]  # as the engine reported them
    texts: Sequence[tuple[Event, RequestOutput]]  # the events of outputs, with the ends that stop strings caused
    searches: Sequence[BeamSearchJob]  # searches that have ended
    start: float  # s, time.monotonic()
    end: float  # s, time.monotonic()

    @property
    def seconds(self) -> float:
        """Duration of the step in seconds."""
        return self.end - self.start


def end(job: Job, error: QuireError | None = None) -> None:
    """End a job, which wakes its caller. The engine may still hold the job's blocks."""
    if not job.ended.is_set():
        job.error = error
        job.ended.set()
        job.take([])
