"""Exchange: one request and its answer, between a connection and the application (ASGI)."""

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

MAX_UNREAD = 2**16  # bytes of a body that the application has not read, after which no more is read from the client
NOT_IN_HEADERS = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
BEGINNING = b"HTTP/1.1 "  # of each answer
BODYLESS = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)

Headers = Iterable[tuple[bytes, bytes]]


class Link(Protocol):
    """What an exchange needs of its connection."""

    writable: asyncio.Event  # the client reads as fast as it is answered

    @property
    def default_headers(self) -> Sequence[tuple[bytes, bytes]]:
        """What each answer has, such as the date."""

    def write(self, data: bytes) -> None:
        """Send it, or keep it until the client reads."""

    def pause_reading(self) -> None:
        """Read no more from the client."""

    def resume_reading(self) -> None:
        """Read again."""

    def close(self) -> None:
        """Send what is kept, then close the connection."""

    def answered(self) -> None:
        """An answer is complete."""


class Exchange:
    """One request and its answer, for whose parts it is the Outlet."""

    def __init__(self, link: Link, scope: Scope, *, keep_alive: bool, expects_continue: bool) -> None:
        """keep_alive: another request may follow. expects_continue: the client sends the body when it is asked to."""
        self.keep_alive = keep_alive
        self.started = False  # the answer
        self.complete = False  # the answer
        self.is_bodyless = scope["method"] == "HEAD"  # the answer
        self._link = link
        self._scope = scope
        scope["extensions"] = {OUTLET: self}
        self._expects_continue = expects_continue
        self._gone = False  # the client
        self._body = bytearray()  # what has come and was not read
        self._more_body = True
        self._news = asyncio.Event()
        self._is_chunked = False  # the answer
        self._num_ahead = 0  # bytes of its beginning that were sent ahead
        self._unsent: int | None = None  # bytes that the answer's Content-Length still promises; None: it has none

    # ------------------------------------------------------------------------------------------- the connection's part

    @property
    def num_unread(self) -> int:
        """Bytes of the body that have come and were not read."""
        return len(self._body)

    def add(self, body: bytes) -> None:
        """A piece of the body has come."""
        if self.complete:
            return
        self._body += body
        if len(self._body) > MAX_UNREAD:
            self._link.pause_reading()
        self._news.set()

    def end_body(self) -> None:
        """The body has come as a whole."""
        self._more_body = False
        self._news.set()

    def disconnect(self) -> None:
        """The client has gone."""
        self._gone = self._gone or not self.complete
        self._news.set()

    def send_ahead(self) -> bool:
        """Send a byte of the answer that it has whatever it will be. False: none is known.

        That is one of its first line's or, within chunks, a zero before the size of the next one.
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
        """Let the application answer."""
        try:
            await app(self._scope, self._receive, self._send)
            if not self.complete and not self._gone:
                raise RuntimeError("the application has not answered the request as a whole")
        except BaseException as error:  # a cancelled task's, too, so that its client is not left waiting
            log.error("%s %r failed", self._scope["method"], self._scope["path"], exc_info=error)
            if self.started or self._gone:
                self._link.close()
            else:
                shown = internal_error(error if isinstance(error, Exception) else RuntimeError())
                self._link.write(whole_answer(shown, self.is_bodyless)[self._num_ahead :])
                self.started = self.complete = True
                self._link.close()
        finally:
            del self._scope["extensions"][OUTLET]  # a cycle, which only the collector would free

    # ------------------------------------------------------------------------------------------- the application's part

    @property
    def is_open(self) -> bool:
        """Whether a part of the body can be sent at once."""
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
        # Before HTTP/1.1 there are no chunks: the end of the connection is the body's.
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
                    raise RuntimeError("the body of an answer is not as long as its Content-Length says")
            self._link.write(body)
        if not more:
            self.complete = True
            self._news.set()
            if not self.keep_alive:
                self._link.close()
            self._link.answered()


def status_line(status: int) -> bytes:
    """The first line of an answer."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:  # none of the standard's
        phrase = ""
    return BEGINNING + f"{int(status)} {phrase}".encode("ascii")


def whole_answer(error: ApiError, is_bodyless: bool) -> bytes:
    """An answer that no application has made, after which the connection ends.

    is_bodyless: without its body, as to HEAD.
    """
    body = dumps(error.body())
    head = [status_line(error.status), b"content-type: application/json", b"content-length: %d" % len(body)]
    return b"\r\n".join([*head, b"connection: close", b"", b"" if is_bodyless else body])
