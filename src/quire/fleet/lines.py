"""Lines: an answer over HTTP that goes on, each line of which is taken where it is read.

A client for all purposes hands what it reads to a task, and sets a timer each time. That costs a gateway more than what
a step brings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httptools

from quire.fleet.wire import WireError
from quire.server.http.timers import PatientTimer

# Bytes of a line, of an answer's head, and of one that refuses. The longest lines are snapshots: 21 bytes a block.
MAX_LINE = 2**28


class HttpRefused(Exception):
    """The answer has another status than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.body = body


async def read_lines(
    url: str, headers: Mapping[str, str], take: Callable[[bytes], None], *, connect: float, silence: float
) -> None:
    """Post nothing to a URL, and take the lines of the answer until it ends.

    connect: seconds in which a connection must be made. silence: seconds without a byte that are an error, see
    PatientTimer.
    Raises HttpRefused, WireError for a line of more than MAX_LINE bytes, OSError where the connection fails,
    asyncio.TimeoutError, and what `take` raises.
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
        self._rest = bytearray()  # what has come of a line, or of an answer that refuses
        self._num_open = 0  # bytes that were read after those with which the last line ended
        self._heard = 0.0  # s of the loop's clock, when something came last
        self._timer: PatientTimer | None = None  # while there is a connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Ask."""
        self._heard = self._loop.time()
        self._timer = PatientTimer(self._silence, self._check)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Take the lines that are whole."""
        self._heard = self._loop.time()
        if self.ended.done():
            return
        self._num_open += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            own = error.__context__  # what a line has raised
            is_own = isinstance(own, Exception) and not isinstance(own, httptools.HttpParserError)
            self._end(own if is_own else ConnectionError(f"it answers what is no HTTP: {error}"))
        if (num_open := max(self._num_open, len(self._rest))) > MAX_LINE:
            self._end(WireError(f"{num_open} bytes have come without the end of a line; the most is {MAX_LINE}"))

    def connection_lost(self, error: Exception | None) -> None:
        """Nothing more comes."""
        if self._timer is not None:
            self._timer.cancel()
        self._end(error or ConnectionError("it has closed the connection"))

    # ------------------------------------------------------------------------------------------ the parser's calls

    def on_headers_complete(self) -> None:
        """The answer begins."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """A piece of the answer has come."""
        first, *others = body.split(b"\n") if self._status == 200 else [body]
        self._rest += first  # in place: a line may come in many pieces
        for other in others:
            line, self._rest, self._num_open = bytes(self._rest), bytearray(other), 0
            if not self.ended.done():
                self._take(line)

    def on_message_complete(self) -> None:
        """The answer has ended."""
        self._end(None if self._status == 200 else HttpRefused(self._status, bytes(self._rest)))

    def _check(self) -> None:
        """End it where nothing has come for too long: one timer, however often something comes."""
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
