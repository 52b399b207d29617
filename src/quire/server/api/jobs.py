"""The server's jobs: streams, which send deltas at once, and beam searches, local or remote."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from quire.engine.beam import Hypothesis
from quire.frontend.jobs import Delta, DeltaJob, Job
from quire.frontend.requests import Made


class Stream(DeltaJob):
    """Prompts to continue, with deltas while they grow."""

    is_continued = False  # the client already has a part of the stream

    def __init__(self, prompts: Sequence[Made]) -> None:
        super().__init__(prompts)
        self._came = asyncio.Event()
        self._deltas: list[Delta] = []
        self._is_awaited = False  # all earlier deltas have been sent
        self._send: Callable[[list[Delta]], bool] = lambda _: False
        self._failure: Exception | None = None  # of `_send`

    def marked(self, delta: Delta, events: list[bytes]) -> list[bytes]:
        """Return the events of a delta, marked so that a client can resume after each. The last has the end, if any."""
        return events

    def take(self, deltas: list[Delta]) -> None:
        """Accept the deltas of a step."""
        if deltas and self._is_awaited and not self._came.is_set():
            try:
                if self._send(deltas):
                    return
            except Exception as error:  # concerns the waiting client, not the caller
                self._failure = error
        self._deltas += deltas
        self._came.set()

    def send_with(self, send: Callable[[list[Delta]], bool]) -> None:
        """Use `send` to send deltas at once if all earlier ones are sent. It returns False if it cannot send now."""
        self._send = send

    async def deltas(self) -> list[Delta]:
        """Wait for deltas that were not sent at once, and return them. An empty list means that the job has ended.

        Raises the error with which sending at once has failed.
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
    """A beam search, in this process or another."""

    fingerprint: str | None  # of the system that computes it, if that is another process

    @property
    def failure(self) -> str | None:
        """The reason why the search failed, once it has ended."""

    def results(self) -> list[Hypothesis]:
        """Return the hypotheses, best first, once the search has ended."""
