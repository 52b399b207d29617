"""Simulated replicas read blocks from one another, and leaps change nothing of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache.incoming import ReadCounts
from quire.engine.trace import TraceRow, write_trace
from quire.simulate.device import ServerFit
from quire.simulate.fleet import FleetSimulation
from quire.simulate.outcome import Outcome
from quire.simulate.replica import SimulatedReplica
from quire.simulate.spec import FleetSpec

from .test_fleet import EVENTS, device, spec

FAST, SLOW = 1e-8, 3e-7  # seconds a byte: of a block of 20 KiB 0.2 and 6 ms, next to 2 to compute it


def talks(path: Path, peer_byte: float, blocks: int = 200, host_request: float = 0.0, **known: Any) -> FleetSpec:
    """Conversations at three replicas, which read that fast."""
    path.mkdir(exist_ok=True)
    device(path, server=ServerFit(step=1e-3, request=2e-3, peer_byte=peer_byte, host_request=host_request))
    replicas = [{"kind": "a", "device": "slow.json", "count": 3, "per_host": 2, "blocks": blocks,
                 "options": {"max_num_seqs": 16}}]  # fmt: skip
    load = {"turns": 4, "think": 0.5, "rate": 4, "duration": 12, "prompt_tokens": 100, "new_tokens": 30}
    load |= known.pop("load", {})
    return spec(path, replicas=replicas, load=load, **known)


def run(fleet: FleetSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, ReadCounts]:
    """A run, and what all replicas have read."""
    made: list[SimulatedReplica] = []
    real = FleetSimulation._replica

    def kept(*arguments: Any) -> SimulatedReplica:
        made.append(real(*arguments))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(FleetSimulation, "_replica", kept)
        found = FleetSimulation(fleet).run()
    every, misses = [one.peers.counts for one in made if one.peers is not None], Counter[str]()
    for one in every:
        misses.update(one.misses)
    return found, ReadCounts(sum(one.blocks for one in every), hits=sum(one.hits for one in every), misses=misses)


def documents(path: Path, peer_byte: float, count: int, **known: Any) -> FleetSpec:
    """A request about each document, and two seconds later three at once."""
    fleet = talks(path, peer_byte, load={"arrivals": "trace", "trace": "trace.csv"}, **known)
    numbered = [(5.0 * number + after, f"document {number}") for number in range(count) for after in [0, 2, 2, 2]]
    write_trace(path / "trace.csv", [TraceRow(at, 480, 1, name, 460) for at, name in numbered])
    return fleet


def test_what_another_replica_has_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, nothing = run(documents(tmp_path / "alone", 0.0, 5), monkeypatch)
    read, counts = run(documents(tmp_path / "read", FAST, 5), monkeypatch)
    assert nothing.blocks == 0
    assert counts.hits == counts.blocks / (460 // 16) == 10  # two of the three replicas read each document once
    assert read.counts["cached_tokens"] == 5 * 3 * (460 // 16) * 16
    assert read.ttft.mean < 0.9 * alone.ttft.mean


@pytest.mark.slow
def test_what_takes_longer_than_computing_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gigabyte a second is assumed until some were read; from then on nothing is asked for but now and then."""
    load = {"prompt_tokens": 200, "think": 0.2, "rate": 3}
    found, counts = run(talks(tmp_path, SLOW, 300, load=load), monkeypatch)
    fast, more = run(talks(tmp_path, FAST, 300, load=load), monkeypatch)
    assert 0 < counts.blocks < more.blocks
    assert counts.misses["late"] > 0
    assert not more.misses
    assert found.counts["finished"] == found.counts["requests"] == fast.counts["requests"]


def test_a_replica_that_is_gone_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = documents(tmp_path, SLOW / 3, 1, events=[{"at": 2.03, "kill": "a-0", "for": 3}])
    found, counts = run(fleet, monkeypatch)
    assert counts.misses == {"io": 2 * (460 // 16)}
    assert found.counts["finished"] == found.counts["requests"] == 4


@pytest.mark.slow
def test_a_block_that_was_evicted_meanwhile_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, counts = run(talks(tmp_path, SLOW / 5, blocks=100, load={"rate": 12, "duration": 8}), monkeypatch)
    assert counts.misses["absent"] > 0
    assert found.counts["finished"] == found.counts["requests"]


READER_DIES = {"events": [{"at": 2.03, "kill": "a-1", "for": 0.04}]}
CLIENTS_LEAVE = {"clients": {"timeout": 0.08, "retries": 1, "backoff": 0.1}}
HOLDER_HANGS = {"events": [{"at": 2.03, "hang": "a-0", "for": 0.2}]}
SCALES = {"autoscaling": {"least": 1, "most": 4, "every": 2, "start_seconds": 1}}


@pytest.mark.parametrize("known", [READER_DIES, CLIENTS_LEAVE, HOLDER_HANGS, SCALES], ids=lambda one: next(iter(one)))
def test_a_replica_or_a_client_goes_while_blocks_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: dict[str, Any]
) -> None:
    """Leaping and stepping, also where nothing else is to be computed meanwhile."""
    fleet = documents(tmp_path, SLOW / 2, 6, **known)
    leapt, counts = run(fleet, monkeypatch)
    stepped = FleetSimulation(fleet, leaps=False).run()
    assert leapt.as_dict() == stepped.as_dict()
    assert counts.blocks + sum(counts.misses.values()) + leapt.errors["timeout"] > 10
    assert leapt.counts["finished"] + leapt.counts["failed"] == leapt.counts["requests"] == 24


@pytest.mark.slow
def test_cells_that_scale_give_their_replicas_names_of_their_own(tmp_path: Path) -> None:
    scaling = {"least": 2, "most": 8, "every": 2, "start_seconds": 1}
    fleet = talks(tmp_path, FAST, autoscaling=scaling, load={"rate": 16, "duration": 8}, cell=4)
    names = [set(one.routed) for one in map(FleetSimulation(fleet).cell, range(2))]
    assert names[0].isdisjoint(names[1])
    assert sum(map(len, names)) > 3


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 3), st.booleans(), st.sampled_from([FAST, SLOW / 5, SLOW]),
       st.integers(100, 300), st.lists(st.sampled_from(EVENTS), max_size=4))  # fmt: skip
def test_leaps_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, gateways: int, shares: bool, peer_byte: float, blocks: int,
    events: list[Any],
) -> None:  # fmt: skip
    load = {"turns": 1, "prefixes": 6, "prefix_tokens": 200, "rate": 12} if shares else {}
    fleet = talks(tmp_path_factory.mktemp("fleet"), peer_byte, blocks, seed % 2 * 4e-3, seed=seed,
                  gateways={"count": gateways}, load=load, events=events, network={"jitter": 0.3})  # fmt: skip
    stepped, leapt = FleetSimulation(fleet, leaps=False).run().as_dict(), FleetSimulation(fleet).run().as_dict()
    assert stepped == leapt
