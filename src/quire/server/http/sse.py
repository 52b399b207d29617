"""Answers as bytes: JSON, server-sent events, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.http.api_error import ApiError, internal_error

log = logging.getLogger("quire.server")

DONE = b"data: [DONE]\n\n"
STILL_HERE = b": still here\n\n"  # a comment
OUTLET = "quire.outlet"  # among a request's ASGI extensions: its Outlet
ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def dumps(value: object) -> bytes:
    """JSON in which anything that Python can hold as text survives, a half of a character included."""
    return ENCODER.encode(value).encode("ascii")


def data(value: object) -> bytes:
    """One event."""
    return b"data: " + dumps(value) + b"\n\n"


def named(value: dict[str, Any]) -> bytes:
    """One event that has a name, which is its type."""
    return b"event: " + str(value["type"]).encode("ascii") + b"\n" + data(value)


class Outlet(Protocol):
    """The way to a client past the application's layers, for the parts of a body that has begun.

    To wake a task that sends a part through all layers costs several times what the part does.
    """

    @property
    def is_open(self) -> bool:
        """Whether the client is there, and reads as fast as it is answered."""

    def write(self, part: bytes) -> None:
        """Send a part, if it is open."""


class JsonBody(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Its bytes."""
        return dumps(content)


class EventStream(Response):
    """A response whose parts are sent as they come.

    Without the task groups of the framework's own, which cost more per part than what is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncIterator[bytes], on_disconnect: Callable[[], None], keep_alive: float = 0.0) -> None:
        """on_disconnect: is called when no more parts are wanted before their end.

        keep_alive: seconds without a part after which a comment is sent; 0: none is.
        """
        self.is_silent = True  # since the last time that this was asked; a part that is sent ends it
        self._keep_alive = keep_alive
        self.status_code = 200
        self.background = None
        self._parts = parts
        self._on_disconnect = on_disconnect
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it. When the client has gone, on_disconnect is called, and the parts are read to their end."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        outlet: Outlet | None = scope.get("extensions", {}).get(OUTLET)
        async with noticing_disconnect(receive, self._on_disconnect):
            with self._staying_alive(outlet):
                async for part in self._parts_or_error():
                    self.is_silent = False
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    @contextmanager
    def _staying_alive(self, outlet: Outlet | None) -> Iterator[None]:
        """Within it, a comment is sent whenever nothing else was for a while. Clients pass over it; proxies see it."""
        if outlet is None or not self._keep_alive:
            yield
            return
        loop = asyncio.get_running_loop()

        timer: asyncio.TimerHandle

        def look() -> None:
            nonlocal timer
            if self.is_silent and outlet.is_open:
                outlet.write(STILL_HERE)
            self.is_silent = True
            timer = loop.call_later(self._keep_alive, look)

        timer = loop.call_later(self._keep_alive, look)
        try:
            yield
        finally:
            timer.cancel()

    async def _parts_or_error(self) -> AsyncIterator[bytes]:
        """The parts. Where one cannot be made, an error in place of the rest: the status has been sent already."""
        try:
            async for part in self._parts:
                yield part
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            self._on_disconnect()
            yield self.failure(error if isinstance(error, ApiError) else internal_error(error))

    def failure(self, error: ApiError) -> bytes:
        """What stands in place of the rest."""
        return data(error.body()) + DONE


@asynccontextmanager
async def noticing_disconnect(
    receive: Callable[[], Awaitable[Any]], on_disconnect: Callable[[], None]
) -> AsyncIterator[None]:
    """Within it, on_disconnect is called when the client goes; and when the server cancels what serves it."""

    async def watch() -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except HTTPException:  # the guard's, of a body that nobody asked for: who sends such a thing is as good as gone
            pass
        on_disconnect()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except BaseException:
        on_disconnect()
        raise
    finally:
        watcher.cancel()
