"""A server stays up: what goes wrong with one request, or with one step, is told to whom it concerns."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from quire.engine.cost import CostModel, Device
from quire.engine.plan import StepOutput
from quire.models.batch import Batch
from quire.server.api import local_engine_client
from quire.server.api.service import Service
from quire.server.http import guard
from tests.server.serving import Answer, Serving, serving

pytestmark = pytest.mark.slow

ENDLESS = {"prompt": "x = ", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


class Hooked:
    """An engine's runner, with something that happens before each step."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.before: Callable[[Batch], None] = lambda batch: None
        self.lost = False
        self.num_steps = 0

    def run(self, batch: Batch) -> StepOutput:
        self.num_steps += 1
        self.before(batch)
        return self.inner.run(batch)

    def is_lost(self) -> bool:
        return self.lost


def hook(service: Service) -> None:
    service.engine_client.engine.runner = Hooked(service.engine_client.engine.runner)


def runner(server: Serving) -> Hooked:
    found = server.service.engine_client.engine.runner
    assert isinstance(found, Hooked)
    return found


@pytest.fixture
def hooked() -> Iterator[Serving]:
    with serving(prepare=hook) as running:
        yield running


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


class Client:
    """A streaming client that may hang up at any time."""

    def __init__(self, server: Serving, path: str = "/v1/completions", **body: Any) -> None:
        payload = json.dumps(body).encode()
        self.socket = socket.create_connection((server.host, server.port), timeout=30)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self.socket.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(payload) + payload)

    def read(self, count: int = 1) -> bytes:
        """At least so many bytes."""
        got = b""
        while len(got) < count and (part := self.socket.recv(65536)):
            got += part
        return got

    def hang_up(self) -> None:
        self.socket.close()


# ------------------------------------------------------------------------------------------------- disconnects


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_is_forgotten_within_two_steps(hooked: Serving, stream: bool) -> None:
    noticed: list[int] = []
    old = hooked.service.engine_client.abort

    def abort(job: Any) -> None:
        noticed.append(runner(hooked).num_steps)
        old(job)

    hooked.service.engine_client.abort = abort  # type: ignore[method-assign]
    client = Client(hooked, **ENDLESS, stream=stream)
    until(lambda: runner(hooked).num_steps > 3)
    client.hang_up()
    until(lambda: bool(noticed))
    until(lambda: hooked.service.engine_client.num_samples == 0)
    assert runner(hooked).num_steps <= noticed[0] + 2
    assert hooked.is_idle()


def test_disconnects_at_random_moments_leave_nothing_behind(hooked: Serving, long: bool) -> None:
    from tests.server.storm import storm

    count = 60 if long else 24
    report = storm(hooked, count, seed=1)
    assert report.disconnected == count
    assert hooked.is_idle()
    assert report.leaked == []


# ------------------------------------------------------------------------------------------------- limits


def test_a_full_queue_turns_clients_away_and_takes_them_again() -> None:
    with serving({"max_num_seqs": 2}, hook, max_num_queued_reqs=1) as server:
        gate = threading.Event()
        runner(server).before = lambda batch: gate.wait(30) and None
        clients = [Client(server, **ENDLESS, stream=True) for _ in range(3)]
        until(lambda: server.service.engine_client.num_samples == 3)
        refused = server.post("/v1/completions", **ENDLESS)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.error()["type"] == "rate_limit_error"
        too_many = server.post("/v1/completions", **ENDLESS | {"n": 4})
        assert too_many.status == 400
        gate.set()
        for client in clients:
            client.hang_up()
        until(lambda: server.service.engine_client.num_samples == 0)
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status == 200


def test_a_request_that_takes_too_long_is_ended() -> None:
    with serving({}, hook, request_timeout=0.3) as server:
        runner(server).before = lambda batch: time.sleep(0.05)
        late = server.post("/v1/completions", **ENDLESS)
        assert late.status == 504
        assert late.error()["code"] == "deadline"
        chunks = server.post("/v1/completions", **ENDLESS, stream=True).events()
        assert chunks[0]["choices"][0]["text"] is not None
        assert chunks[-1]["error"]["code"] == "deadline"
        search = server.post("/v1/completions", prompt="a", max_tokens=200, use_beam_search=True, n=4, ignore_eos=True)
        assert search.status == 504
        runner(server).before = lambda batch: None
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status == 200
        until(server.is_idle)


def test_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(max_body_size=2048) as server:
        large = b'{"prompt": "' + b"a" * 4096 + b'"}'
        answer = server.ask("POST", "/v1/completions", large)
        assert (answer.status, answer.error()["type"]) == (413, "invalid_request_error")
        chunked = socket.create_connection((server.host, server.port), timeout=30)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        chunked.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(large), large))
        assert chunked.recv(65536).startswith(b"HTTP/1.1 413")
        monkeypatch.setattr(guard, "BODY_TIMEOUT", 0.1)
        slow = socket.create_connection((server.host, server.port), timeout=30)
        slow.sendall(head + b'Content-Length: 100\r\n\r\n{"prompt"')
        assert slow.recv(65536).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b"", "missing"),
        (b"null", "missing"),
        (b'{"prompt": "a", "temperature": NaN}', "finite"),
        (b'{"prompt": "a", "temperature": Infinity}', "finite"),
        (b'{"prompt": "a", "seed": 1e400}', "seed"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "body"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "body"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"prompt": "a", "stop": "\\udfff"}', "stop"),
        (b"\xff\xfe", "body"),
    ],
)
def test_bodies_that_make_no_sense_are_refused(server: Serving, body: bytes, words: str) -> None:
    answer = server.ask("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert 400 <= answer.status < 500
    assert words in answer.error()["message"], answer.error()


def test_unknown_routes_and_methods(server: Serving) -> None:
    assert server.get("/v2/nothing").error()["type"] == "not_found_error"
    answer = server.get("/v1/completions")
    assert (answer.status, answer.error()["type"]) == (405, "invalid_request_error")
    assert server.ask("POST", "/v1/completions", b"prompt=a", {"Content-Type": "text/plain"}).status == 400


# ------------------------------------------------------------------------------------------------- keys


def test_every_route_but_health_and_ready_wants_a_key() -> None:
    with serving(api_key=("first-key", "second-key")) as server:
        routes = [(method, path) for path, methods in server_routes(server) for method in methods]
        assert ("POST", "/v1/completions") in routes
        assert ("GET", "/metrics") in routes
        assert ("GET", "/inspector") in routes
        for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/nowhere"), ("GET", "/health/")]:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first-key"}):
                answer = server.ask(method, path, {} if method == "POST" else None, headers)
                expected = 200 if path in ("/health", "/ready") else 401
                assert answer.status == expected, (method, path, headers)
        for key in ("first-key", "second-key"):
            assert server.ask("GET", "/v1/models", None, {"Authorization": f"Bearer {key}"}).status == 200
        basic = "Basic OnNlY29uZC1rZXk="  # :second-key
        assert server.ask("GET", "/inspector", None, {"Authorization": basic}).status == 200
        assert server.get("/inspector").headers["www-authenticate"].startswith("Basic")
        assert server.get("/v1/models").headers["www-authenticate"].startswith("Bearer")
        assert server.ask("GET", "/v1/models", None, {"Authorization": "Basic !"}).status == 401


def server_routes(server: Serving) -> list[tuple[str, list[str]]]:
    found = server.ask("GET", "/openapi.json", None, {"Authorization": "Bearer first-key"}).json()["paths"]
    listed = [(path.replace("{name}", "x"), [m.upper() for m in methods]) for path, methods in found.items()]
    return [*listed, ("/inspector", ["GET"]), ("/inspector/events", ["GET"])]


# ------------------------------------------------------------------------------------------------- failures


def test_a_step_that_fails_ends_its_requests_and_no_others(hooked: Serving) -> None:
    def fail_once(batch: Batch) -> None:
        if len(batch.logit_ids) and any(len(batch.token_ids) > 30 for _ in "x"):
            raise RuntimeError("injected")

    runner(hooked).before = fail_once
    bad = hooked.post("/v1/completions", prompt="a b c d " * 40, max_tokens=4)
    assert bad.status == 500
    assert "injected" in bad.error()["message"]
    chunks = hooked.post("/v1/completions", prompt="a b c d " * 40, max_tokens=4, stream=True).events()
    assert "injected" in chunks[-1]["error"]["message"]
    assert hooked.post("/v1/completions", prompt="a", max_tokens=4).status == 200
    assert hooked.get("/health").status == 200
    assert hooked.is_idle()


def test_who_waits_while_a_step_fails_goes_on() -> None:
    with serving({"max_num_seqs": 2}, hook) as server:
        gate = threading.Event()

        def fail_first(batch: Batch) -> None:
            if runner(server).num_steps == 1:
                gate.wait(30)
                raise RuntimeError("injected")

        runner(server).before = fail_first
        with ThreadPoolExecutor(5) as pool:
            asked = [pool.submit(server.post, "/v1/completions", prompt=f"x{i} =", max_tokens=9) for i in range(5)]
            until(lambda: server.service.engine_client.num_samples == 5)
            gate.set()
            statuses = sorted(a.result().status for a in asked)
        assert statuses[0] == 200
        assert statuses.count(500) in (1, 2)  # those of the first step: one, or two that came at once
        assert statuses.count(200) == 5 - statuses.count(500)
        assert server.is_idle()


def test_a_stuck_engine_is_told_of_and_forgiven(hooked: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_engine_client, "STUCK_AFTER", 0.2)
    gate = threading.Event()
    runner(hooked).before = lambda batch: gate.wait(30) and None
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(hooked.post, "/v1/completions", prompt="a", max_tokens=2)
        until(lambda: hooked.get("/ready").status == 503)
        assert hooked.get("/ready").error()["code"] == "engine_stuck"
        assert hooked.get("/metrics").status == 200
        assert hooked.get("/v1/models").status == 200
        gate.set()
        assert asked.result().status == 200
    assert hooked.get("/ready").status == 200


def test_a_long_step_is_not_a_stuck_one(hooked: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long it may take follows from its own size, by the cost model of a machine that is slow in this test."""
    monkeypatch.setattr(local_engine_client, "STUCK_AFTER", 0.01)
    gate, now, its = threading.Event(), time.monotonic(), hooked.service.engine_client
    slow = Device("slow", 1e30, 2e6, 1e30)  # by far the most of it takes its linears: 2 operations a parameter and row
    its._cost = CostModel(replace(its._cost.model, layer_params=10**6, head_params=0, groups=()), slow, 16)
    runner(hooked).before = lambda batch: gate.wait(30) and None

    def health(seconds: float) -> int:
        its.llm._busy_since = time.monotonic() - seconds
        return hooked.get("/ready").status

    with ThreadPoolExecutor(1) as pool:
        for count in (200, 20):
            gate.clear()
            asked = pool.submit(hooked.post, "/v1/completions", prompt=[count] * count, max_tokens=1)
            until(lambda: its.engine.under_way is not None)
            allowed = local_engine_client.PATIENCE * count  # a second a row
            assert (health(0.9 * allowed), health(allowed + 1)) == (200, 503)
            assert f"should take {allowed:.1f} s at most" in hooked.get("/ready").error()["message"]
            its.llm._busy_since = now
            gate.set()
            assert asked.result().status == 200
            until(lambda: its.engine.under_way is None)
    assert hooked.get("/ready").status == 200


def test_how_long_a_step_may_take_can_be_told() -> None:
    with serving({}, hook, stuck_after=50) as server:
        gate, its = threading.Event(), server.service.engine_client
        runner(server).before = lambda batch: gate.wait(30) and None
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(server.post, "/v1/completions", prompt="a", max_tokens=1)
            until(lambda: its.engine.under_way is not None)
            for seconds, ready, health in ((49, 200, 200), (51, 503, 200), (501, 503, 503)):
                its.llm._busy_since = time.monotonic() - seconds
                assert (server.get("/ready").status, server.get("/health").status) == (ready, health)
            gate.set()
            assert asked.result().status == 200


def test_an_engine_that_is_lost_tells_everybody_and_ends_the_server(hooked: Serving) -> None:
    def lose(batch: Batch) -> None:
        if runner(hooked).num_steps > 5:
            runner(hooked).lost = True
            raise RuntimeError("an illegal address")

    runner(hooked).before = lose
    answers: list[Answer] = []
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(hooked.post, "/v1/completions", **ENDLESS) for _ in range(3)]
        answers = [a.result() for a in asked]
    assert {answer.status for answer in answers} <= {500, 503}
    assert any("illegal address" in answer.error()["message"] for answer in answers)
    assert hooked.server is not None
    until(lambda: hooked.server.engine_failed and hooked.server.should_exit)  # type: ignore[union-attr]


def test_who_waits_for_blocks_gets_them_and_who_never_could_is_told() -> None:
    with serving({"num_blocks": 24, "max_model_len": 256}) as server:
        with ThreadPoolExecutor(8) as pool:
            asked = [
                pool.submit(server.post, "/v1/completions", prompt=f"v{i} = ", max_tokens=120, ignore_eos=True)
                for i in range(8)
            ]
            counts = [a.result().json()["usage"]["completion_tokens"] for a in asked]
        assert counts == [120] * 8
        assert server.service.engine_client.engine.scheduler.num_preemptions > 0
        assert server.is_idle()
    with serving({"num_blocks": 8, "max_model_len": 512}) as server:
        refused = server.post("/v1/completions", prompt="a", max_tokens=300)
        assert refused.status == 400
        assert "can never fit" in refused.error()["message"]


def test_a_tokenizer_that_fails_ends_one_request(hooked: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = hooked.service.engine_client.llm._processor
    old = processor._process_event

    def fail(sample: Any, event: Any) -> None:
        if sample.request.prompt == "bad":
            raise RuntimeError("no such character")
        old(sample, event)

    monkeypatch.setattr(processor, "_process_event", fail)
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(hooked.post, "/v1/completions", prompt="good", max_tokens=30, ignore_eos=True)
        bad = hooked.post("/v1/completions", prompt="bad", max_tokens=30, ignore_eos=True)
        assert "no such character" in bad.error()["message"]
        assert good.result().json()["usage"]["completion_tokens"] == 30
    until(hooked.is_idle)


def test_prompts_are_logged_only_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    for asked in (False, True):
        caplog.clear()
        with serving(enable_log_requests=asked) as server:
            server.post("/v1/completions", prompt="my secret prompt", max_tokens=1)
            server.post("/v1/completions", prompt="my secret prompt", max_tokens="x")
        assert ("my secret prompt" in caplog.text) is asked


# ----------------------------------------------------------------------------------------------- being stopped


def test_who_is_not_done_when_the_server_must_end_is_told_so() -> None:
    with serving({}, hook, shutdown_timeout=0.3) as server:
        runner(server).before = lambda batch: time.sleep(0.05)
        with ThreadPoolExecutor(3) as pool:
            plain = pool.submit(server.post, "/v1/completions", **ENDLESS)
            streamed = pool.submit(server.post, "/v1/completions", **ENDLESS, stream=True)
            until(lambda: server.service.engine_client.num_samples == 2)
            assert server.server is not None
            server.server.should_exit = True
            assert plain.result().status == 503
            assert "the server is stopping" in plain.result().error()["message"]
            assert "the server is stopping" in streamed.result().events()[-1]["error"]["message"]


def test_a_deadline_is_kept_even_by_an_engine_that_is_stuck() -> None:
    with serving({}, hook, request_timeout=0.2) as server:
        gate = threading.Event()
        runner(server).before = lambda batch: gate.wait(30) and None
        assert server.post("/v1/completions", **ENDLESS).status == 504
        assert server.post("/v1/completions", **ENDLESS, stream=True).events()[-1]["error"]["code"] == "deadline"
        assert server.post("/v1/completions", prompt="a", use_beam_search=True, n=2).status == 504
        assert server.service.engine_client.num_samples == 4  # the engine has them still
        gate.set()
        until(server.is_idle)


def test_an_open_body_does_not_hold_a_seat_at_the_inspector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_TIMEOUT", 0.1)
    with serving() as server:
        for _ in range(20):
            one = socket.create_connection((server.host, server.port), timeout=30)
            one.sendall(b"GET /inspector/events HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n")
            assert b" 200 " in one.recv(4096)
            until(lambda: not any(not watcher.gone for watcher in server.inspector._watchers))
            one.close()


def test_a_text_that_can_never_fit_is_refused_before_it_is_taken_apart(server: Serving) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a" * 1_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
    ):
        refused = server.ask("POST", path, body)
        assert refused.error()["code"] == "context_length_exceeded"
        assert "characters" in refused.error()["message"]


def test_beam_searches_are_counted() -> None:
    with serving() as server:
        server.post("/v1/completions", prompt="a", max_tokens=5, use_beam_search=True, n=3, ignore_eos=True)
        for count in (
            'quire:generation_tokens_total{engine="0",model_name="quire-embedded"} 15.0',
            'finished_reason="length",model_name="quire-embedded"} 1.0',
        ):
            until(lambda count=count: count in server.get("/metrics").body.decode())  # it is counted after the answer


def test_with_keys_the_inspector_does_not_tell_of_others_salts() -> None:
    for keys, shown in (((), "salt"), (("one", "two"), "unseen")):
        with serving(api_key=keys) as server:
            for salt in ("mine", "yours"):
                headers = {"Authorization": "Bearer one"} if keys else {}
                body = {"prompt": "import os\n" * 20, "max_tokens": 1, "cache_salt": salt}
                assert server.ask("POST", "/v1/completions", body, headers).status == 200
            miss = server.on_engine(lambda: [str(line) for line in server.inspector._log.take()])
            assert f'"miss":"{shown}"' in "".join(miss)
