"""Answers as bytes: JSON, server-sent events, and the detection of disconnected clients."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.server.http.api_error import ApiError, internal_error

log = logging.getLogger("quire.server")

DONE = b"data: [DONE]\n\n"
STILL_HERE = b": still here\n\n"  # a comment
OUTLET = "quire.outlet"  # name of the Outlet among a request's ASGI extensions
ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def dumps(value: object) -> bytes:
    """Encode a value as JSON. Every Python string survives, even one with half of a character (a surrogate)."""
    return ENCODER.encode(value).encode("ascii")


def data(value: object) -> bytes:
    """Encode one event."""
    return b"data: " + dumps(value) + b"\n\n"


def named(value: Mapping[str, Any]) -> bytes:
    """Encode one event with a name, which is its type."""
    return b"event: " + str(value["type"]).encode("ascii") + b"\n" + data(value)


class Outlet(Protocol):
    """The direct way to a client, past the application's layers, for the parts of a body that has begun.

    Waking a task that sends a part through all layers costs several times as much as the part itself.
    """

    @property
    def is_open(self) -> bool:
        """True if the client is connected and reads as fast as the server writes."""

    def write(self, part: bytes) -> None:
        """Send a part, if the outlet is open."""


class JsonBody(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body's bytes."""
        return dumps(content)


class EventStream(Response):
    """A response whose parts are sent as soon as each is available.

    It avoids the task groups of the framework's streaming response, which cost more per part than the part itself.
    """

    media_type = "text/event-stream"

    def __init__(self, parts: AsyncIterator[bytes], on_disconnect: Callable[[], None], keep_alive: float = 0.0) -> None:
        """Create it. `on_disconnect` is called if the client needs no more parts before their end.

        keep_alive: seconds without a part after which a comment is sent; 0 sends none.
        """
        self.is_silent = True  # no part was sent since the last check
        self._keep_alive = keep_alive
        self.status_code = 200
        self.background = None
        self._parts = parts
        self._on_disconnect = on_disconnect
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts. If the client disconnects, call `on_disconnect` and still read the parts to their end."""
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
        """Send a comment whenever no part was sent for a while. Clients ignore it; it keeps proxies from closing."""
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
        """Yield the parts. If one fails, yield an error in place of the rest: the status has been sent already."""
        try:
            async for part in self._parts:
                yield part
        except Exception as error:
            log.error("a stream failed", exc_info=error)
            self._on_disconnect()
            yield self.failure(error if isinstance(error, ApiError) else internal_error(error))

    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error, and the end of the stream."""
        return data(error.body()) + DONE


@asynccontextmanager
async def noticing_disconnect(
    receive: Callable[[], Awaitable[Any]], on_disconnect: Callable[[], None]
) -> AsyncIterator[None]:
    """Call `on_disconnect` when the client disconnects or the server cancels the request's task."""

    async def watch() -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except HTTPException:  # raised by the guard for an unexpected body; treat its client as disconnected
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
