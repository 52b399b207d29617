"""The parts of a cell alone: the order of events, who is next, and whether a client asks again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.errors import NoReplica
from quire.simulate.clients import wait_before_retry
from quire.simulate.routing import in_turns
from quire.simulate.spec import ClientSpec
from quire.simulate.timeline import Timeline


def test_steps_end_before_other_events_of_the_same_time() -> None:
    timeline, ran = Timeline("seed", 0.0), list[tuple[float, str]]()

    def run(name: str) -> None:
        ran.append((timeline.now, name))
        if name == "first":
            timeline.later(1.0, run, "later")

    timeline.push(2.0, run, "other")
    timeline.push(2.0, run, "another")
    timeline.push(2.0, run, "step of 7", step_of=7)
    timeline.push(2.0, run, "step of 3", step_of=3)
    timeline.push(0.5, run, "first")
    timeline.run()
    assert ran == [
        (0.5, "first"),
        (1.5, "later"),
        (2.0, "step of 3"),
        (2.0, "step of 7"),
        (2.0, "other"),
        (2.0, "another"),
    ]


def test_what_is_noted_makes_the_hash() -> None:
    hashes = []
    for words in ((), ("route", 1), ("route", 2)):
        timeline = Timeline("seed", 0.0)
        if words:
            timeline.note(*words)
        hashes.append(timeline.run())
    assert len(set(hashes)) == 3


def test_jitter_is_of_the_seed() -> None:
    one, same, other = (Timeline(seed, 0.5) for seed in ("a", "a", "b"))
    delays = [[timeline.delay(1.0) for _ in range(3)] for timeline in (one, same, other)]
    assert delays[0] == delays[1] != delays[2]
    assert min(delays[0]) > 1.0
    assert Timeline("a", 0.0).delay(1.0) == 1.0


def test_a_client_doubles_its_wait_and_gives_up() -> None:
    spec = ClientSpec(retries=3, backoff=0.5)
    assert [wait_before_retry(spec, attempt) for attempt in range(4)] == [0.5, 1.0, 2.0, None]


def test_without_a_gateway_replicas_take_turns() -> None:
    replicas: list[Any] = [SimpleNamespace(number=i, is_there=i != 1) for i in range(4)]
    assert [in_turns(cast(Any, replicas), (), turn) for turn in range(4)] == [0, 2, 3, 0]
    assert in_turns(cast(Any, replicas), (0, 2), 9) == 3
    with pytest.raises(NoReplica):
        in_turns(cast(Any, replicas), (0, 2, 3), 0)
