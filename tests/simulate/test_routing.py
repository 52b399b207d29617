"""Routing in simulated fleets: the score gains where prompts share blocks, and loses nothing where they share none.

Each is compared with the same load in turns: without gateways, requests go to the replicas one after another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.simulate.device import ServerFit, StepFit
from quire.simulate.fleet import FleetSimulation
from quire.simulate.outcome import Outcome
from quire.simulate.spec import make_spec
from tests.marks import of_long_runs, quick
from tests.simulate.test_fleet import device

pytestmark = pytest.mark.slow

SHORT: dict[str, Any] = {"prompt_tokens": {"median": 60, "spread": 0.4, "most": 200}}
ANSWER: dict[str, Any] = {"new_tokens": {"median": 70, "spread": 0.4, "most": 120}}
# The blocks of each of four caches, half of those in use, and the rate of 80 % of what is sustained in turns.
LOADS: dict[str, tuple[dict[str, Any], int, float]] = {
    "sessions": (
        {"turns": 8, "think": 8.0, "prompt_tokens": {"median": 90, "spread": 0.2, "most": 120},
         "new_tokens": {"median": 20, "spread": 0.4, "most": 30}}, 1_500, 2.2,
    ),
    "shared prefixes": ({"prefixes": 40, "prefix_tokens": 640, **SHORT, **ANSWER}, 800, 14.0),
    "nothing shared": (SHORT | ANSWER, 1_280, 25.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Device files, of which `fast` is four times and `slow` a third as fast as `usual`."""
    path = tmp_path_factory.mktemp("devices")
    for name, factor in (("fast", 0.25), ("usual", 1.0), ("slower", 3.0)):
        step = StepFit(step=0.010 * factor, sequence=6e-4 * factor, token=4e-4 * factor, drawn=0.0, weight_byte=0.0,
                       cache_byte=0.0, linear_flop=0.0, attention_flop=0.0, context_flop=0.0)  # fmt: skip
        device(path, step=step, per_neighbour=0.0, server=ServerFit())
        (path / "slow.json").rename(path / f"{name}.json")
    return path


def kind(name: str, count: int, blocks: int) -> dict[str, Any]:
    options = {"max_num_seqs": 32, "max_num_batched_tokens": 512}
    return {"kind": name, "device": f"{name}.json", "count": count, "blocks": blocks, "options": options}


def run(
    directory: Path, name: str, share: float = 1.0, *, in_turns: bool = False, seed: int = 1,
    replicas: list[dict[str, Any]] | None = None,
) -> Outcome:  # fmt: skip
    """Run half a minute of a share of a load."""
    load, blocks, rate = LOADS[name]
    spec = {
        "replicas": replicas or [kind("usual", 4, blocks)],
        "load": load | {"rate": share * rate, "duration": 30.0},
        "gateways": {"count": int(not in_turns), "seconds": 0.0},
        "seed": seed,
    }
    return FleetSimulation(make_spec(spec, directory)).run()


@pytest.mark.parametrize("name", ["sessions", of_long_runs("shared prefixes")])
def test_caches_of_half_the_working_set_hit_as_one_that_never_evicts(directory: Path, name: str) -> None:
    """With half the time to the first token of requests in turns, or less."""
    routed, plain = run(directory, name), run(directory, name, in_turns=True)
    infinite = run(directory, name, replicas=[kind("fast", 1, 100_000)])
    assert routed.hit_rate >= 0.95 * infinite.hit_rate > 0.7
    assert routed.ttft.mean <= 0.5 * plain.ttft.mean
    assert len(routed.routed) == 4
    assert min(routed.routed.values()) > 0.15 * routed.counts["requests"]


@pytest.mark.parametrize("seed", quick(range(1, 7), 0, 1))
def test_where_nothing_is_shared_nothing_is_lost(directory: Path, seed: int) -> None:
    """To send requests in turns spreads them best in time; the score does as well."""
    routed, plain = (run(directory, "nothing shared", in_turns=turns, seed=seed) for turns in (False, True))
    assert routed.ttft.mean <= 1.05 * plain.ttft.mean
    assert routed.e2e.mean <= plain.e2e.mean


@pytest.mark.parametrize("name", [of_long_runs("sessions"), of_long_runs("shared prefixes"), "nothing shared"])
def test_little_load_loses_nothing(directory: Path, name: str) -> None:
    routed, plain = (run(directory, name, 0.375, in_turns=turns) for turns in (False, True))
    assert routed.ttft.mean <= 1.05 * plain.ttft.mean


def test_a_slow_replica_gets_less_of_a_load(directory: Path) -> None:
    replicas = [kind("usual", 3, 1_280), kind("slower", 1, 1_280)]
    routed = run(directory, "nothing shared", 0.75, replicas=replicas).routed
    assert routed["slower-0"] < 0.6 * min(routed[f"usual-{i}"] for i in range(3))
