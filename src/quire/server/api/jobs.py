"""The server's jobs: streams that send what comes at once, and searches wherever they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from quire.engine.beam import Hypothesis
from quire.jobs import Delta, Job, Reported
from quire.request import Request
from quire.text import RequestOutput


class Stream(Reported):
    """Prompts to be continued, reported as they grow."""

    is_continued = False  # the client has a part of it already

    def __init__(self, prompts: Sequence[tuple[RequestOutput, list[Request]]]) -> None:
        super().__init__(prompts)
        self._came = asyncio.Event()
        self._deltas: list[Delta] = []
        self._is_awaited = False  # what was taken before has been sent
        self._send: Callable[[list[Delta]], bool] = lambda _: False
        self._failure: Exception | None = None  # of `_send`

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

    fingerprint: str | None  # of what does it, where that is not this process

    @property
    def failure(self) -> str | None:
        """What failed, when it has ended."""

    def results(self) -> list[Hypothesis]:
        """What it has found when it has ended, best first."""
