"""quire bench fleet: traces, figures, and every measurement once with tiny numbers."""

from __future__ import annotations

import json
import os
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import ConfigError, QuireError
from quire_bench.fleet import kills, leaving, overhead, routing
from quire_bench.fleet.kills import Kill, Kills
from quire_bench.fleet.overhead import Overhead, Streams
from quire_bench.fleet.running import fetch, fleet, pieces, waited_for
from quire_bench.fleet.traces import ANSWER, BLOCK, TURNS, Trace, sessions, shared_prefixes
from quire_bench.proc import cpu_seconds
from quire_bench.server.prompts import Prompt
from tests.forks import Spawner

OPTIONS = ("--num-blocks", "256", "--max-num-seqs", "8")


# ------------------------------------------------------------------------------------------------------- the traces


@pytest.mark.parametrize("longest", [1024, 4096])
@pytest.mark.parametrize("name", routing.TRACES)
def test_traces_are_the_same_every_time_and_fit(name: str, longest: int) -> None:
    make = routing.TRACES[name]
    trace = make(60, 3, longest)
    assert trace == make(60, 3, longest)
    assert trace != make(60, 4, longest)
    assert len(trace.prompts) == 60
    lengths = [len(one.content) + ANSWER for one in trace.prompts]
    assert longest / 10 < max(lengths) <= longest
    if name == "unshared":
        assert trace.working_set == trace.hit_rate() == 0
    else:
        assert max(lengths) > longest / 2
        assert 0.4 < trace.hit_rate() < 0.95


def test_a_conversation_goes_on() -> None:
    """All prompts of one are beginnings of its last one, and their answers stand between them."""
    trace = sessions(TURNS, 0)
    for before, after in pairwise(trace.prompts):
        assert after.content[: len(before.content)] == before.content
        assert len(after.content) >= len(before.content) + ANSWER + 30
    assert len({tuple(one.content[:BLOCK]) for one in sessions(3 * TURNS, 0).prompts}) == 3


def test_documents_are_asked_about_again() -> None:
    trace = shared_prefixes(80, 0)
    first = {tuple(one.content[: 48 * BLOCK]) for one in trace.prompts}
    assert 1 < len(first) <= 10
    assert len({tuple(one.content) for one in trace.prompts}) == 80


def test_the_hit_rate_and_working_set_of_a_trace() -> None:
    """By hand: blocks a and b are read twice; of a prompt of whole blocks the last one is computed again."""
    a, b, c = ([token] * BLOCK for token in (5, 6, 7))
    trace = Trace("by hand", (Prompt(a + b + [1], 1), Prompt(a + c, 1), Prompt(a + b, 1), Prompt(b + a, 1)))
    assert trace.working_set == 2
    assert trace.hit_rate() == (0 + 1 + 1 + 0) * BLOCK / (8 * BLOCK + 1)
    assert trace.hit_rate(1) == trace.hit_rate()  # of a prompt's blocks the first one is evicted last
    assert trace.hit_rate(0) == 0


# ------------------------------------------------------------------------------------------------------- the figures


def test_figures_of_a_gateway() -> None:
    streams = Streams(8, (100.0, 200.0, 300.0), (90.0, 190.0, 400.0), (30e-6, 20e-6, 40e-6))
    shown = Overhead((streams,), (0.001, 0.003), (0.002, 0.006)).as_dict()
    assert shown["streams"][0]["share"] == pytest.approx(0.95)  # of 0.9, 0.95 and 1.33
    assert shown["streams"][0]["cpu_microseconds_per_token"] == pytest.approx(30.0)
    assert shown["first_token"]["added_p50_ms"] == pytest.approx(2.0)


def test_figures_of_kills() -> None:
    shown = Kills(10, (Kill(9, 0.1, is_same=True), Kill(20, 0.3, is_same=False))).as_dict()
    assert (shown["kills"], shown["different"]) == (2, 1)
    assert shown["stall_ms"] == {"mean": 200.0, "p50": 200.0, "p90": 280.0, "p99": 298.0, "max": 300.0}


# ------------------------------------------------------------------------------------------------- what is refused


def test_cpu_time_of_a_process() -> None:
    assert cpu_seconds(os.getpid()) == pytest.approx(sum(os.times()[:2]), abs=0.1)
    with pytest.raises(ConfigError, match="there is no /proc/0/stat"):
        cpu_seconds(0)


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


def test_what_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_bench.fleet.running.PATIENCE", 0.05)
    with pytest.raises(QuireError, match=r"it is not there within 0\.05 s"):
        waited_for(lambda: None, "it is not there")
    with pytest.raises(QuireError, match=":9 does not answer"):
        fetch("http://127.0.0.1:9")
    with pytest.raises(QuireError, match=":9 does not answer"):
        list(pieces("http://127.0.0.1:9", {}))


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


@pytest.mark.slow
@pytest.mark.usefixtures("_forked")
def test_what_a_gateway_costs() -> None:
    ticks: list[int] = []
    shown = overhead.measure(OPTIONS, [1, 3], 12, 5, 2, lambda: ticks.append(1)).as_dict()
    assert len(ticks) == 2 + 2 * 2
    assert [one["streams"] for one in shown["streams"]] == [1, 3]
    for one in shown["streams"]:
        assert len(one["direct_runs"]) == len(one["gateway_runs"]) == len(one["cpu_runs"]) == 2
        assert min(*one["direct_runs"], *one["gateway_runs"]) > 0
    assert shown["first_token"]["gateway_p50_ms"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("_forked")
def test_a_kill_is_noticed_by_its_stall_alone() -> None:
    found = kills.measure(OPTIONS, 1, 24)
    assert [one.is_same for one in found.kills] == [True]
    assert found.kills[0].stall > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_forked")
def test_a_replica_that_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "BEFORE", 0.2)
    monkeypatch.setattr(leaving, "AFTER", 0.2)
    found = leaving.measure(OPTIONS, 3, 1)
    assert [one.what for one in found] == ["hung", "killed", "drained"]
    for one in found:
        assert one.errors == ()
        assert one.answers > 0
        assert one.seconds > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_forked")
def test_traces_that_are_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "LOADS", (0.8,))
    monkeypatch.setattr(routing, "WARM_UP", 4)
    ticks: list[int] = []
    found = routing.measure((), ["documents", "unshared"], 2 * TURNS, advance=lambda: ticks.append(1))
    assert len(ticks) == 2 * routing.RUNS - 2 * 2  # as there is one load, not two
    assert [(one.trace, one.way) for one in found] == [
        (trace, way) for trace in ("shared prefixes", "nothing shared") for way in ("round robin", "gateway")
    ]
    for one in found:
        assert (one.hit_rate > 0) == (one.trace != "nothing shared")
        assert one.hit_rate <= one.infinite_hit_rate >= one.pooled_hit_rate
        assert one.p99_first_token >= one.mean_first_token > 0


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
