"""What the fleet's inspector is sent is what the gateway knows."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from quire.fleet import inspector
from quire.fleet.placement import PARTS, reason_of
from quire.server.observability.page import MAX_WATCHERS
from tests.fleet.gateways import at, drain, fronting, lose, slow_all, until
from tests.fleet.serving import Front
from tests.fleet.test_metrics import Asked, serving_one
from tests.server.serving import Serving


def seen(front: Front) -> dict[str, Any]:
    """A snapshot as a watcher gets it."""
    with urlopen(f"{front.url}/inspector/events", timeout=20) as stream:
        return json.loads(stream.readline().removeprefix(b"data: "))


def statuses(front: Front) -> dict[str, str]:
    return {one["url"]: one["status"] for one in seen(front)["replicas"]}


@pytest.mark.slow
def test_an_idle_fleet(front: Front, servers: list[Serving]) -> None:
    shown = seen(front)
    assert shown["about"]["model"] == "quire-embedded"
    assert shown["parts"] == dict(PARTS)
    assert shown["requests"] == []
    assert shown["placements"] == []
    assert [one["url"] for one in shown["replicas"]] == sorted(server.url for server in servers)
    for one in shown["replicas"]:
        assert one["status"] == "up"
        assert one["failure"] is None
        assert one["fingerprint"] == shown["fingerprint"]
        assert one["different"] == []
        assert one["state"]["num_blocks"] == 128
        assert one["num_samples"] == 0


@pytest.mark.slow
def test_a_request_that_moves(front: Front, servers: list[Serving]) -> None:
    slow_all(servers, 0.2)
    asked = Asked(front, prompt=list(range(5, 45)), n=2, max_tokens=60, temperature=0, ignore_eos=True)
    url = serving_one(front)
    shown = seen(front)
    [request] = shown["requests"]
    assert request["prompt"] == 40
    assert {sample["replica"] for sample in request["samples"]} == {url}
    assert len(request["samples"]) == 2
    assert request["samples"][0]["tokens"] >= 3
    assert 0 <= shown["time"] - request["arrived"] < 60
    [placement] = shown["placements"]
    assert (placement["reason"], placement["from"], placement["replica"]) == ("new", None, url)
    assert placement["request"] == request["name"]
    assert placement["samples"] == [0, 1]
    assert len(placement["candidates"]) == placement["num_candidates"] == 2
    assert placement["why"] == reason_of(front.gateway.fleet.placements[0].choice)
    assert {one["url"]: one["num_samples"] for one in shown["replicas"]}[url] == 2
    for one in placement["candidates"]:
        assert sum(one["parts"].values()) == pytest.approx(one["total"])
        assert one["uncached"] == 40

    lose(at(servers, url))
    slow_all(servers, 0.0)
    assert asked.result().status == 200
    until(lambda: seen(front)["requests"] == [])  # a snapshot may be an eighth of a second old
    shown = seen(front)
    *moved, _ = shown["placements"]  # the latest first
    assert sorted(one["samples"] for one in moved) == [[0], [1]]  # each sample by itself, as both had begun
    for one in moved:
        assert (one["reason"], one["from"]) == ("lost", url)
        assert one["delivered"] > 0
        assert one["seconds"] > 0


@pytest.mark.slow
def test_what_becomes_of_replicas(front: Front, servers: list[Serving]) -> None:
    first, second = servers
    drain(first)
    until(lambda: statuses(front)[first.url] == "draining")
    front.gateway.fleet.roster.links[second.url]._headers["Authorization"] = "Bearer another"  # it stays lost
    lose(second)
    until(lambda: statuses(front)[second.url] == "lost")
    [gone] = [one for one in seen(front)["replicas"] if one["url"] == second.url]
    assert gone["state"] is None
    assert gone["failure"]
    assert gone["held_blocks"] == 0
    assert (front.get("/ready").status, front.get("/health").status) == (503, 200)


@pytest.mark.slow
def test_a_beam_search_is_seen(front: Front, servers: list[Serving]) -> None:
    slow_all(servers, 0.2)
    asked = Asked(front, prompt="import", n=2, use_beam_search=True, max_tokens=40, ignore_eos=True)
    until(lambda: seen(front)["requests"])
    shown = seen(front)
    [request] = shown["requests"]
    [placement] = shown["placements"]
    assert placement["samples"] == []
    assert placement["request"] == request["name"]
    assert request["samples"] == [{"replica": placement["replica"], "tokens": 0, "end": None}]
    slow_all(servers, 0.0)
    assert asked.result().status == 200
    until(lambda: seen(front)["requests"] == [])  # its end is reported by itself


@pytest.mark.slow
def test_many_requests_are_not_all_shown(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "MAX_SHOWN", 3)
    for _ in range(5):
        front.post("/v1/completions", prompt="a", max_tokens=1)
    placements = seen(front)["placements"]
    assert len(placements) == 3
    times = [one["time"] for one in placements]
    assert times == sorted(times, reverse=True)


class TestStream:
    def test_only_what_is_new_is_sent(self, front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(inspector, "INTERVAL", 0.01)
        monkeypatch.setattr(inspector, "HEARTBEAT", 0.1)
        with urlopen(f"{front.url}/inspector/events", timeout=20) as stream:
            lines = iter(stream)
            while not next(lines).startswith(b":"):
                pass
            front.post("/v1/completions", prompt="a", max_tokens=1)
            while b'"placements":[{' not in (line := next(lines)):
                pass
            assert json.loads(line.removeprefix(b"data: "))["placements"][0]["reason"] == "new"

    def test_there_is_room_for_some(self, front: Front) -> None:
        with ExitStack() as stack:
            for _ in range(MAX_WATCHERS):
                stack.enter_context(urlopen(f"{front.url}/inspector/events", timeout=20)).readline()
            with pytest.raises(HTTPError) as refused:
                urlopen(f"{front.url}/inspector/events", timeout=20)
            assert refused.value.code == 503
            refused.value.close()
        until(lambda: not front.gateway.watch._leaving)  # who has gone is forgotten
        assert seen(front)["replicas"]

    def test_the_end_does_not_wait_for_watchers(self, front: Front) -> None:
        with urlopen(f"{front.url}/inspector/events", timeout=20) as stream:
            stream.readline()
            front.server.should_exit = True
            assert stream.read().endswith(b"\n")  # whole, and ended as it should


@pytest.mark.slow
def test_the_page_talks_to_its_own_server_alone(front: Front) -> None:
    answer = front.get("/inspector")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    # Each script and style of the page, and nothing else.
    assert policy.count("'sha256-") == answer.body.count(b"<script") + answer.body.count(b"<style")
    assert b"http://" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"")
    assert b"https://" not in answer.body
    assert "/inspector" not in front.get("/openapi.json").json()["paths"]


def test_it_needs_a_key(servers: list[Serving]) -> None:
    with fronting(servers[0].url, api_key=("key",)) as front:
        for path in ("/inspector", "/inspector/events"):
            answer = front.get(path)
            assert answer.status == 401
            assert answer.headers["www-authenticate"].startswith("Basic")
        with urlopen(Request(f"{front.url}/inspector", headers={"Authorization": "Bearer key"})) as answer:
            assert answer.status == 200
