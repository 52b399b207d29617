"""What a gateway and its replicas count: routing, hits, what was resumed and why, and the numbers of each replica."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.link import Listener
from quire.fleet.membership import Members, member_at
from quire.fleet.metrics import GAUGES, MAX_COUNTED, STATE_GAUGES, FleetMetrics
from quire.fleet.placement import NEW
from quire.fleet.roster import Roster
from quire.fleet.state import ReplicaState
from quire.fleet.view import ReplicaView, Status
from tests.fleet.gateways import at, drain, fronting, lose, samples, slow_all, until, value
from tests.fleet.serving import Front
from tests.server.serving import Serving

STATE = ReplicaState(
    waiting_tokens=7, num_waiting=2, num_running=3, max_running=8, free_blocks=90, cached_blocks=40, num_blocks=100,
    block_size=16, seconds_a_step=0.01, seconds_a_prompt_token=0.001, seconds_a_sequence=0.0005, draining=False,
)  # fmt: skip


def view(url: str, status: Status, state: ReplicaState | None = STATE) -> ReplicaView:
    return ReplicaView(
        url=url, status=status, failure=None, fingerprint="f", different=(), state=state, held_blocks=5, num_samples=1
    )


def test_addresses_that_change_leave_a_bounded_number_of_series() -> None:
    metrics = FleetMetrics()
    urls = [f"http://10.0.{i // 250}.{i % 250}:8000" for i in range(2 * MAX_COUNTED)]
    for url in urls:
        metrics.count("lost", "http://stays:8000")
        metrics.count("lost", url)
        metrics.count("left_out", url)
    counted: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(metrics.render("")[0].decode()):
        for sample in family.samples:
            if sample.name.endswith("_total") and "replica" in sample.labels:
                counted.setdefault(sample.name, {})[sample.labels["replica"]] = sample.value
    kept = dict.fromkeys(urls[1 - MAX_COUNTED :], 1.0)
    assert counted == {
        "quire:fleet_lost_total": kept | {"http://stays:8000": 2.0 * MAX_COUNTED},
        "quire:fleet_left_out_total": kept,
    }


def test_a_replica_that_has_left_is_forgotten() -> None:
    class Moving:
        """A member that has another address each time."""

        async def changes(self) -> AsyncIterator[Members]:
            for port in range(1, 20):
                yield frozenset([member_at(f"http://127.0.0.1:{port}")])
                [link] = roster.links.values()
                roster.connected(link)
                assert roster.is_fitting(link)

    async def main() -> None:
        await roster.follow(cast(Listener, None))
        await roster.stop()

    roster = Roster(Moving(), Fingerprint({"a": "b"}), "s", "i")
    asyncio.run(main())
    assert roster._fitting == {"http://127.0.0.1:19"} == roster.links.keys()


class Asked:
    """A request under way, on a thread of its own."""

    def __init__(self, front: Front, **body: Any) -> None:
        self.answer: Any = None
        self._thread = threading.Thread(target=self._ask, args=(front, body))
        self._thread.start()

    def _ask(self, front: Front, body: dict[str, Any]) -> None:
        self.answer = front.post("/v1/completions", **body)

    def result(self) -> Any:
        self._thread.join(60)
        return self.answer


def serving_one(front: Front, num_tokens: int = 3) -> str:
    """The URL of the replica that computes the only open request, once it has brought some tokens."""

    def found() -> list[str]:
        works = front.gateway.fleet.jobs.works
        return [
            assignment.link.url
            for work in works
            for assignment in work.assigned.values()
            if len(work.ledgers[0].tokens) >= num_tokens
        ]

    until(lambda: front.on_loop(found))
    return front.on_loop(found)[0]


def test_numbers_of_each_replica() -> None:
    metrics = FleetMetrics()
    gone = view("http://c", Status.LOST, state=None)
    metrics.show(lambda: [view("http://a", Status.UP), view("http://b", Status.DRAINING), gone])
    families = {family.name: family for family in metrics.collect()}
    shown = {
        name.removeprefix("quire:fleet_replica_"): {
            sample.labels["replica"][-1]: sample.value for sample in family.samples
        }
        for name, family in families.items()
    }
    assert shown["up"] == {"a": 1, "b": 1, "c": 0}
    assert shown["draining"] == {"a": 0, "b": 1, "c": 0}
    assert shown["held_blocks"] == {"a": 5, "b": 5, "c": 5}
    assert shown["waiting_tokens"] == {"a": 7, "b": 7}  # what is not known is not shown
    assert shown["seconds_a_prompt_token"] == {"a": 0.001, "b": 0.001}
    assert shown.keys() == GAUGES.keys() | STATE_GAUGES.keys()
    assert all(families[f"quire:fleet_replica_{name}"].documentation.endswith(".") for name in shown)


def test_left_out_is_not_up() -> None:
    metrics = FleetMetrics()
    metrics.show(lambda: [view("http://a", Status.LEFT_OUT)])
    [up] = [family for family in metrics.collect() if family.name == "quire:fleet_replica_up"]
    assert [sample.value for sample in up.samples] == [0]


def test_both_forms_can_be_read() -> None:
    metrics = FleetMetrics()
    metrics.show(lambda: [view("http://a", Status.UP)])
    metrics.count("resumed", "lost")
    text, kind = metrics.render("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    families = list(openmetrics_parser.text_string_to_metric_families(text.decode()))
    names = {family.name for family in families} | {one.name for family in families for one in family.samples}
    assert {"quire:fleet_resumed", "quire:fleet_resumed_total", "quire:fleet_replica_up"} <= names
    assert {"quire:fleet_stall_seconds", "quire:fleet_stall_seconds_bucket"} <= names
    assert metrics.render("text/plain")[1].startswith("text/plain")


class TestServing:
    @pytest.mark.slow
    def test_hits(self, servers: list[Serving]) -> None:
        """The same prompt twice: the second time its blocks are expected to be there, and they are."""
        body = {"prompt": list(range(5, 85)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        url = servers[0].url
        with fronting(url) as front:
            held = value(front, "quire:fleet_replica_held_blocks", replica=url)
            assert front.post("/v1/completions", **body).status == 200
            assert value(front, "quire:fleet_routed_total", replica=url) == 1
            assert value(front, "quire:fleet_routed_cached_tokens_total") == 0
            until(lambda: value(front, "quire:fleet_replica_held_blocks", replica=url) == held + 5)
            assert front.post("/v1/completions", **body).status == 200
            assert value(front, "quire:fleet_routed_total", replica=url) == 2
            assert value(front, "quire:fleet_routed_cached_tokens_total") == 80
            assert value(front, "quire:fleet_cached_tokens_total") == 80
            assert value(front, "quire:fleet_prompt_tokens_total") == 160
            assert value(front, "quire:fleet_time_to_first_token_seconds_count") == 2
            assert value(front, "quire:fleet_stall_seconds_count") == 0

    @pytest.mark.slow
    def test_several_replicas(self, front: Front, servers: list[Serving]) -> None:
        assert front.post("/v1/completions", prompt="a", max_tokens=1).status == 200
        [url] = front.on_loop(lambda: [one.replica for one in front.gateway.fleet.placements])
        assert value(front, "quire:fleet_routed_total", replica=url) == value(front, "quire:fleet_routed_total") == 1
        for server in servers:
            assert value(front, "quire:fleet_replica_up", replica=server.url) == 1
            assert value(front, "quire:fleet_replica_blocks", replica=server.url) == 128
            assert value(server, "quire:fleet_sessions") == 1

    @pytest.mark.slow
    def test_a_loss(self, front: Front, servers: list[Serving]) -> None:
        before = [value(server, "quire:resumed_requests_total") for server in servers]
        slow_all(servers, 0.2)
        asked = Asked(front, prompt="import", max_tokens=40, temperature=0, ignore_eos=True)
        url = serving_one(front)
        lost, other = at(servers, url), next(one for one in servers if one.url != url)
        assert value(lost, "quire:fleet_calls") == 1
        lose(lost)
        slow_all(servers, 0.0)
        assert asked.result().status == 200
        assert value(front, "quire:fleet_lost_total", replica=url) == 1
        assert value(front, "quire:fleet_resumed_total", reason="lost") == 1
        assert value(front, "quire:fleet_stall_seconds_count") == 1
        assert value(front, "quire:fleet_time_to_first_token_seconds_count") == 1
        assert value(front, "quire:fleet_resume_mismatch_total") == 0
        first, second = front.on_loop(lambda: list(front.gateway.fleet.placements))
        assert first.cause is NEW
        assert second.cause == ("lost", url)
        assert second.replica == other.url
        assert second.num_delivered >= 3
        assert first.seconds > 0
        assert second.seconds > 0
        after = [value(server, "quire:resumed_requests_total") for server in servers]
        assert sum(after) == sum(before) + 1
        assert value(other, "quire:resume_mismatch_total") == 0
        assert all(value(server, "quire:fleet_calls") == 0 for server in servers)

    def test_a_refusal(self, front: Front, servers: list[Serving]) -> None:
        """What a replica refuses is counted by its status; what the gateway sees by itself never reaches one."""
        assert front.post("/v1/completions", prompt="a", regex="(").status == 400
        assert value(front, "quire:fleet_refused_total", status="400") == 1
        assert front.post("/v1/completions", prompt="a", max_tokens=-1).status == 400
        assert value(front, "quire:fleet_refused_total") == 1

    @pytest.mark.slow
    def test_no_replica(self, servers: list[Serving]) -> None:
        with fronting(servers[0].url, patience=0.0) as front:
            link = front.gateway.fleet.roster.links[servers[0].url]
            front.on_loop(link._drop)
            assert front.post("/v1/completions", prompt="a").status == 503
            assert value(front, "quire:fleet_refused_total", status="503") == 1
            assert value(front, "quire:fleet_replica_up") == 0
            assert value(front, "quire:fleet_replica_held_blocks") == 0
            assert ("quire:fleet_replica_free_blocks", frozenset({("replica", servers[0].url)})) not in samples(front)

    @pytest.mark.slow
    def test_a_drained_replica(self, front: Front, servers: list[Serving]) -> None:
        """The request moves; what it brings afterwards is no loss."""
        slow_all(servers, 0.2)
        asked = Asked(front, prompt="import", max_tokens=40, temperature=0, ignore_eos=True)
        url = serving_one(front)
        drain(at(servers, url))
        slow_all([server for server in servers if server.url != url], 0.0)
        until(lambda: value(front, "quire:fleet_resumed_total", reason="drained") == 1)
        assert value(front, "quire:fleet_replica_draining", replica=url) == 1
        answer = asked.result()
        assert answer.status == 200
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 40
        assert value(front, "quire:fleet_stall_seconds_count") == 1
        assert value(front, "quire:fleet_lost_total") == 0
