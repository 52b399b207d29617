"""Jobs: what one client asked of the engine, as the event loop and the engine's thread both see it.

The methods `check`, `deltas` and `take` are the event loop's, the others the engine thread's. What the engine thread
fills, the event loop reads when the job has ended; before that it gets copies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from quire.engine.beam import Hypothesis
from quire.engine.beam_driver import BeamDriver
from quire.engine.engine import Engine
from quire.request import Request
from quire.server.http.api_error import ApiError
from quire.text import Logprob, RequestOutput, TextEngine


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
    is_known: bool = False  # the client has it already


class Job(Protocol):
    """What a worker serves."""

    num_samples: int  # seats that it takes at most
    requests: list[Request]  # those that are counted
    ended: asyncio.Event
    error: ApiError | None  # why it ended, if not for its samples' own reasons

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
        self.error: ApiError | None = None
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


class Stream(Generation):
    """Prompts to be continued, reported as they grow."""

    is_continued = False  # the client has a part of it already

    def __init__(self, prompts: Sequence[tuple[RequestOutput, list[Request]]]) -> None:
        super().__init__(prompts)
        self._told: dict[tuple[str, int], tuple[int, int]] = {}  # characters and tokens; the engine thread's
        self._came = asyncio.Event()
        self._deltas: list[Delta] = []
        self._is_awaited = False  # what was taken before has been sent
        self._send: Callable[[list[Delta]], bool] = lambda _: False
        self._failure: Exception | None = None  # of `_send`

    def news(self, output: RequestOutput) -> list[Any]:
        """What is new in an output: a Delta for each sample."""
        found = []
        for sample in output.outputs:
            key = (output.request_id, sample.index)
            characters, tokens = self._told.get(key, (0, 0))
            if characters < 0 or (len(sample.token_ids) == tokens and not sample.finished):
                continue
            logprobs = None if sample.logprobs is None else sample.logprobs[tokens:]
            new = (sample.text[characters:], sample.token_ids[tokens:], logprobs)
            found.append(Delta(output, sample.index, *new, sample.finish_reason, sample.stop_reason, sample.error))
            self.mark_told(output, sample.index, len(sample.text), len(sample.token_ids), is_whole=sample.finished)
        return found

    def mark_told(self, output: RequestOutput, sample: int, characters: int, tokens: int, *, is_whole: bool) -> None:
        """So much of a sample is not to be reported again; of one that is whole, nothing more."""
        self._told[output.request_id, sample] = (-1, -1) if is_whole else (characters, tokens)

    def marked(self, delta: Delta, events: list[bytes]) -> list[bytes]:
        """The events of a delta, each with what names it for a client; the last one has the sample's end, if any."""
        return events

    def take(self, deltas: list[Delta]) -> None:
        """Take in what a step brought."""
        if deltas and self._is_awaited and not self._came.is_set():
            try:
                if self._send(deltas):
                    return
            except Exception as error:  # it is the client's who waits, not the caller's
                self._failure = error
        self._deltas += deltas
        self._came.set()

    def send_with(self, send: Callable[[list[Delta]], bool]) -> None:
        """Send what comes at once where all before it has been sent. send: returns False where it cannot, now."""
        self._send = send

    async def deltas(self) -> list[Delta]:
        """What has come since the last call and was not sent, as soon as there is something. Empty: the job has ended.

        Raises what failed to be sent.
        """
        while not self._deltas and not self.ended.is_set():
            self._came.clear()
            self._is_awaited = True
            await self._came.wait()
            self._is_awaited = False
        if self._failure is not None:
            raise self._failure
        deltas, self._deltas = self._deltas, []
        return deltas


class SearchJob(Job, Protocol):
    """A beam search, wherever it is done."""

    @property
    def failure(self) -> str | None:
        """What failed, when it has ended."""

    def results(self) -> list[Hypothesis]:
        """What it has found when it has ended, best first."""


class Search:
    """A beam search on the worker's engine."""

    def __init__(self, driver: BeamDriver) -> None:
        self.driver = driver
        self.requests = [driver.request]
        self.num_samples = len(driver.request_ids)
        self.ended = asyncio.Event()
        self.error: ApiError | None = None

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
