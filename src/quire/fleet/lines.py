"""Read a long HTTP response line by line, inside the protocol's callback.

A general HTTP client passes data on to a task and sets a timer for each read. For a gateway that costs more than the
processing of a step's frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

from quire.fleet.wire import WireError
from quire.server.http.timers import PatientTimer

# Most bytes of a line, of a response's head, and of an error's body. The longest lines are snapshots: 21 bytes a block.
MAX_LINE = 2**28


class HttpRefused(Exception):
    """The response has a status other than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.body = body


async def read_lines(
    url: str, headers: Mapping[str, str], take: Callable[[bytes], None], *, connect: float, silence: float
) -> None:
    """Send an empty POST to a URL, and call `take` for each line of the response until it ends.

    connect: timeout of the connection in seconds. silence: seconds without a byte after which reading fails, see
    PatientTimer.
    Raises HttpRefused, WireError for a line of more than MAX_LINE bytes, OSError if the connection fails,
    asyncio.TimeoutError, and any error of `take`.
    """
    parts = urlsplit(url)
    if parts.hostname is None or parts.port is None:
        raise ValueError(f"{url!r} names no host or no port; it must be http://host:port/path")
    host, port = parts.hostname, parts.port
    named = {"Host": parts.netloc, "Content-Length": "0"} | dict(headers)
    lines = [f"POST {parts.path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items()), "", ""]
    loop = asyncio.get_running_loop()
    reader = _Reader("\r\n".join(lines).encode("ascii"), take, silence)
    made = loop.create_connection(lambda: reader, host, port)
    transport, _ = await asyncio.wait_for(made, connect)
    try:
        await reader.ended
    finally:
        transport.abort()


class _Reader(asyncio.Protocol):
    """The connection."""

    def __init__(self, request: bytes, take: Callable[[bytes], None], silence: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._request = request
        self._take = take
        self._silence = silence
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._rest = bytearray()  # the received part of a line, or of an error's body
        self._num_open = 0  # bytes received after the read that completed the last line
        self._heard = 0.0  # s of the loop's clock, when data arrived last
        self._timer: PatientTimer | None = None  # while there is a connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Send the request."""
        self._heard = self._loop.time()
        self._timer = PatientTimer(self._silence, self._check)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Take the complete lines."""
        self._heard = self._loop.time()
        if self.ended.done():
            return
        self._num_open += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            own = error.__context__  # the error that `take` raised
            is_own = isinstance(own, Exception) and not isinstance(own, httptools.HttpParserError)
            self._end(own if is_own else ConnectionError(f"its answer is not HTTP: {error}"))
        if (num_open := max(self._num_open, len(self._rest))) > MAX_LINE:
            self._end(WireError(f"{num_open} bytes have come without the end of a line; the most is {MAX_LINE}"))

    def connection_lost(self, error: Exception | None) -> None:
        """End: the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self._end(error or ConnectionError("it has closed the connection"))

    # ------------------------------------------------------------------------------------------ the parser's calls

    def on_headers_complete(self) -> None:
        """Store the status of the response."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Split a chunk of the response into lines."""
        first, *others = body.split(b"\n") if self._status == 200 else [body]
        self._rest += first  # in place, since a line may arrive in many chunks
        for other in others:
            line, self._rest, self._num_open = bytes(self._rest), bytearray(other), 0
            if not self.ended.done():
                self._take(line)

    def on_message_complete(self) -> None:
        """End: the response is complete."""
        self._end(None if self._status == 200 else HttpRefused(self._status, bytes(self._rest)))

    def _check(self) -> None:
        """End if no data arrived for too long. One timer is enough, however often data arrives."""
        left = self._heard + self._silence - self._loop.time()
        if left <= 0:
            self._end(asyncio.TimeoutError())
        else:
            self._timer = PatientTimer(left, self._check)

    def _end(self, error: BaseException | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)
