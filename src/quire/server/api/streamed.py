"""StreamedAnswer: a job's answer as server-sent events, sent while it grows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from functools import partial

from starlette.types import Receive, Scope, Send

from quire.frontend.jobs import Delta
from quire.server.api.engine_client import EngineClient
from quire.server.api.jobs import Stream
from quire.server.api.service import LONG_TEXT, offload_if_large
from quire.server.http.api_error import ApiError, api_error
from quire.server.http.sse import DONE, OUTLET, EventStream, Outlet, data


class EventWriter(ABC):
    """Writes the events of one answer."""

    def begin(self) -> bytes:
        """Return the events before all deltas."""
        return b""

    @abstractmethod
    def events(self, deltas: Sequence[Delta]) -> bytes:
        """Return the events of deltas; empty if there is nothing to send."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the events after the job has ended without an error."""

    def fail(self, error: ApiError) -> bytes:
        """Return the events that replace the rest after an error."""
        return data(error.body()) + DONE


class StreamedAnswer(EventStream):
    """The answer of a stream."""

    def __init__(
        self, engine_client: EngineClient, job: Stream, writer: EventWriter, keep_alive: float, size: int = 0
    ) -> None:
        """Create it. engine_client: the host to which the job was submitted. keep_alive: see EventStream.

        size: the number of logprobs that the first deltas may have.
        """
        super().__init__(_parts(job, writer, size), partial(engine_client.abort, job), keep_alive)
        self._job = job
        self._writer = writer
        self._size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. While the client reads, deltas bypass the application's layers."""
        outlet: Outlet | None = scope.get("extensions", {}).get(OUTLET)
        if outlet is not None and self._size <= LONG_TEXT:
            self._job.send_with(partial(self._send_at_once, outlet))
        await super().__call__(scope, receive, send)

    def failure(self, error: ApiError) -> bytes:
        """Return the events that replace the rest after an error."""
        return self._writer.fail(error)

    def _send_at_once(self, outlet: Outlet, deltas: list[Delta]) -> bool:
        if not outlet.is_open:
            return False
        if part := self._writer.events(deltas):
            self.is_silent = False
            outlet.write(part)
        return True


async def _parts(job: Stream, writer: EventWriter, size: int) -> AsyncIterator[bytes]:
    """Yield the parts of the answer that are not sent at once."""
    if start := writer.begin():
        yield start
    while deltas := await job.deltas():
        if part := await offload_if_large(size, partial(writer.events, deltas)):
            yield part
    yield writer.end() if job.error is None else writer.fail(api_error(job.error))
