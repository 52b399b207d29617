"""Who is answered by which name, and how much of the bodies that come is held."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from quire.errors import ConfigError
from quire.server.http import body as body_module
from quire.server.http import connection
from quire.server.http.api_error import ApiError
from quire.server.http.body import Bodies
from quire.server.http.guard import CLIENT
from quire.server.http.hosts import hosts_to_check
from quire.server.protocol.tokens import DetokenizeRequest
from quire.server.server_config import ServerConfig
from tests.server.serving import Serving, serving
from tests.server.test_connection import Raw, asked
from tests.server.test_robust import Client, hook, runner, until

JSON = b"Content-Type: application/json\r\n"
COMPLETION = {"prompt": "a", "max_tokens": 1}


# -------------------------------------------------------------------------------- DNS rebinding: CVE-2024-28224


def with_host(server: Serving, host: str, path: str = "/v1/models") -> int:
    return server.ask("GET", path, None, {"Host": host}).status


@pytest.fixture(scope="module")
def named() -> Iterator[Serving]:
    with serving(allowed_hosts=("llm.example", "[2001:db8::7]")) as running:
        yield running


def test_a_page_cannot_point_its_own_name_at_a_server_of_this_machine(server: Serving) -> None:
    headers = {"Host": "attacker.example", "Origin": "http://attacker.example"}
    refused = server.ask("POST", "/v1/completions", COMPLETION, headers)
    assert (refused.status, refused.error()["code"]) == (403, "host_not_allowed")
    assert "attacker.example" in refused.error()["message"]
    assert "--allowed-hosts" in refused.error()["message"]
    for path in ("/inspector", "/inspector/events", "/metrics", "/openapi.json", "/nowhere"):
        assert with_host(server, "attacker.example:8000", path) == 403
    assert with_host(server, "10.0.0.7", "/health") == 200  # a probe names an address that the server cannot know


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:80", "127.0.0.2:", "[::1]:8000"]
)
def test_this_machine_is_answered_at_any_port(server: Serving, host: str) -> None:
    assert with_host(server, host) == 200


@pytest.mark.parametrize(
    "host",
    ["", "a", "localhost.attacker.example", "attacker.example:localhost", "127.0.0.1.attacker.example", "[::2]", "::1",
     "localhost:80:80", "localhost@attacker.example", "localhost/", "0.0.0.0", "192.168.0.1", "localhost, a", "[::1",
     "local\xe9host"],
)  # fmt: skip
def test_other_hosts_are_not(server: Serving, host: str) -> None:
    assert with_host(server, host) == 403


def test_a_request_names_one_host(server: Serving) -> None:
    head, here, there = b"GET /version HTTP/1.1\r\n", b"Host: localhost\r\n", b"Host: attacker.example\r\n"
    assert asked(server, head + here + b"\r\n").status == 200
    assert asked(server, head + here + there + b"\r\n").status in (400, 403)
    assert asked(server, head + there + here + b"\r\n").status in (400, 403)
    assert asked(server, head + b"\r\n").status in (400, 403)
    assert asked(server, b"GET /version HTTP/1.0\r\n\r\n").status == 200  # it needs none there; browsers send one


@pytest.mark.parametrize(
    ("target", "header", "status"),
    [
        (b"http://attacker.example", b"localhost", 403),
        (b"http://attacker.example:80", b"localhost", 403),
        (b"http://localhost@attacker.example", b"localhost", 403),
        (b"http://[::2]:8000", b"localhost", 403),
        (b"http://localhost", b"localhost", 200),
        (b"HTTP://LOCALHOST:8000", b"attacker.example", 200),
        (b"http://user@[::1]:8000", b"attacker.example", 200),
    ],
)
def test_the_host_of_a_target_takes_the_place_of_the_header(
    server: Serving, target: bytes, header: bytes, status: int
) -> None:
    """As RFC 9112 has it in section 3.2.2."""
    answer = asked(server, b"GET " + target + b"/version HTTP/1.1\r\nHost: " + header + b"\r\n\r\n")
    assert answer.status == status
    if status == 403:
        assert target.rpartition(b"//")[2].rpartition(b"@")[2].decode() in answer.error()["message"]


def test_hosts_can_be_allowed(named: Serving) -> None:
    for host in ("llm.example", "LLM.example:443", "llm.example.", "[2001:db8::7]:8000", "localhost", "127.0.0.1"):
        assert with_host(named, host) == 200, host
    for host in ("attacker.example", "a.llm.example", "llm.example.attacker.example"):
        refused = named.ask("GET", "/version", None, {"Host": host})
        assert refused.status == 403
        assert "llm.example" in refused.error()["message"]


def test_where_hosts_are_checked() -> None:
    """At this machine's own addresses, without a key; and wherever it is asked for."""
    for host, keys, allowed, expected in (
        ("127.0.0.1", (), (), frozenset()),
        ("::1", (), (), frozenset()),
        ("localhost", (), (), frozenset()),
        ("0.0.0.0", (), (), None),
        ("192.168.0.1", (), (), None),
        ("127.0.0.1", ("key",), (), None),
        ("127.0.0.1", (), ("*",), None),
        ("0.0.0.0", ("key",), ("A.example", "[::7]"), frozenset({"a.example", "::7"})),
    ):
        config = ServerConfig(host=host, api_key=keys, allowed_hosts=allowed)
        assert hosts_to_check(config.allowed_hosts, config.host, bool(config.api_key)) == expected, config


@pytest.mark.parametrize("host", ["http://a.example", "a.example:8000", "a/b", "", "*.example", "::1", "é.example"])
def test_names_that_no_request_could_have_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts"):
        ServerConfig(allowed_hosts=(host,))


# ------------------------------------------------------------------------------------------------------- bodies


def padded(size: int, **fields: Any) -> bytes:
    """A body of that size, most of it in a field of no consequence."""
    fields["metadata"] = {"a": ""}
    fields["metadata"]["a"] = "x" * (size - len(json.dumps(fields)))
    return json.dumps(fields).encode()


def test_large_bodies_that_are_being_answered_keep_out_no_others() -> None:
    with serving({"max_num_seqs": 32}, hook, max_body_size=4096) as server, ExitStack() as clients:
        gate = threading.Event()
        clients.callback(gate.set)
        runner(server).before = lambda batch: gate.wait(30) and None
        large = padded(4096, prompt="a", max_tokens=9, ignore_eos=True, stream=True)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Content-Length: 4096\r\n\r\n"
        for _ in range(2 * body_module.MAX_HELD_BODIES):
            clients.enter_context(Raw(server, head + large))
        until(lambda: server.service.engine_client.num_samples == 2 * body_module.MAX_HELD_BODIES)
        assert server.post("/tokenize", prompt="a" * 3000).status == 200


@pytest.mark.slow
def test_bodies_that_never_end_keep_out_no_others() -> None:
    """With a route that takes them, and with one that reads none."""
    with serving(max_body_size=4096) as server, ExitStack() as clients:
        for route in (b"POST /tokenize", b"GET /inspector/events"):
            head = route + b" HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Content-Length: 4096\r\n\r\n"
            count = body_module.MAX_HELD_BODIES
            many = [clients.enter_context(Raw(server, head + b"x" * 4000)) for _ in range(count)]
            if route.startswith(b"POST"):
                until(lambda size=count * 4000: held(server) == size)  # type: ignore[misc]
            else:
                assert all(client.socket.recv(20) for client in many)
            for _ in range(3):
                assert server.post("/tokenize", prompt="a" * 3900).status == 200


def held(server: Serving) -> int:
    assert server.server is not None
    bodies: Bodies = server.server.config.app.state.bodies  # type: ignore[union-attr]
    return bodies._held


class Sender:
    """A request whose body is sent as the test likes."""

    def __init__(self, bodies: Bodies, key: str | None = None) -> None:
        self.pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope: dict[str, Any] = {"type": "http", "headers": [(b"content-type", b"application/json")], "state": {}}
        if key is not None:
            scope["state"][CLIENT] = key
        self.task = asyncio.create_task(bodies.parse(HttpRequest(scope, self.pieces.get), DetokenizeRequest))

    async def send(self, piece: bytes, more: bool = True) -> None:
        await self.pieces.put({"type": "http.request", "body": piece, "more_body": more})
        while not self.pieces.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)


def in_a_loop(test: Callable[[Bodies], Any], limit: int) -> None:
    async def run() -> None:
        await test(Bodies(limit, lambda request, body: None))

    asyncio.run(run())


def test_the_body_that_began_first_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "MAX_HELD_BODIES", 2)

    async def run(bodies: Bodies) -> None:
        first, second, third = (Sender(bodies) for _ in range(3))
        await first.send(b" " * 90)
        await second.send(b" " * 90)
        assert bodies._held == 180
        await third.send(b'{"tokens":')
        assert bodies._held == 190  # there is room for this
        await third.send(b"[7" + b" " * 70)
        assert bodies._held == 172  # but not for that
        assert not first.task.done()
        await third.send(b"]}", more=False)
        assert (await third.task).tokens == [7]
        assert bodies._held == 90
        await first.send(b" ")
        with pytest.raises(ApiError, match="200 bytes of incomplete bodies") as caught:
            await first.task
        assert (caught.value.status, caught.value.code) == (408, "body_gave_way")
        await second.send(b" " * 10)
        assert bodies._held == 100
        await second.pieces.put({"type": "http.disconnect"})
        with pytest.raises(ApiError, match="gone"):
            await second.task
        assert bodies._held == 0

    in_a_loop(run, 100)


def test_a_body_of_the_client_that_holds_most_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of others, however long they take, nor one that holds nothing."""
    monkeypatch.setattr(body_module, "MAX_HELD_BODIES", 2)

    async def run(bodies: Bodies) -> None:
        slow, empty, large, larger = (Sender(bodies, key) for key in ("one", "another", "another", "another"))
        await slow.send(b'{"tokens":')
        await empty.send(b"")
        await large.send(b" " * 95)
        await larger.send(b" " * 95)
        await larger.send(b" ")
        assert bodies._held == 10 + 96
        await large.send(b" ")  # it learns of it with its next piece
        assert large.task.done()
        assert not any(sender.task.done() for sender in (slow, empty, larger))
        await slow.send(b"[7]}", more=False)
        assert (await slow.task).tokens == [7]
        for sender in (empty, larger):
            await sender.pieces.put({"type": "http.disconnect"})
        for sender in (empty, large, larger):
            with pytest.raises(ApiError):
                await sender.task
        assert bodies._held == 0

    in_a_loop(run, 100)


@pytest.mark.slow
def test_what_is_of_no_consequence_is_not_held_while_the_answer_is_made() -> None:
    gc.freeze()  # only what is made from here on is looked through
    with serving(prepare=hook) as server, ThreadPoolExecutor(3) as pool:
        gate = threading.Event()
        runner(server).before = lambda batch: gate.wait(30) and None
        mark = "a mark that is nowhere else"
        say = [{"role": "user", "content": [{"type": "text", "text": mark}]}]
        bodies = [
            ("/v1/completions", {"prompt": "a", "metadata": {mark: 1}, "user": mark}),
            ("/v1/chat/completions", {"messages": say, "metadata": {mark: 1}}),
            ("/v1/embeddings", {"input": "a", "user": mark}),
        ]
        sent = [(path, json.dumps(body).encode()) for path, body in bodies]
        del say, bodies
        kind = {"Content-Type": "application/json"}
        answers = [pool.submit(server.ask, "POST", path, body, kind) for path, body in sent]
        until(lambda: server.service.engine_client.num_samples == 3)
        gc.collect()
        dicts = [one for one in gc.get_objects() if type(one) is dict]
        assert not any(type(text) is str and text == mark for one in dicts for text in (*one, *one.values()))
        gate.set()
        assert [answer.result().status for answer in answers] == [200] * 3


def test_requests_that_never_end_do_not_take_all_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one whose body has been coming for longest gives way; who waits for an answer does not."""
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 4)
    with serving(prepare=hook) as server, ExitStack() as clients:
        gate = threading.Event()
        clients.callback(gate.set)
        runner(server).before = lambda batch: gate.wait(20) and None
        state = server.server.server_state  # type: ignore[union-attr]
        waiting = Client(server, **COMPLETION)
        until(lambda: server.service.engine_client.num_samples == 1)
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Content-Length: 100\r\n\r\n{"
        slow = []
        for count in (1, 2, 3):
            slow.append(clients.enter_context(Raw(server, head)))
            until(lambda count=count: held(server) == count)  # type: ignore[misc]
        assert len(state.connections) == 4
        assert server.get("/version").status == 200
        assert slow[0].is_closed()
        gate.set()
        assert waiting.read().startswith(b"HTTP/1.1 200")
        slow[2].send(b" " * 99)
        assert slow[2].answer().status == 400
