"""A fleet whose replicas read blocks of one another, and of their disks: end to end, over HTTP."""

from __future__ import annotations

import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.fleet.blocks import PATH
from quire.ops import native
from tests.fleet.gateways import at, drain, fronting, get_the_request, replicas, say_rates, slow, until, value
from tests.fleet.serving import SECRET, Front
from tests.forks import QUIRE, Process, Spawner
from tests.server.serving import Serving

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.unavailable() is not None, reason=f"{native.unavailable()}")]

PROMPT = [7 * i % 500 for i in range(400)]  # 25 blocks
BODY = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 1, "ignore_eos": True}


@pytest.fixture
def two() -> Iterator[list[Serving]]:
    with replicas(2) as found:
        for server in found:  # so that a read that takes long on a machine with other work is waited for
            server.service.engine_client.engine.scheduler.prefetch.seconds_a_token = 1.0
        yield found


def answer(server: Serving, first: int = 0) -> Any:
    """To the prompt, which begins at its token of that index."""
    found = server.post("/v1/completions", **BODY | {"prompt": PROMPT[first:] + PROMPT[:first]})
    assert found.status == 200, found.body
    [choice] = found.json()["choices"]
    return choice


def who_knows(front: Front) -> str:
    """The URL of the replica that the latest request went to."""
    return front.gateway.fleet.placements[-1].replica


def test_blocks_of_a_replica_that_is_slow_are_read_by_another(two: list[Serving]) -> None:
    busy, other = two
    get_the_request(busy, other)
    with fronting(*[server.url for server in two]) as front:
        wanted = answer(front)
        assert who_knows(front) == busy.url
        say_rates(busy, 1e-9, seconds_a_step=1.0)
        for _ in range(30):  # until the gateway has heard of it
            assert answer(front) == wanted
            if value(other, "quire:kv_peer_hits_total"):
                break
        assert who_knows(front) == other.url
        choice = front.gateway.fleet.placements[-1].choice
        assert choice.best.candidate.holder is not None
        assert choice.best.candidate.holder.url == busy.url
        assert choice.best.parts.peer > 0.0
        assert choice.best.uncached_tokens == 1
        assert value(other, "quire:kv_peer_hit_tokens_total") == 400
        size = value(other, "quire:kv_peer_read_bytes_total")
        assert size > 0
        assert value(busy, "quire:kv_peer_sent_bytes_total") == size + 25 * 8  # and a head for each block
        assert value(front, "quire:fleet_cached_tokens_total") >= 400
        # From now on the other one has them itself.
        assert answer(front) == wanted
        assert value(other, "quire:kv_peer_hits_total") == 1
        until(busy.is_idle)
        until(other.is_idle)


def test_a_stream_of_a_replica_that_drains_goes_on_with_its_blocks(two: list[Serving]) -> None:
    body = BODY | {"max_tokens": 60}
    left, other = two
    get_the_request(left, other)
    with fronting(*[server.url for server in two]) as front:
        wanted = front.post("/v1/completions", **body).json()["choices"]
        assert who_knows(front) == left.url
        slow(left, 0.2)
        found: list[Any] = []
        asking = threading.Thread(target=lambda: found.append(front.post("/v1/completions", **body).json()["choices"]))
        asking.start()
        until(lambda: left.service.engine_client.engine.scheduler.running)
        drain(left)
        asking.join(60)
        assert found == [wanted]
        assert who_knows(front) == other.url
        assert value(front, "quire:fleet_resumed_total", reason="drained") == 1
        assert value(other, "quire:kv_peer_hits_total") == 1
        assert value(other, "quire:resume_mismatch_total") == 0


def test_a_holder_that_is_gone_costs_no_answer(two: list[Serving]) -> None:
    """The gateway believes in blocks that are no longer there: they are computed."""
    with fronting(*[server.url for server in two]) as front:
        wanted = answer(front)
        left = at(two, who_knows(front))
        [other] = [server for server in two if server is not left]
        left.on_engine(
            left.service.engine_client.engine.scheduler.manager.listeners.clear
        )  # it reports nothing any more
        left.on_engine(left.service.engine_client.engine.reset_prefix_cache)
        drain(left)
        assert answer(front) == wanted
        assert value(other, "quire:kv_peer_hits_total") == 0
        assert value(other, "quire:kv_peer_misses_total", reason="absent") == 25


def test_blocks_want_the_fleets_secret(two: list[Serving]) -> None:
    headers = {"Authorization": f"Bearer {SECRET}"}
    assert two[0].ask("POST", PATH, {"blocks": []}).status == 401
    assert two[0].ask("POST", PATH, {"blocks": []}, {"Authorization": "Bearer other"}).status == 401
    assert two[0].ask("POST", PATH, {"blocks": []}, headers).status == 409  # of no class
    fingerprint = two[1].ask("GET", "/fleet/model", None, headers).json()["hello"]["fingerprint"]["digest"]
    found = two[0].ask("POST", PATH, {"blocks": [], "fingerprint": fingerprint}, headers)
    assert (found.status, found.body) == (200, b"")


# ------------------------------------------------------------------------------------------------ disks and restarts


# A read is waited for, however long it takes on a machine with other work.
PATIENT = """
from quire.engine.prefetch import Prefetch
Prefetch.seconds_a_token = property(lambda prefetch: 1.0, lambda prefetch, seconds: None)
"""


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_replica_that_was_restarted_knows_its_prompts(end: str, forks: Spawner, tmp_path: Path) -> None:
    """A process of its own, behind a gateway that stays."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = ("serve", "--port", str(port), "--num-blocks", "128", "--fleet-secret", SECRET)
    serve += ("--kv-disk", str(tmp_path / "kv"), "--kv-disk-space", "16MiB", "--shutdown-timeout", "1")
    with forks.running(*serve, program=PATIENT + QUIRE) as before, fronting(before.url) as front:
        wanted = [answer(front, i) for i in range(4)]
        if end == "stopped":  # what is to be written is written then
            before.send(signal.SIGTERM)
        else:
            until(lambda: counter(before, "kv_disk_blocks") == 100)
            before.kill()
        before.wait()
        with forks.running(*serve, program=PATIENT + QUIRE) as again:
            [link] = front.gateway.fleet.roster.links.values()
            until(lambda: link.is_up and front.gateway.fleet.roster.disk.num_held(link.slot) == 100)
            assert [answer(front, i) for i in range(4)] == wanted
            choices = [one.choice.best for one in front.gateway.fleet.placements]
            assert [one.candidate.num_disk_blocks for one in choices[-4:]] == [25] * 4
            assert counter(again, "kv_disk_hits_total") == 4
            assert counter(again, "kv_disk_hit_tokens_total") == 1600


def counter(server: Process, name: str) -> float:
    """A sample without labels of its own."""
    for line in urllib.request.urlopen(f"{server.url}/metrics", timeout=60).read().decode().splitlines():
        if line.startswith(f"quire:{name}{{"):
            return float(line.rsplit(" ", 1)[1])
    return 0.0
