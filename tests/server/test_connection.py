"""A connection takes no more than it should, whatever a client sends over it, and answers all else as OpenAI does."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.server import run
from quire.server.http import connection, guard
from tests.server.serving import Answer, Serving, serving
from tests.server.test_exchange import App, Running, answering, fails, running
from tests.server.test_robust import hook, runner, until

HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
GET = b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /tokenize HTTP/1.1\r\n" + HOST + JSON
BODY = b'{"prompt": "a"}'
OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


class Raw:
    """A client that sends what it likes."""

    def __init__(self, server: Serving | Running, *parts: bytes) -> None:
        self.socket = socket.create_connection((server.host, server.port), timeout=20)
        self._got = b""
        for part in parts:
            self.send(part)

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, part: bytes) -> None:
        """Send it, unless the server does not want more."""
        with contextlib.suppress(OSError):
            self.socket.sendall(part)

    def _read_to(self, mark: bytes) -> bytes:
        while mark not in self._got:
            part = self.socket.recv(65536)
            assert part, self._got
            self._got += part
        found, _, self._got = self._got.partition(mark)
        return found

    def answer(self) -> Answer:
        """The next one."""
        status, *lines = self._read_to(b"\r\n\r\n").decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers["content-length"])
        while len(self._got) < length:
            self._got += self.socket.recv(65536)
        body, self._got = self._got[:length], self._got[length:]
        return Answer(int(status.split()[1]), headers, body)

    def is_closed(self) -> bool:
        """Whether the server ends the connection without another word."""
        try:
            return self._got + self.socket.recv(65536) == b""
        except ConnectionResetError:
            return True


def asked(server: Serving, *parts: bytes) -> Answer:
    with Raw(server, *parts) as client:
        return client.answer()


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """One with no clients but these."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def keyed() -> Iterator[Serving]:
    with serving(api_key=("the-key",)) as running:
        yield running


# ------------------------------------------------------------------------------------- what is no HTTP, or doubtful


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: +5\r\n",
        b"Content-Length: -5\r\n",
        b"Content-Length: 5, 5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: 99999999999999999999999\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Content-Length : 5\r\n",
        b"X: a\r\n continued\r\n",
        b"X: a\x00b\r\n",
        b"X\xff: a\r\n",
        b"X: a\rY: b\r\n",
    ],
)
def test_a_request_with_two_meanings_is_refused_and_what_follows_is_not_read(server: Serving, head: bytes) -> None:
    smuggled = b"0\r\n\r\n" + GET
    with Raw(server, b"POST /tokenize HTTP/1.1\r\n" + HOST + head + b"\r\n" + smuggled) as client:
        answer = client.answer()
        assert answer.status == 400
        assert answer.error()["type"] == "invalid_request_error"
        assert client.is_closed()


@pytest.mark.parametrize("size", [b"zz", b"-5", b"FFFFFFFFFFFFFFFFFFFF", b"", b" 5", b"5 5", b"0x5"])
def test_chunk_sizes_that_are_none_are_refused(server: Serving, size: bytes) -> None:
    head = POST + b"Transfer-Encoding: chunked\r\n\r\n"
    with Raw(server, head + size + b"\r\nabcde\r\n0\r\n\r\n") as client:
        assert client.answer().error()["message"]
        assert client.is_closed()


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        bytes.fromhex("1603010200010001fc0303") + b"a" * 200,
        b"GET /version HTTP/9.9\r\n" + HOST + b"\r\n",
        b"GET /version HTTP/1.1\n" + b"Host: localhost\n\n",
        "GET /vérsion HTTP/1.1\r\n".encode() + HOST + b"\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET http://here HTTP/1.1\r\n" + HOST + b"\r\n",
        b"CONNECT here:80 HTTP/1.1\r\n" + HOST + b"\r\n",
        b"BREW /version HTTP/1.1\r\n" + HOST + b"\r\n",
    ],
)
def test_what_is_no_http_gets_an_error_in_openais_shape(server: Serving, sent: bytes) -> None:
    answer = asked(server, sent)
    assert (answer.status, answer.error()["type"]) == (400, "invalid_request_error")


def test_odd_requests_are_answered(server: Serving) -> None:
    with Raw(server, b"GET /version HTTP/1.0\r\n\r\n") as client:
        assert client.answer().status == 200
        assert client.is_closed()
    assert asked(server, b"GET http://localhost/version HTTP/1.1\r\n" + HOST + b"\r\n").status == 200
    assert asked(server, b"\r\n\r\n" + GET).status == 200
    for path in (b"/%ff%fe%zz", b"/%00", b"/%0d%0aX:%20y", b"/" + b"a" * 60_000, b"/v1/models/%f0%9f%8e"):
        assert asked(server, b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"\r\n").error()["type"] == "not_found_error"
    assert asked(server, b"GET /version HTTP/1.1\r\nHost: \xff\xfe\r\nX-\xc3: \xe2\x28\r\n\r\n").status in (200, 400)
    expecting = POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    with Raw(server, expecting) as client:
        assert client._read_to(b"\r\n\r\n").startswith(b"HTTP/1.1 100")
        client.send(BODY)
        assert client.answer().json()["count"] == 2


def test_an_offer_of_another_protocol_is_declined_and_the_request_served(server: Serving) -> None:
    """As those are that every client in Java sends."""
    length = b"Content-Length: %d\r\n\r\n" % len(BODY)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n5\r\n" + BODY[:5] + b"\r\na\r\n" + BODY[5:] + b"\r\n0\r\n\r\n"
    for sent in (POST + OFFER + length + BODY, POST + OFFER + chunked):
        with Raw(server, sent + GET) as client:
            assert client.answer().json()["tokens"][1:] == [65]
            assert client.answer().json()["version"]
            client.send(sent)
            assert client.answer().status == 200
    with Raw(server, POST + OFFER + length, BODY[:7]) as client:
        client.send(BODY[7:])
        assert client.answer().status == 200
    websocket = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: AAAA\r\nSec-WebSocket-Version: 13\r\n"
    assert asked(server, b"GET /version HTTP/1.1\r\n" + HOST + websocket + b"\r\n").status == 200


# ---------------------------------------------------------------------------------------------------- how much


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /version HTTP/1.1\r\nX: " + b"a" * 65536,
        b"GET /" + b"a" * 65536,
        b"GET /version HTTP/1.1\r\n" + b"X: y\r\n" * 20_000,
        b"\r\n" * 40_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n5;" + b"a" * 65536,
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 40_000,
        POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"a" * 65536,
    ],
    ids=["header", "path", "headers", "blank lines", "extension", "chunks", "trailer"],
)
def test_what_surrounds_a_body_is_bounded(server: Serving, flood: bytes) -> None:
    with Raw(server) as client:
        for _ in range(24):  # several megabytes in all, or as many of them as are wanted
            client.send(flood[-65536:] if _ else flood)
        with contextlib.suppress(ConnectionResetError):
            assert client.answer().status in (431, 400)
    until(lambda: not server.server.server_state.connections)  # type: ignore[union-attr]


def test_a_large_head_is_told_of(server: Serving) -> None:
    with Raw(server, b"GET /version HTTP/1.1\r\n") as client:
        state = server.server.server_state  # type: ignore[union-attr]
        until(lambda: any(one._in_message for one in state.connections))
        client.send(b"X: " + b"a" * connection.MAX_HEAD)
        answer = client.answer()
        assert (answer.status, answer.error()["code"]) == (431, "head_too_large")


def test_a_large_head_that_comes_at_once(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD", 1000)
    for head in (b"GET /version HTTP/1.1\r\n" + b"X: " + b"a" * 1000, b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\nX: y"):
        answer = asked(server, head + b"\r\n" + HOST + b"\r\n")
        assert (answer.status, answer.error()["code"]) == (431, "head_too_large")
    assert asked(server, GET).status == 200


def test_head_gets_no_body_with_an_error(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD", 1000)
    with Raw(server, b"HEAD /version HTTP/1.1\r\nX: " + b"a" * 1000 + b"\r\n\r\n") as client:
        assert client._read_to(b"\r\n\r\n").startswith(b"HTTP/1.1 431")
        assert client.is_closed()


def test_an_error_of_the_servers_own_is_no_bad_request(
    server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(connection.Connection, "on_header", fail)
    answer = asked(server, GET)
    assert (answer.status, answer.error()["code"]) == (500, "internal_error")
    assert "secret" in caplog.text
    assert b"secret" not in answer.body


def gated(gate: threading.Event, bodies: list[bytes]) -> App:
    """An application that reads all, and answers the first request when it may."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        bodies.append(body)
        while not gate.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(receive(), 0.01)
        await answering(200, [(b"content-length", b"2")], b"ok")(scope, receive, send)

    return app


def test_what_follows_the_last_request_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_HEAD", 1000)
    gate = threading.Event()
    bodies: list[bytes] = []
    last = b"GET / HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n"
    with running(gated(gate, bodies)) as server, Raw(server, last) as client:
        until(lambda: bodies == [b""])
        client.send(b"junk" * 1000)
        time.sleep(0.2)  # in which the server may read it
        gate.set()
        assert client.answer().status == 200
        assert client.is_closed()


def test_requests_that_wait_do_not_hold_much() -> None:
    gate = threading.Event()
    bodies: list[bytes] = []
    size = 60_000  # less than that which one of them may hold
    post = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: %d\r\n\r\n" % size + b"x" * size
    with running(gated(gate, bodies)) as server, Raw(server, GET) as client:
        until(lambda: bodies == [b""])
        [its] = server.server.server_state.connections
        sender = threading.Thread(target=client.send, args=(post * 15,))
        sender.start()
        until(lambda: not its._reads)
        time.sleep(0.2)  # in which the one that is answered listens for its client
        assert not its._reads
        assert sum(exchange.num_unread for exchange in its._in_line) < 600_000  # a read has 256 KiB at most
        gate.set()
        assert [client.answer().body for _ in range(16)] == [b"ok"] * 16
        sender.join()
    assert [len(body) for body in bodies] == [0] + [size] * 15


def test_headers_after_the_body_of_a_request_in_line() -> None:
    """It comes to be answered while its body comes."""
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        while (await receive())["more_body"]:
            pass
        await answering(200, [(b"content-length", b"2")], b"ok")(scope, receive, send)

    with running(app) as server, Raw(server) as client:
        client.send(GET + b"POST / HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        assert client.answer().status == 200
        until(lambda: len(seen) == 2)
        client.send(b"0\r\nX-Late: y\r\n\r\n")
        assert client.answer().status == 200
    assert [name for name, _ in seen[1]["headers"]] == [b"host", b"transfer-encoding"]


def test_headers_after_a_body_do_not_count(keyed: Serving) -> None:
    key = b"Authorization: Bearer the-key\r\n"
    head = b"GET /version HTTP/1.1\r\n" + HOST
    assert asked(keyed, head + key + b"\r\n").status == 200
    assert asked(keyed, head + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + key + b"\r\n").status == 401
    assert asked(keyed, head + key + b"Authorization: Bearer other\r\n\r\n").status == 401
    assert asked(keyed, head + b"Authorization: Bearer other\r\n" + key + b"\r\n").status == 401


@pytest.mark.parametrize("get", [GET, GET[:-2] + OFFER + b"\r\n"], ids=["plain", "offering another protocol"])
def test_requests_that_do_not_wait_for_answers_are_served_in_turn_if_they_are_not_many(
    server: Serving, get: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with Raw(server, get * 10) as client:
        assert [client.answer().status for _ in range(10)] == [200] * 10
        client.send(get * 1000)
        refused = client.answer()
        assert (refused.status, caplog.text) == (400, "")
        assert "more than 16 requests" in refused.error()["message"]
        assert client.is_closed()


@pytest.mark.parametrize("later", [False, True])
def test_a_client_that_hangs_up_with_a_request_in_line_is_noticed(later: bool) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 400, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: %d\r\n\r\n" % len(body)
    gate = threading.Event()
    with serving(prepare=hook) as server:
        runner(server).before = lambda batch: runner(server).num_steps > 5 and gate.wait(20) and None
        client = Raw(server, head + body + (b"" if later else GET))
        until(lambda: runner(server).num_steps > 5)
        if later:
            client.send(GET)
        client.socket.close()
        until(lambda: not server.server.server_state.connections)  # type: ignore[union-attr]
        gate.set()
        until(lambda: server.service.engine_client.num_samples == 0)
        assert runner(server).num_steps < 300
        assert server.is_idle()


# ------------------------------------------------------------------------------- clients that send no more, or are gone


def waiting(gate: threading.Event, ends: list[str], app: App) -> App:
    """An application that notes when its client has gone, and answers when it may; or fails, if that fails."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        while not gate.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                if (await asyncio.wait_for(receive(), 0.01))["type"] == "http.disconnect":
                    ends.append(scope["path"])
                    return
        await app(scope, receive, send)

    return run


async def streams(scope: Any, receive: Any, send: Any) -> None:
    """Answer in chunks, and wait for a client to go after the first one."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one ", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


OK = answering(200, [(b"content-length", b"2")], b"ok")
PROBED = 4  # bytes of an answer that a test lets be sent ahead


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
@pytest.mark.parametrize(
    ("sent", "app", "statuses"),
    [
        (GET, OK, [200]),
        (GET * 3, OK, [200] * 3),
        (b"GET / HTTP/1.0\r\n\r\n", OK, [200]),
        (POST + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY, OK, [200]),
        (GET, fails, [500]),
    ],
    ids=["one", "in line", "HTTP/1.0", "a body", "an error"],
)
def test_a_client_that_only_ends_what_it_sends_is_answered(
    loop: str, sent: bytes, app: App, statuses: list[int]
) -> None:
    gate = threading.Event()
    ends: list[str] = []
    with running(waiting(gate, ends, app), loop=loop) as server, Raw(server, sent) as client:
        client.socket.shutdown(socket.SHUT_WR)
        until(lambda: len(server.server.server_state.connections) == 1)
        [its] = server.server.server_state.connections
        until(lambda: its._current is not None and its._current._num_ahead >= PROBED)
        gate.set()
        assert [client.answer().status for _ in statuses] == statuses
        assert client.is_closed()
    assert ends == []


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
def test_a_stream_goes_on_for_a_client_that_only_ends_what_it_sends(loop: str) -> None:
    gate = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one ", "more_body": True})
        while not gate.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"two", "more_body": False})

    with running(app, loop=loop) as server:
        asking = http.client.HTTPConnection(server.host, server.port, timeout=20)
        asking.request("GET", "/")
        answer = asking.getresponse()
        assert answer.read(4) == b"one "
        asking.sock.shutdown(socket.SHUT_WR)
        [its] = server.server.server_state.connections
        until(lambda: its._has_ended)
        gate.set()
        assert answer.read() == b"two"
        assert asking.sock.recv(1) == b""


@pytest.mark.parametrize("loop", ["asyncio", "auto"])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("begins", [False, True])
def test_a_client_that_closes_its_socket_is_noticed(loop: str, version: bytes, begins: bool) -> None:
    """Before an answer begins, and within a stream of which nothing is to be sent."""
    ends: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (streams if begins else waiting(threading.Event(), [], OK))(scope, receive, send)
        ends.append(scope["path"])

    with running(app, loop=loop) as server:
        with Raw(server, GET.replace(b"1.1", version)) as client:
            state = server.server.server_state
            until(lambda: any(one._current for one in state.connections))
            if begins:
                client._read_to(b"one ")
        until(lambda: ends == ["/version"])
        until(lambda: not state.connections)


@pytest.mark.parametrize(
    "sent",
    [POST + b"Content-Length: 10\r\n\r\nabc", POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", GET[:-4], b""],
)
def test_what_has_not_come_as_a_whole_is_not_answered(sent: bytes) -> None:
    ends: list[str] = []
    with running(waiting(threading.Event(), ends, OK)) as server, Raw(server, sent) as client:
        client.socket.shutdown(socket.SHUT_WR)
        assert client.is_closed()
        until(lambda: len(ends) == (b"abc" in sent))


# ------------------------------------------------------------------------------------------------------ how long


@pytest.mark.slow
def test_clients_that_send_nothing_or_slowly_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.2)
    monkeypatch.setattr(connection, "LINGER", 0.2)
    monkeypatch.setattr(guard, "BODY_TIMEOUT", 0.3)
    with serving(api_key=("the-key",)) as server:
        with Raw(server) as silent, Raw(server, b"GET /ver") as slow, Raw(server, b"\r\n") as blank:
            assert silent.is_closed()
            assert slow.is_closed()
            assert blank.is_closed()
        with Raw(server, GET, b"GET /ver") as second:
            assert second.answer().status == 401
            assert second.is_closed()
        key = b"Authorization: Bearer the-key\r\n"
        with Raw(server, POST + key + b"Content-Length: 100\r\n\r\n") as trickling:
            stop = threading.Event()

            def trickle() -> None:
                while not stop.wait(0.05):
                    trickling.send(b" ")

            thread = threading.Thread(target=trickle)
            thread.start()
            assert trickling.answer().status == 408
            assert trickling.is_closed()
            stop.set()
            thread.join()
        with Raw(server, POST + b"Content-Length: 100\r\n\r\n") as refused:
            assert refused.answer().status == 401
            assert refused.is_closed()


def test_a_server_that_was_stopped_reads_what_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timers are due when it goes on, and uvloop runs them before it reads."""
    received = connection.Connection.data_received
    begin, middle, rest = GET[:8], GET[8:16], GET[16:]

    def stop(its: connection.Connection, data: bytes) -> None:
        received(its, data)
        if data == middle:
            its._stop_timer()
            its._close_in(0.01)
            client.send(rest)
            time.sleep(0.02)

    monkeypatch.setattr(connection.Connection, "data_received", stop)
    with running(answering(200, [(b"content-length", b"2")], b"ok")) as server, Raw(server, begin) as client:
        until(lambda: any(its._in_head for its in server.server.server_state.connections))
        client.send(middle)
        assert client.answer().body == b"ok"


@pytest.mark.slow
def test_a_client_that_does_not_read_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "READ_TIMEOUT", 0.2)
    body = b'{"prompt": "' + b"a" * 300_000 + b'"}'
    with serving() as server, Raw(server) as client:
        state = server.server.server_state  # type: ignore[union-attr]
        until(lambda: len(state.connections) == 1)
        [its] = state.connections
        # So that the system holds little of the answer.
        with socket.socket(fileno=os.dup(its.transport.get_extra_info("socket").fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.send(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        assert client.socket.recv(10)
        until(lambda: not state.connections)


def test_a_client_that_does_not_read_the_last_of_an_answer_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all of it is written, nothing waits for the client but the connection, which is to be closed."""
    monkeypatch.setattr(connection, "READ_TIMEOUT", 0.2)
    body = b"x" * 2**24
    app = answering(200, [(b"content-length", b"%d" % len(body)), (b"connection", b"close")], body)
    with running(app) as server, Raw(server) as client:
        state = server.server.server_state
        until(lambda: len(state.connections) == 1)
        [its] = state.connections
        its.transport.set_write_buffer_limits(2**25)  # so that it need not pause
        client.send(GET)
        assert client.socket.recv(10)
        until(lambda: not state.connections)


@pytest.mark.slow
def test_a_connection_stays_open_when_the_rest_of_an_answered_request_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as any other."""
    monkeypatch.setattr(connection, "LINGER", 0.2)
    post = b"POST / HTTP/1.1\r\n" + HOST + b"Content-Length: 4\r\n\r\nab"
    app = answering(200, [(b"content-length", b"2")], b"ok")
    with running(app, timeout_keep_alive=1) as server, Raw(server, post) as client:
        assert client.answer().status == 200
        client.send(b"cd")
        time.sleep(0.5)
        client.send(post)
        assert client.answer().status == 200
        client.send(b"cd")
        assert client.is_closed()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [((100, 1000), [(1000, 1000)]), ((1024, -1), [(4352, -1)]), ((1024, 10**6), [(4352, 10**6)]), ((9999, 9999), []),
     ((-1, -1), [])],
)  # fmt: skip
def test_there_may_be_a_file_for_each_connection(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], expected: list[tuple[int, int]]
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: found.append(new))
    run.allow_connections()
    assert found == expected


def test_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    body = json.dumps({"prompt": "x", "max_tokens": 5}).encode()
    ask = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body
    gate = threading.Event()
    with serving(prepare=hook) as server:
        runner(server).before = lambda batch: gate.wait(20) and None
        state = server.server.server_state  # type: ignore[union-attr]
        busy = [Raw(server, ask) for _ in range(2)]
        idle = Raw(server)
        until(lambda: server.service.engine_client.num_samples == 2 and len(state.connections) == 3)
        busy.append(Raw(server, ask))
        assert idle.is_closed()
        until(lambda: server.service.engine_client.num_samples == 3)
        with Raw(server) as late:
            answer = late.answer()
            assert (answer.status, answer.error()["code"]) == (503, "too_many_connections")
            assert late.is_closed()
        gate.set()
        assert [client.answer().status for client in busy] == [200] * 3
        assert server.get("/version").status == 200
