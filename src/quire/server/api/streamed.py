"""StreamedAnswer: a job's answer as server-sent events, which are sent while it grows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Protocol

from starlette.types import Receive, Scope, Send

from quire.jobs import Delta
from quire.server.api.host import Host
from quire.server.api.jobs import Stream
from quire.server.api.service import LONG_TEXT, aside
from quire.server.http.api_error import ApiError, api_error
from quire.server.http.sse import OUTLET, EventStream, Outlet


class EventWriter(Protocol):
    """Writes the events of one answer."""

    def begin(self) -> bytes:
        """What comes before all deltas."""

    def events(self, deltas: Sequence[Delta]) -> bytes:
        """What is to be sent of them; empty: nothing."""

    def end(self) -> bytes:
        """What comes when the job has ended well."""

    def fail(self, error: ApiError) -> bytes:
        """What comes in place of the rest."""


class StreamedAnswer(EventStream):
    """The answer of a stream."""

    def __init__(self, worker: Host, job: Stream, writer: EventWriter, keep_alive: float, size: int = 0) -> None:
        """worker: what the job was submitted to. keep_alive: see EventStream.

        size: logprobs that the first deltas may have.
        """
        super().__init__(_parts(job, writer, size), partial(worker.abort, job), keep_alive)
        self._job = job
        self._writer = writer
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it: what comes while the client reads, past the application's layers."""
        outlet: Outlet | None = scope.get("extensions", {}).get(OUTLET)
        if outlet is not None and self._size <= LONG_TEXT:
            self._job.send_with(partial(self._send_at_once, outlet))
        await super().__call__(scope, receive, send)

    def failure(self, error: ApiError) -> bytes:
        """What stands in place of the rest."""
        return self._writer.fail(error)

    def _send_at_once(self, outlet: Outlet, deltas: list[Delta]) -> bool:
        if not outlet.is_open:
            return False
        if part := self._writer.events(deltas):
            self.is_silent = False
            outlet.write(part)
        return True


async def _parts(job: Stream, writer: EventWriter, size: int) -> AsyncIterator[bytes]:
    """The answer in pieces, as far as they are not sent at once."""
    if start := writer.begin():
        yield start
    while deltas := await job.deltas():
        if part := await aside(size, partial(writer.events, deltas)):
            yield part
    yield writer.end() if job.error is None else writer.fail(api_error(job.error))
