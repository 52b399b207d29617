"""Cycle: one request and its answer, between a connection and the application (ASGI)."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from quire.server.http.api_error import ApiError, internal_error
from quire.server.http.sse import OUTLET, dumps

log = logging.getLogger("quire.server")

MAX_UNREAD = 2**16  # bytes of a body, not read by the application, above which reading from the client pauses
NOT_IN_HEADERS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
BEGINNING = b"HTTP/1.1 "  # of each answer
BODYLESS = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)

Headers = Iterable[tuple[bytes, bytes]]


class CycleLink(Protocol):
    """The interface of a connection for its exchanges."""

    writable: asyncio.Event  # set while the client reads as fast as the server writes

    @property
    def default_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """The headers of every answer, such as the date."""

    def write(self, data: bytes) -> None:
        """Send data, or buffer it until the client reads."""

    def pause_reading(self) -> None:
        """Stop reading from the client."""

    def resume_reading(self) -> None:
        """Read from the client again."""

    def close(self) -> None:
        """Send the buffered data, then close the connection."""

    def answered(self) -> None:
        """Continue after an answer is complete."""


class Cycle:
    """One request and its answer. It is the Outlet for the answer's parts."""

    def __init__(self, link: CycleLink, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> None:
        """Create it. keep_alive: another request may follow. expects_continue: the client waits for "100 Continue"."""
        self.keep_alive = keep_alive
        # These are about the answer.
        self.started = False
        self.complete = False
        self.is_bodyless = scope["method"] == "HEAD"
        self._link = link
        self._scope = scope
        scope["extensions"] = {OUTLET: self}
        self._expects_continue = expects_continue
        self._gone = False  # the client has disconnected
        self._body = bytearray()  # received, but not read by the application
        self._more_body = True
        self._news = asyncio.Event()
        self._is_chunked = False  # the answer has chunks
        self._num_ahead = 0  # bytes of the answer's first line that were sent ahead
        self._unsent: int | None = None  # bytes left of the answer's Content-Length; None: it has no such header

    # ------------------------------------------------------------------------------------------- the connection's part

    @property
    def num_unread(self) -> int:
        """The number of bytes of the body that were received and not read."""
        return len(self._body)

    def add(self, body: bytes) -> None:
        """Store a piece of the body."""
        if self.complete:
            return
        self._body += body
        if len(self._body) > MAX_UNREAD:
            self._link.pause_reading()
        self._news.set()

    def end_body(self) -> None:
        """Mark the body as complete."""
        self._more_body = False
        self._news.set()

    def disconnect(self) -> None:
        """Note that the client has disconnected."""
        self._gone = self._gone or not self.complete
        self._news.set()

    def send_ahead(self) -> bool:
        """Send a byte that the answer contains in any case. Return False if no such byte is known.

        It is a byte of the first line or, between chunks, a leading zero of the next chunk's size.
        """
        if self.complete:
            return False
        if not self.started:
            byte = BEGINNING[self._num_ahead : self._num_ahead + 1]
            self._num_ahead += len(byte)
        else:
            byte = b"0" if self._is_chunked else b""
        self._link.write(byte)
        return bool(byte)

    async def run(self, app: ASGIApp) -> None:
        """Run the application for the request. If it fails, answer with an error or close the connection."""
        try:
            await app(self._scope, self._receive, self._send)
            if not self.complete and not self._gone:
                raise RuntimeError("the application has not answered the request as a whole")
        except BaseException as error:  # also of a cancelled task, so that its client is not left waiting
            log.error("%s %r failed", self._scope["method"], self._scope["path"], exc_info=error)
            if self.started or self._gone:
                self._link.close()
            else:
                shown = internal_error(error if isinstance(error, Exception) else RuntimeError())
                self._link.write(whole_answer(shown, self.is_bodyless)[self._num_ahead :])
                self.started = self.complete = True
                self._link.close()
        finally:
            del self._scope["extensions"][OUTLET]  # a reference cycle, which only the collector would free

    # ------------------------------------------------------------------------------------------- the application's part

    @property
    def is_open(self) -> bool:
        """True if a part of the body can be sent at once."""
        return self.started and not self.complete and not self._gone and self._link.writable.is_set()

    def write(self, part: bytes) -> None:
        """Send a part of the body."""
        self._send_body(part, True)

    async def _receive(self) -> Message:
        if self._expects_continue and self._more_body and not self.started:
            self._link.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._expects_continue = False
        if not (self._gone or self.complete):
            self._link.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self._gone or self.complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self._more_body}

    async def _send(self, message: Message) -> None:
        if not self._link.writable.is_set() and not self._gone:
            await self._link.writable.wait()
        if self._gone:
            return
        expected = "http.response.body" if self.started else "http.response.start"
        if self.complete or message["type"] != expected:
            raise RuntimeError(f"the application sends {message['type']}, which has no place here")
        if self.started:
            self._send_body(message.get("body", b""), message.get("more_body", False))
        else:
            self._send_head(message["status"], message.get("headers", ()))

    def _send_head(self, status: int, headers: Headers) -> None:
        lines, says_close, has_length = [status_line(status)], False, False
        for name, value in (*self._link.default_headers, *headers):
            if NOT_IN_HEADERS.search(name + value):
                raise RuntimeError(f"the header {name!r} of an answer has characters that no header may have")
            name = name.lower()
            if name == b"content-length":
                has_length, self._unsent = True, int(value)
            elif name == b"connection":
                says_close = says_close or b"close" in map(bytes.strip, value.lower().split(b","))
            lines.append(name + b": " + value)
        self.keep_alive = self.keep_alive and not says_close
        if not self.keep_alive and not says_close:
            lines.append(b"connection: close")
        self.is_bodyless = self.is_bodyless or status in BODYLESS
        # HTTP/1.0 has no chunks: the end of the connection ends the body.
        self._is_chunked = not has_length and not self.is_bodyless and self._scope["http_version"] >= "1.1"
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked")
        self.started = True
        self._link.write(b"\r\n".join([*lines, b"", b""])[self._num_ahead :])

    def _send_body(self, body: bytes, more: bool) -> None:
        if self.is_bodyless:
            pass
        elif self._is_chunked:
            parts = [b"%x\r\n" % len(body), body, b"\r\n"] if body else []
            self._link.write(b"".join(parts if more else [*parts, b"0\r\n\r\n"]))
        else:
            if self._unsent is not None:
                self._unsent -= len(body)
                if self._unsent < 0 or (self._unsent > 0 and not more):
                    raise RuntimeError("the length of an answer's body differs from its Content-Length")
            self._link.write(body)
        if not more:
            self.complete = True
            self._news.set()
            if not self.keep_alive:
                self._link.close()
            self._link.answered()


def status_line(status: int) -> bytes:
    """Return the first line of an answer."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:  # not a standard status
        phrase = ""
    return BEGINNING + f"{int(status)} {phrase}".encode("ascii")


def whole_answer(error: ApiError, is_bodyless: bool) -> bytes:
    """Return a complete answer with an error, after which the connection is closed.

    is_bodyless: leave out the body, as after HEAD.
    """
    body = dumps(error.body())
    head = [status_line(error.status), b"content-type: application/json", b"content-length: %d" % len(body)]
    return b"\r\n".join([*head, b"connection: close", b"", b"" if is_bodyless else body])
