"""Jobs: what one caller asked of an engine, as the event loop and the engine's thread both see it.

The methods `check`, `take` and those that wait are the event loop's, the others the engine thread's. What the engine
thread fills, the event loop reads when the job has ended; before that it gets copies.
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
from quire.request import Request
from quire.text import CompletionOutput, Logprob, RequestOutput, TextEngine


class Delta(NamedTuple):
    """What came to one sample since it was last reported."""

    output: RequestOutput  # its ids do not change; what grows is the engine thread's until the job has ended
    sample: int  # its index
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None
    is_known: bool = False  # the caller has it already


class Job(Protocol):
    """What an engine's thread serves."""

    num_samples: int  # seats that it takes at most
    requests: list[Request]  # those that are counted
    ended: asyncio.Event
    error: QuireError | None  # why it ended, if not for its samples' own reasons

    def check(self, engine: Engine) -> None:
        """Raise RequestError if it could never run."""

    def start(self, processor: TextEngine) -> None:
        """Queue it. Raises what Engine.add raises; then some of it may stand in the queue."""

    def stop(self, engine: Engine) -> None:
        """Take it back."""

    def take(self, deltas: list[Any]) -> None:
        """Take in what a step brought."""


class Generation:
    """Prompts to be continued."""

    def __init__(self, prompts: Sequence[tuple[RequestOutput, list[Request]]]) -> None:
        self.outputs = [output for output, _ in prompts]
        self.requests = [request for _, requests in prompts for request in requests]
        self.num_samples = len(self.requests)
        self.ended = asyncio.Event()
        self.error: QuireError | None = None
        self.num_open = len(self.outputs)  # the engine thread's: outputs that have not ended
        self.prompts = prompts

    def check(self, engine: Engine) -> None:
        """Raise RequestError if one of them could never run."""
        for _, requests in self.prompts:
            engine.check(requests[0])  # its siblings are like it

    def start(self, processor: TextEngine) -> None:
        """Queue all samples."""
        ended: deque[RequestOutput] = deque()
        for output, requests in self.prompts:
            for request in requests:
                processor.add(request, output, ended)

    def stop(self, engine: Engine) -> None:
        """Take all samples back."""
        for request in self.requests:
            engine.abort(request.id)

    def news(self, output: RequestOutput) -> list[Any]:
        """What is to be reported of an output that has grown, as `take` takes it: nothing until the end."""
        return []

    def take(self, deltas: list[Any]) -> None:
        """Take in what a step brought."""


class Reported(Generation):
    """Prompts to be continued, of which every step's news are reported."""

    def __init__(self, prompts: Sequence[tuple[RequestOutput, list[Request]]]) -> None:
        super().__init__(prompts)
        self._reported: dict[tuple[str, int], tuple[int, int]] = {}  # characters and tokens; the engine thread's

    def news(self, output: RequestOutput) -> list[Any]:
        """What is new in an output: a Delta for each sample."""
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
        """So much of a sample is not to be reported again; of one that is whole, nothing more."""
        self._reported[output.request_id, sample] = (-1, -1) if is_whole else (characters, tokens)


class Growing(Reported):
    """One prompt to be continued, whose output its reader sees grow at the reader's own pace.

    What comes between two reads is merged, so that it takes no more memory than the output itself.
    """

    def __init__(self, output: RequestOutput, requests: list[Request]) -> None:
        super().__init__([(output, requests)])
        samples = [CompletionOutput(sample.index) for sample in output.outputs]
        self._output = RequestOutput(output.request_id, output.prompt, output.prompt_token_ids, samples)
        self._came = asyncio.Event()

    def take(self, deltas: list[Delta]) -> None:
        """Take in what a step brought."""
        for delta in deltas:
            _grow(self._output.outputs[delta.sample], delta)
            # All logprobs of the prompt are there before the first token.
            self._output.prompt_logprobs = delta.output.prompt_logprobs
            self._output.prefix_report = delta.output.prefix_report
            self._output.num_running -= delta.finish_reason is not None
        self._came.set()

    async def grown(self) -> RequestOutput:
        """A copy of the output, as soon as it has grown since the last one. Raises what the job ended with."""
        await self._came.wait()
        self._came.clear()
        if self.error is not None:
            raise self.error
        samples = [
            replace(one, token_ids=one.token_ids[:], logprobs=None if one.logprobs is None else one.logprobs[:])
            for one in self._output.outputs
        ]
        return replace(self._output, outputs=samples)


def _grow(sample: CompletionOutput, delta: Delta) -> None:
    sample.seed = delta.output.outputs[delta.sample].seed
    sample.text += delta.text
    sample.token_ids += delta.token_ids
    if delta.logprobs is not None:
        if sample.logprobs is None:
            sample.logprobs, sample.cumulative_logprob = [], 0.0
        sample.logprobs += delta.logprobs
        for token, found in zip(delta.token_ids, delta.logprobs, strict=True):
            sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + found[token].logprob
    sample.finish_reason, sample.stop_reason, sample.error = delta.finish_reason, delta.stop_reason, delta.error


class Search:
    """A beam search on the engine."""

    def __init__(self, driver: BeamDriver) -> None:
        self.driver = driver
        self.requests = [driver.request]
        self.fingerprint: str | None = None  # this process does it
        self.num_samples = len(driver.request_ids)
        self.ended = asyncio.Event()
        self.error: QuireError | None = None

    def check(self, engine: Engine) -> None:
        """Raise RequestError if it could never run."""
        self.driver.check()

    def start(self, processor: TextEngine) -> None:
        """Queue it."""
        self.driver.start()

    def stop(self, engine: Engine) -> None:
        """Take it back."""
        self.driver.stop()

    def take(self, deltas: list[Any]) -> None:
        """Nothing comes before its end."""

    @property
    def failure(self) -> str | None:
        """What failed."""
        return self.driver.error

    def results(self) -> list[Hypothesis]:
        """What it has found, best first."""
        return self.driver.results()


def end(job: Job, error: QuireError | None = None) -> None:
    """Let the caller that waits for a job go on. Its blocks may still be the engine's."""
    if not job.ended.is_set():
        job.error = error
        job.ended.set()
        job.take([])
