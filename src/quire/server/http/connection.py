"""A client's connection. httptools parses its requests, and every wait and every buffer has a bound."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp
from uvicorn import Config

from quire.server.http.api_error import ApiError, internal_error
from quire.server.http.cycle import MAX_UNREAD, Cycle, whole_answer
from quire.server.http.timers import PatientTimer

log = logging.getLogger("quire.server")

MAX_CONNECTIONS = 4096
# Bytes of a request's head, and of the framing of its body. The framing may have more: the bytes that were read with
# the end of the previous request do not count.
MAX_HEAD = 2**16
MAX_PIPELINE = 16  # requests that wait for the answer before theirs
HEAD_TIMEOUT = 20.0  # seconds for a request's head to arrive
LINGER = 5.0  # seconds for the rest of a request that has been answered already
FIRST_PROBE = 0.02  # seconds between the first two bytes that probe for a client; each further interval is 3x as long
READ_TIMEOUT = 120.0  # seconds in which a client that is being answered must read something


class ServerState(Protocol):
    """The state of a server that uvicorn passes to each connection."""

    connections: set[Any]
    tasks: set[asyncio.Task[None]]
    total_requests: int
    default_headers: list[tuple[bytes, bytes]]


class Connection(asyncio.Protocol):
    """One client's connection. uvicorn creates one with these arguments for each client, and calls `shutdown`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._app: ASGIApp = config.loaded_app
        self._keep_alive: float = config.timeout_keep_alive
        self._state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_running_loop()
        self._parser = self._new_parser()
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_size = 0  # received bytes of a head, without its syntax
        self._spare = MAX_HEAD  # bytes that may still arrive before there must be a complete head, or some body
        self._in_head = False  # a request's head has arrived in part
        self._in_message = False  # a request has arrived in part
        self._begun = 0.0  # when the last request's head was complete
        self._coming: Cycle | None = None  # the last request, which receives the body
        self._current: Cycle | None = None  # the request being answered, or the last answered one
        self._in_line: deque[Cycle] = deque()  # requests to answer after that, the next one first
        self.writable = asyncio.Event()  # see Link
        self.writable.set()
        self._reads = True
        self._has_ended = False  # the client has closed its sending side
        # The deadline for the head of a request or for the rest of an answered one, or the time of the next probe.
        self._timer: PatientTimer | asyncio.TimerHandle | None = None
        self._idle: PatientTimer | None = None  # the deadline for another request
        self._unread: PatientTimer | None = None  # the deadline for the client to read
        self._closing: PatientTimer | None = None  # the deadline for the client to read the buffered data at the end

    # ------------------------------------------------------------------------------------------- the transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a request."""
        self.transport = transport
        self._about = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "client": _address(transport.get_extra_info("peername")),
            "server": _address(transport.get_extra_info("sockname")),
            "root_path": "",
        }
        connections = self._state.connections
        connections.add(self)
        if len(connections) > MAX_CONNECTIONS and not self._take_place():
            message = f"{MAX_CONNECTIONS} connections are busy, which is the limit of this server; try again later"
            self._refuse(ApiError(message, HTTPStatus.SERVICE_UNAVAILABLE, code="too_many_connections"))
        else:
            self._close_in(HEAD_TIMEOUT)

    def connection_lost(self, _: Exception | None) -> None:
        """Notify the exchanges, and wake the task that waits for the client to read."""
        self._state.connections.discard(self)
        for exchange in (self._current, self._coming):
            if exchange is not None:
                exchange.disconnect()
        self.resume_writing()
        self._stop_timer()
        self._stop_idle_timer()
        if self._closing is not None:
            self._closing.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse received data."""
        if self._coming is not None and not self._coming.keep_alive and not self._in_message:
            return  # the last request is complete, so further data is ignored
        self._stop_idle_timer()
        if not self._in_message and self._timer is None:
            self._close_in(HEAD_TIMEOUT)
        self._spare -= len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            own = error.__context__  # the error that a callback raised
            if isinstance(own, ApiError):
                self._refuse(own)
            elif not isinstance(own, Exception) or isinstance(own, httptools.HttpParserError):
                self._refuse(ApiError("this is not an HTTP request"))
            else:
                log.error("a request could not be read", exc_info=own)
                self._refuse(internal_error(own))
            return
        if self._spare < 0:
            self._refuse(_head_too_large())

    def eof_received(self) -> bool:
        """Answer the complete requests. Return False, which ends the connection, without a complete request.

        A client that has closed its socket looks like one that has only closed its sending side. The difference shows
        when something is sent: the system of the former resets the connection, which the next write reports. So bytes
        that the answer contains in any case are sent ahead of it, until the answer begins.
        """
        current, last = self._current, self._coming
        if self._about["scheme"] == "https":  # its transport closes in any case
            return False
        if self._in_message or current is None or last is None or not current.send_ahead():
            return False
        last.keep_alive = False
        self._has_ended = True
        self._probe_in(FIRST_PROBE, current)
        return True

    def pause_writing(self) -> None:
        """Note that the client reads more slowly than the server writes."""
        self.writable.clear()
        self._unread = PatientTimer(READ_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        """Note that the client has read."""
        self.writable.set()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def shutdown(self) -> None:
        """Close the connection after the received requests are answered."""
        if self._coming is None or self._coming.complete:
            self.close()
        else:
            self._coming.keep_alive = False

    # ------------------------------------------------------------------------------------------- the parser's calls

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Data after a request with "Connection: close" is ignored. It must not be an error of that request.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _feed(self, data: bytes) -> None:
        # Each iteration is outside the previous one's except block: else that offer would be the context of its errors.
        while (rest := self._rest_after_offer(data)) is not None:
            # A client may offer another protocol with any request (Java clients do), and the server may ignore it. But
            # the parser assigns the following data to that protocol, so a new one reads the request without the offer.
            version = f"HTTP/{self._parser.get_http_version()}".encode()
            lines = [b" ".join((self._parser.get_method(), self._url, version))]
            lines += [name + b": " + value for name, value in self._headers if name != b"upgrade"]
            self._parser = self._new_parser()
            data = b"\r\n".join([*lines, b"", rest])

    def _rest_after_offer(self, data: bytes) -> bytes | None:
        """Parse data. Return the data after the head of a request that offers another protocol, None if none does."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            return data[offer.args[0] :]
        return None

    def on_message_begin(self) -> None:
        """Reset the state for a new request."""
        self._url, self._headers = b"", []
        self._spare = MAX_HEAD
        self._head_size = 0
        self._in_head = self._in_message = True
        self._stop_idle_timer()
        if self._timer is None:
            self._close_in(HEAD_TIMEOUT)

    def on_url(self, url: bytes) -> None:
        """Store a piece of the request's target."""
        self._add_to_head(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header, unless it is a trailer after the body."""
        if self._in_head:
            self._add_to_head(len(name) + len(value))
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Answer the request, or queue it after earlier ones."""
        method = self._parser.get_method()
        if self._parser.should_upgrade():
            if method == b"CONNECT":
                raise ApiError("this server is not a proxy")
            return
        if len(self._in_line) >= MAX_PIPELINE:
            raise ApiError(f"more than {MAX_PIPELINE} requests arrived before the first one was answered")
        self._stop_timer()
        self._spare = MAX_HEAD
        self._begun = time.monotonic()  # the loop's clock has a resolution of only a millisecond
        url, version = httptools.parse_url(self._url), self._parser.get_http_version()
        if url.path is None or not url.path.isascii():
            raise ApiError("the request has no valid path; a path is ASCII, with other characters as %XX")
        if url.host is not None:  # a target with a host replaces the Host header: RFC 9112, section 3.2.2
            host = b"[%s]" % url.host if b":" in url.host else url.host
            port = b"" if url.port is None else b":%d" % url.port
            self._headers = [(b"host", host + port), *(one for one in self._headers if one[0] != b"host")]
        is_old = version < "1.1"  # such a client supports neither chunks nor 100 Continue
        waits = not is_old and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in self._headers
        )
        scope = self._about | {
            "http_version": version,
            "method": method.decode("ascii"),
            "path": unquote(url.path.decode("ascii")),
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": self._app_state.copy(),
        }
        self._in_head = False
        self._coming = exchange = Cycle(
            self,
            scope,
            keep_alive=not is_old and self._parser.should_keep_alive(),
            expects_continue=waits,
        )
        if self._is_answering:
            self._in_line.append(exchange)
        else:
            self._begin(exchange)

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of a body."""
        self._spare += 2 * len(body)  # so that only tiny chunks exhaust it
        if self._coming is not None:
            self._coming.add(body)
            if self._is_in_line_full:
                self.pause_reading()

    def on_message_complete(self) -> None:
        """Mark the request as complete."""
        if not self._parser.should_upgrade() and self._coming is not None:
            self._in_message = False
            self._coming.end_body()
            self._stop_timer()
            if not self._is_answering:  # this was the rest of a request that has been answered
                self._wait_for_another()

    # ------------------------------------------------------------------------------------------- an exchange's calls

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of every answer, such as the date."""
        return self._state.default_headers

    def write(self, data: bytes) -> None:
        """Send data, or buffer it until the client reads."""
        if not self.transport.is_closing():
            self.transport.write(data)

    def pause_reading(self) -> None:
        """Stop reading from the client."""
        if self._reads and not self.transport.is_closing():
            self._reads = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Read from the client again, unless waiting requests already hold too much."""
        if not self._reads and not self._is_in_line_full and not self.transport.is_closing():
            self._reads = True
            self.transport.resume_reading()

    def close(self) -> None:
        """Send the buffered data, then close the connection. A client that does not read it is disconnected."""
        if not self.transport.is_closing():
            self.transport.close()
            self._closing = PatientTimer(READ_TIMEOUT, self.transport.abort)

    def answered(self) -> None:
        """Continue with the next request. If this one is incomplete, wait for its rest for LINGER seconds."""
        self._state.total_requests += 1
        if self.transport.is_closing():
            return
        if self._in_line:
            self._begin(self._in_line.popleft())
        else:
            self._wait_for_another()
            if self._in_message and self._timer is None:
                self._close_in(LINGER)
        self.resume_reading()

    def _begin(self, exchange: Cycle) -> None:
        self._current = exchange
        task = self._loop.create_task(exchange.run(self._app))
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)
        if self._has_ended:
            self._probe(FIRST_PROBE, exchange)

    def _probe(self, seconds: float, exchange: Cycle) -> None:
        """Send a probe, as `eof_received` explains. seconds: until the next one."""
        if exchange.send_ahead():
            self._probe_in(seconds, exchange)

    def _probe_in(self, seconds: float, exchange: Cycle) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self._probe, 3 * seconds, exchange)

    # ------------------------------------------------------------------------------------------- bounds

    @property
    def _is_in_line_full(self) -> bool:
        """True if the waiting requests together hold more unread bytes than one running request may."""
        return sum(exchange.num_unread for exchange in self._in_line) > MAX_UNREAD

    def _add_to_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            raise _head_too_large()

    def _take_place(self) -> bool:
        """Close an idle connection, or the one whose incomplete request began first. Return False without either.

        Many such connections must not keep other clients out.
        """
        slow: list[Connection] = []
        for other in self._state.connections:
            if other is self or other.transport.is_closing():
                continue
            if not other._is_answering:
                other.close()
                return True
            if other._is_coming:
                slow.append(other)
        if slow:
            min(slow, key=lambda other: other._begun).close()
        return bool(slow)

    @property
    def _is_coming(self) -> bool:
        """True if the current request is incomplete and its answer has not begun."""
        current = self._current
        return self._in_message and current is not None and current is self._coming and not current.started

    @property
    def _is_answering(self) -> bool:
        return self._current is not None and not self._current.complete

    def _close_in(self, seconds: float) -> None:
        self._timer = PatientTimer(seconds, self._close_late, seconds)

    def _close_late(self, seconds: float) -> None:
        """Close the connection, unless a request is being answered."""
        if self._is_answering:
            self._close_in(seconds)
        else:
            self.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait_for_another(self) -> None:
        self._stop_idle_timer()
        self._idle = PatientTimer(self._keep_alive, self.close)

    def _stop_idle_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error a request that did not reach the application, and close the connection."""
        current = self._current
        if current is not None and not current.complete:
            is_bodyless = current.is_bodyless
        else:
            is_bodyless = self._in_head and self._url != b"" and self._parser.get_method() == b"HEAD"
        if current is None or current.complete or not current.started:
            self.transport.write(whole_answer(error, is_bodyless))
        self.close()


def _head_too_large() -> ApiError:
    message = f"the request has more than {MAX_HEAD} bytes in addition to its body, which is the limit of this server"
    return ApiError(message, HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, code="head_too_large")


def _address(found: Any) -> tuple[str, int] | None:
    """Return a host and a port, or None if the address has another form."""
    return (str(found[0]), int(found[1])) if isinstance(found, tuple) else None
