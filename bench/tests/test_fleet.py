"""quire bench fleet: traces, figures, and every measurement once with tiny numbers."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import QuireError
from quire_bench.fleet import leaving, overhead, routing
from quire_bench.fleet.running import fleet, pieces
from quire_bench.fleet.traces import BLOCK, TURNS, Trace
from quire_bench.server.prompts import Prompt
from tests.forks import Spawner

OPTIONS = ("--num-blocks", "256", "--max-num-seqs", "8")


# ------------------------------------------------------------------------------------------------------- the traces


def test_the_hit_rate_and_working_set_of_a_trace() -> None:
    """By hand: blocks a and b are read twice; of a prompt of whole blocks the last one is computed again."""
    a, b, c = ([token] * BLOCK for token in (5, 6, 7))
    trace = Trace("by hand", (Prompt(a + b + [1], 1), Prompt(a + c, 1), Prompt(a + b, 1), Prompt(b + a, 1)))
    assert trace.working_set == 2
    assert trace.hit_rate() == (0 + 1 + 1 + 0) * BLOCK / (8 * BLOCK + 1)
    assert trace.hit_rate(1) == trace.hit_rate()  # of a prompt's blocks the first one is evicted last
    assert trace.hit_rate(0) == 0


# ------------------------------------------------------------------------------------------------------- the figures


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nothing", "'nothing' cannot be measured; choose from gateway, kills, routing, leaving"),
        ("gateway --streams 1,x", "streams is '1,x'; it must be numbers"),
        ("gateway --streams 0", "streams is '0'"),
        ("gateway --requests 0", "requests is 0"),
        ("gateway --output-len 0", "output_len is 0"),
        ("kills --kills 0", "kills is 0"),
        ("kills --prompt-len 0", "prompt_len is 0"),
        ("routing --jobs 13", "jobs is 13; it must be at least 14"),
        ("routing --trace-len 100", "trace_len is 100; it must be"),
        ("routing --traces sessions,x", "there is no trace 'x'; choose from sessions, documents, unshared"),
        ("leaving --runs 0", "runs is 0"),
    ],
)
def test_bad_options(arguments: str, said: str) -> None:
    result = CliRunner().invoke(app, ["bench", "fleet", *arguments.split()])
    assert result.exit_code == 1
    assert said in result.stderr


# ------------------------------------------------------------------------------------------------ each measurement


@pytest.fixture
def _forked(forks: Spawner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start in a fraction of the time. tests/fleet/test_fleet_command.py starts them as everywhere."""
    monkeypatch.setattr("quire_bench.fleet.running.running", forks.running)
    monkeypatch.setattr("quire_bench.server.process.running", forks.running)


@pytest.mark.slow
@pytest.mark.usefixtures("_forked")
def test_a_fleet_is_read_killed_and_restarted() -> None:
    with fleet(2, *OPTIONS) as found:
        [first, second] = found.replicas
        assert first.num_requests == second.num_requests == 0
        with pytest.raises(QuireError, match="has no quire:nonsense"):
            first.metric("nonsense")
        assert "".join(pieces(found.url, {"prompt": "import os\n", "max_tokens": 4, "temperature": 0}))
        assert first.metric("prefix_cache_queries_total") + second.metric("prefix_cache_queries_total") > 0
        url, pid = first.url, first.pid
        first.kill()
        found.seen(first, "is lost")
        found.restart(first)
        assert first.url == url
        assert first.pid != pid
        with pytest.raises(QuireError, match="HTTP Error 400"):
            list(pieces(found.url, {"prompt": "x", "max_tokens": -1}))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_forked")
def test_what_a_gateway_costs() -> None:
    ticks: list[int] = []
    shown = overhead.measure(OPTIONS, [1, 3], 12, 5, 2, lambda: ticks.append(1))
    assert len(ticks) == 2 + 2 * 2
    assert [one["streams"] for one in shown["streams"]] == [1, 3]
    for one in shown["streams"]:
        assert len(one["direct_runs"]) == len(one["gateway_runs"]) == len(one["cpu_runs"]) == 2
        assert min(*one["direct_runs"], *one["gateway_runs"]) > 0
    assert shown["first_token"]["gateway_p50_ms"] > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_forked")
def test_a_replica_that_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "BEFORE", 0.2)
    monkeypatch.setattr(leaving, "AFTER", 0.2)
    found = leaving.measure(OPTIONS, 3, 1)
    assert [one["what"] for one in found] == ["hung", "killed", "drained"]
    for one in found:
        assert one["errors"] == []
        assert one["answers"] > 0
        assert one["seconds"] > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_forked")
def test_traces_that_are_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "LOADS", (0.8,))
    monkeypatch.setattr(routing, "WARM_UP", 4)
    ticks: list[int] = []
    found = routing.measure((), ["documents", "unshared"], 2 * TURNS, advance=lambda: ticks.append(1))
    assert len(ticks) == 2 * routing.RUNS - 2 * 2  # as there is one load, not two
    assert [(one["trace"], one["way"]) for one in found] == [
        (trace, way) for trace in ("shared prefixes", "nothing shared") for way in ("round robin", "gateway")
    ]
    for one in found:
        assert (one["hit_rate"] > 0) == (one["trace"] != "nothing shared")
        assert one["hit_rate"] <= one["infinite_hit_rate"] >= one["pooled_hit_rate"]
        assert one["p99_first_token"] >= one["mean_first_token"] > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_forked")
def test_the_command() -> None:
    tiny = "gateway --streams 2 --requests 2 --output-len 4 --runs 1".split()
    result = CliRunner().invoke(app, ["bench", "fleet", *tiny])
    assert result.exit_code == 0, result.output
    assert [line[:16].strip() for line in result.stdout.splitlines()] == [
        "load average",
        "first token, p50",
        "first token, p99",
        "2 streams",
    ]
    result = CliRunner().invoke(app, ["bench", "fleet", *tiny, "--json"])
    assert set(json.loads(result.stdout)) == {"load_average", "gateway"}
