"""One request and its answer, with applications that break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import uvicorn

from quire.server.http.connection import Connection
from quire.server.http.cycle import Cycle

App = Callable[[Any, Any, Any], Awaitable[None]]
PLAIN = [(b"content-type", b"text/plain")]


class Running:
    """A server of one small application."""

    host = "127.0.0.1"

    def __init__(self, app: App, **settings: Any) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(app, http=Connection, lifespan="off", log_config=None, **settings)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([self.listening],))
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    @property
    def port(self) -> int:
        return int(self.listening.getsockname()[1])

    def ask(self, method: str = "GET", **given: Any) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, "/a%20b?c=d", **given)
        return connection.getresponse()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(app: App, **settings: Any) -> Iterator[Running]:
    made = Running(app, **settings)
    try:
        yield made
    finally:
        made.stop()


def answering(status: int, headers: list[tuple[bytes, bytes]], *bodies: bytes) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i, body in enumerate(bodies):
            await send({"type": "http.response.body", "body": body, "more_body": i + 1 < len(bodies)})

    return app


def test_an_exchange_is_gone_with_its_answer() -> None:
    """Not when the collector looks for cycles, which a gateway lets it do seldom."""

    class Client:
        writable = asyncio.Event()
        default_headers = ()

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

    async def main() -> None:
        scope = {"method": "GET", "path": "/", "http_version": "1.1"}
        Client.writable.set()
        exchange = Cycle(Client(), scope, keep_alive=True, expects_continue=False)
        await exchange.run(answering(200, PLAIN, b"a"))
        assert exchange.complete
        gone = weakref.ref(exchange)
        del exchange
        assert gone() is None

    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_what_the_application_is_given() -> None:
    found: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        found.append((scope, body))
        await answering(200, PLAIN, b"one ", b"", b"two")(scope, receive, send)

    large = b"x" * 1_000_000
    with running(app) as server:
        answer = server.ask("POST", body=large, headers={"X-Own": "1"})
        assert (answer.status, answer.read()) == (200, b"one two")
        assert answer.headers["transfer-encoding"] == "chunked"
        assert answer.headers["date"]
    [(scope, body)] = found
    assert body == large
    assert (scope["path"], scope["raw_path"], scope["query_string"]) == ("/a b", b"/a%20b", b"c=d")
    assert (scope["method"], scope["http_version"], scope["scheme"]) == ("POST", "1.1", "http")
    assert scope["client"][0] == scope["server"][0] == "127.0.0.1"
    assert (b"x-own", b"1") in scope["headers"]


@pytest.mark.parametrize(
    ("method", "status", "bodies", "read"),
    [("HEAD", 200, [b"ab", b"c"], b""), ("GET", 204, [b""], b""), ("GET", 299, [b"ab", b"c"], b"abc")],
)
def test_answers_without_a_length(method: str, status: int, bodies: list[bytes], read: bytes) -> None:
    with running(answering(status, PLAIN, *bodies)) as server:
        answer = server.ask(method)
        assert (answer.status, answer.read()) == (status, read)
        assert ("transfer-encoding" in answer.headers) == bool(read)


def test_there_are_no_chunks_before_http_1_1() -> None:
    """The end of the connection is that of the answer. Nor is such a client asked to send its body."""
    head = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nab"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"ab"
        await answering(200, PLAIN, b"one ", b"", b"two")(scope, receive, send)

    with running(app) as server, socket.create_connection((server.host, server.port), timeout=20) as client:
        client.sendall(head)
        found = b"".join(iter(lambda: client.recv(65536), b""))
        assert found.startswith(b"HTTP/1.1 200 ")
        assert found.endswith(b"\r\n\r\none two")
        assert b"transfer-encoding" not in found


@pytest.mark.slow
def test_connections_stay_open_for_a_while() -> None:
    with running(answering(200, [(b"Content-Length", b"2")], b"ok"), timeout_keep_alive=1) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        for _ in range(3):
            connection.request("GET", "/")
            answer = connection.getresponse()
            assert answer.read() == b"ok"
            assert "connection" not in answer.headers
        assert connection.sock.recv(1) == b""  # after the second that it may wait for another one
        answer = server.ask(headers={"Connection": "close"})
        assert (answer.read(), answer.headers["connection"]) == (b"ok", "close")
    with running(answering(200, [(b"content-length", b"2"), (b"connection", b"Close")], b"ok")) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().headers.get_all("connection") == ["Close"]


async def fails(scope: Any, receive: Any, send: Any) -> None:
    raise KeyError("a secret")


async def says_nothing(scope: Any, receive: Any, send: Any) -> None:
    pass


async def begins_with_a_body(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.body", "body": b"x"})


@pytest.mark.parametrize(
    "app",
    [fails, says_nothing, begins_with_a_body, answering(200, [(b"x", b"a\r\nset-cookie: b")], b"c")],
    ids=["fails", "nothing", "body first", "header"],
)
def test_an_application_that_does_not_answer(app: App) -> None:
    with running(app) as server:
        answer = server.ask()
        error = json.loads(answer.read())["error"]
        assert (answer.status, error["code"]) == (500, "internal_error")
        assert answer.headers["connection"] == "close"
        assert "secret" not in error["message"]
        assert "set-cookie" not in answer.headers


def test_an_application_that_fails_sends_no_body_to_head() -> None:
    with running(fails) as server, socket.create_connection((server.host, server.port), timeout=20) as client:
        client.sendall(b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = b"".join(iter(lambda: client.recv(65536), b""))
        assert found.startswith(b"HTTP/1.1 500 ")
        assert found.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("headers", "bodies"),
    [
        ([(b"content-length", b"3")], [b"abcd"]),
        ([(b"content-length", b"3")], [b"ab"]),
        (PLAIN, []),
    ],
    ids=["long", "short", "none"],
)
def test_an_answer_that_is_not_what_its_head_says_is_cut(headers: Any, bodies: list[bytes]) -> None:
    with running(answering(200, headers, *bodies)) as server:
        answer = server.ask()
        assert answer.status == 200
        with pytest.raises(http.client.IncompleteRead):
            answer.read()
