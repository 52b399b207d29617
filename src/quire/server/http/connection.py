"""Connection: uvicorn's, with bounds on what it takes without end, and without its errors in plain text."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from quire.server.http.api_error import ApiError
from quire.server.http.sse import dumps

MAX_CONNECTIONS = 4096
# Bytes of a request's head, and of what comes with its body that is not its body; what was read with the end of the
# request before it comes on top.
MAX_HEAD = 2**16
MAX_PIPELINE = 16  # requests that wait for the answer before theirs
HEAD_TIMEOUT = 20.0  # seconds for a request's head to come
LINGER = 5.0  # seconds for what comes of a request that has been answered already
READ_TIMEOUT = 120.0  # seconds in which a client that is being answered must read something


class Connection(HttpToolsProtocol):
    """One client's connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._spare = MAX_HEAD  # bytes that may still come before there must be a whole head, or some body
        self._in_message = False  # part of a request has come, and part of it not
        self._begun = 0.0  # when the last request's head had come, by the loop's clock
        self._answered: RequestResponseCycle | None = None  # what is being answered, or was last
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        if len(self.connections) > MAX_CONNECTIONS and not self._take_place():
            told = f"{MAX_CONNECTIONS} connections are busy, which is as many as this server takes; try again later"
            self._refuse(ApiError(told, HTTPStatus.SERVICE_UNAVAILABLE, code="too_many_connections"))
        else:
            self._close_in(HEAD_TIMEOUT)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who answers: the parent tells only the last one of several requests."""
        answered = self._answered
        if answered is not None and not answered.response_complete:
            answered.disconnected = True
            answered.message_event.set()
        self._cancel_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take apart what has come."""
        self._unset_keepalive_if_required()
        if not self._in_message and self._timer is None:
            self._close_in(HEAD_TIMEOUT)
        self._spare -= len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            # What a callback raised is the error's context.
            own = error.__context__
            self._refuse(own if isinstance(own, ApiError) else ApiError("this is no HTTP request"))
            return
        if self._spare < 0:
            told = f"the request has more than {MAX_HEAD} bytes besides its body, which is the most this server takes"
            self._refuse(ApiError(told, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, code="head_too_large"))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # A client may offer another protocol with any request (those in Java do), and we need not take it up. But
            # the parser takes what follows for that protocol, so a new one reads the request without the offer.
            version = f"HTTP/{self.parser.get_http_version()}".encode()
            lines = [b" ".join((self.parser.get_method(), self.url, version))]
            lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self._feed(b"\r\n".join([*lines, b"", data[offer.args[0] :]]))

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._spare = MAX_HEAD
        self._in_message = True
        if self._timer is None:
            self._close_in(HEAD_TIMEOUT)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header, but none that comes behind the body."""
        if self._timer is not None:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Let the request be answered, in its turn."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise ApiError("this is no proxy")
            return
        if len(self.pipeline) >= MAX_PIPELINE:
            raise ApiError(f"more than {MAX_PIPELINE} requests came before the first one's answer was read")
        self._cancel_timer()
        self._spare = MAX_HEAD
        self._begun = self.loop.time()
        super().on_headers_complete()
        self.flow.resume_reading()  # although one may wait in line, since who does not read misses the client's end

    def on_body(self, body: bytes) -> None:
        """Take in a piece of a body."""
        self._spare += 2 * len(body)  # so that only tiny chunks use it up
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request has come as a whole."""
        if not self.parser.should_upgrade():
            self._in_message = False
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request; or end, if most of this one is yet to come."""
        super().on_response_complete()
        if self._in_message and self._timer is None:
            self._close_in(LINGER)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is answered."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _take_place(self) -> bool:
        """Close a connection on which nothing is asked, or whose request has been coming for longest.

        A crowd of these must not keep others out. False: all wait for answers.
        """
        slow: list[Connection] = []
        for other in self.connections:
            if not isinstance(other, Connection) or other is self or other.transport.is_closing():
                continue
            if not other._is_answering:
                other.transport.close()
                return True
            if other._is_coming:
                slow.append(other)
        if slow:
            min(slow, key=lambda other: other._begun).transport.close()
        return bool(slow)

    @property
    def _is_coming(self) -> bool:
        """Whether what is being answered has not come as a whole, and no answer has begun."""
        answered = self._answered
        return self._in_message and answered is not None and answered is self.cycle and not answered.response_started

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _close_in(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._close, seconds)

    def _close(self, seconds: float) -> None:
        """Close a connection on which nothing happens."""
        if self._is_answering:
            self._close_in(seconds)
        else:
            self.transport.close()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer what has not come to the application, and close."""
        if self._answered is None or self._answered.response_complete or not self._answered.response_started:
            body = dumps(error.body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
