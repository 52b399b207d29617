"""quire bench validate: its traces, and real replicas next to simulated ones, with tiny numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.engine.cost import model_cost
from quire.errors import ConfigError
from quire.models import EMBEDDED, expected_weight_bytes, read_config
from quire.simulate.device import DeviceFile, ServerFit, StepFit, model_digest, write_device
from quire_bench.fleet import replaying, validate
from quire_bench.fleet.replaying import TRACES, Sizes, sessions, simulated, tokens_of
from quire_bench.fleet.speed import Probes, at_speed, expected
from quire_bench.fleet.validate import Compared, within_goals

MODEL = model_cost(*read_config(EMBEDDED), expected_weight_bytes(EMBEDDED))
STEP = StepFit(step=1e-3, sequence=1e-5, token=2e-5, drawn=0.0, weight_byte=1e-11, cache_byte=1e-11, linear_flop=0.0,
               attention_flop=0.0, context_flop=0.0)  # fmt: skip
DEVICE = DeviceFile(
    kind="any", model=model_digest(MODEL), model_name="embedded", block_size=16, bytes_per_second=1e10,
    host_bytes_per_second=2e10, per_neighbour=0.5, step=STEP, server=ServerFit(step=1e-3, gateway=2e-3),
    machine={"threads": 1},
)  # fmt: skip


@pytest.mark.parametrize("name", TRACES)
def test_traces_come_at_their_rate_and_are_the_same_every_time(name: str) -> None:
    rows = TRACES[name](20.0, 60.0, 3)
    assert rows == TRACES[name](20.0, 60.0, 3) != TRACES[name](20.0, 60.0, 4)
    assert 800 < len(rows) < 1600
    assert all(a.arrival <= b.arrival < 60.0 for a, b in pairwise(rows))


def test_a_conversation_goes_on() -> None:
    """Each of its prompts is the beginning of the next one; those of others have nothing in common with it."""
    rows = sessions(2.0, 60.0, 0)
    talks: dict[str, list[list[int]]] = {}
    for number, row in enumerate(rows):
        prompt = tokens_of(row, number, 0)
        assert len(prompt) == row.prompt_tokens
        talks.setdefault(row.prefix_id.partition("@")[0].rpartition("-")[0], []).append(prompt)
    long = [prompts for prompts in talks.values() if len(prompts) > 1]
    assert len(long) > 5
    for prompts in long:
        assert all(after[: len(before)] == before for before, after in pairwise(prompts))
    assert len({tuple(prompts[0][:16]) for prompts in talks.values()}) == len(talks)


def test_a_neighbour_is_simulated_to_take_time() -> None:
    rows = TRACES["poisson"](20.0, 5.0, 0)
    one, two = (simulated(count, count - 1, Sizes(), rows, DEVICE, "") for count in (1, 2))
    assert one.counts["finished"] == two.counts["finished"] == len(rows)
    assert two.itl.percentile(50) > 1.05 * one.itl.percentile(50)


def test_a_device_at_another_speed() -> None:
    """What reads faster, computes slower and has more to do for each sequence is so by what is asked of it."""
    step = replace(STEP, weight_byte=1e-9, linear_flop=1e-10, sequence=1e-3)
    device = replace(DEVICE, step=step, server=ServerFit(step=1e-4, request=1e-3, prompt_token=1e-6, drawn=1e-5))
    parts = {"weight_byte": 0.8, "token": 1.2, "linear_flop": 1.2, "attention_flop": 1.2, "step": 1.2,
             "sequence": 1.3, "cache_byte": 0.8}  # fmt: skip
    slower = replace(step, **{name: by * getattr(step, name) for name, by in parts.items()})
    other = replace(device, step=slower, server=replace(device.server, drawn=1.3e-5))
    took = expected(MODEL, other, 2)
    found = at_speed(device, MODEL, 2, took._replace(streams=1.1 * took.streams))
    for name in parts:
        assert getattr(found.step, name) == pytest.approx(getattr(slower, name), rel=1e-4)
    assert found.server.drawn == pytest.approx(other.server.drawn, rel=1e-4)
    assert expected(MODEL, found, 2).streams == pytest.approx(1.1 * took.streams)


def test_a_replica_alone_reads_as_its_stream_says() -> None:
    """Streams at all replicas are the same stream then, measured once more."""
    before = expected(MODEL, DEVICE, 1)
    found = at_speed(DEVICE, MODEL, 1, before._replace(streams=2 * before.streams))
    assert expected(MODEL, found, 1) == pytest.approx(before)


def test_a_stream_that_hardly_reads_does_not_show_how_fast_reading_is() -> None:
    device = replace(DEVICE, step=replace(STEP, weight_byte=1e-13))
    before = expected(MODEL, device, 1)
    found = at_speed(device, MODEL, 1, before._replace(stream=1.5 * before.stream, prompt=1.1 * before.prompt))
    assert found.step.weight_byte / device.step.weight_byte == found.step.token / device.step.token


def compared(load: float, throughput: float) -> Compared:
    measured, simulated = {"throughput": 100.0, "hit_rate": 0.0}, {"throughput": throughput, "hit_rate": 0.0}
    speeds = [Probes(0.9, 1.1, 1.0, 1.0)]
    return Compared(1, "poisson", load, 10, measured, simulated, {"throughput": 0.01}, speeds, 0.1)


def test_loads_within_their_goals_are_counted() -> None:
    found = [compared(0.3, 96.0), compared(0.6, 94.0), compared(0.8, 101.0), compared(0.95, 50.0)]
    met, count, median, largest = within_goals(found, "throughput")
    assert (met, count) == (2, 3)  # 95 % has no goal
    assert (median, largest) == (pytest.approx(0.04), pytest.approx(0.06))
    assert within_goals([], "throughput") == (0, 0, 0.0, 0.0)


def test_each_turn_of_a_load_has_tokens_of_its_own() -> None:
    """Else the second one would find the prompts of the first in the caches."""
    rows = sessions(2.0, 20.0, 0)
    once, again = ([tokens_of(row, i, 0, turn) for i, row in enumerate(rows)] for turn in (0, 1))
    assert [len(one) for one in once] == [len(one) for one in again]
    assert not {tuple(one[:16]) for one in once} & {tuple(one[:16]) for one in again}


def test_errors_are_relative() -> None:
    found = compared(0.3, 90.0)
    assert found.as_dict()["errors"] == {"throughput": pytest.approx(-0.1), "hit_rate": 0.0}


@pytest.mark.long
@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "WARM_UP", 2)
    monkeypatch.setattr(validate, "SATURATING", 2)
    monkeypatch.setattr(validate, "SIZES", Sizes(seats=16, blocks=256))
    write_device(tmp_path / "device.json", DEVICE)
    arguments = ["bench", "validate", "--device", str(tmp_path / "device.json"), "--traces", "sessions"]
    arguments += ["--loads", "40", "--seconds", "2", "--repeats", "2", "--json", "--out", str(tmp_path / "table.md")]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert [(one["replicas"], one["load"]) for one in found] == [
        (1, float("inf")),
        (1, 0.4),
        (2, float("inf")),
        (2, 0.4),
    ]
    for one in found:
        assert one["real"].keys() == one["simulated"].keys()
        assert one["spread"].keys() == one["real"].keys()
        assert len(one["speeds"]) == (4 if one["load"] < 1 else 2)
        assert all(share > 0 for speed in one["speeds"] for share in speed)
        assert one["real"]["throughput"] > 0 < one["simulated"]["throughput"]
    assert len((tmp_path / "table.md").read_text().splitlines()) == 2 + len(found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "none.json"], "there is no device file none.json"),
        (["--traces", "tides"], "there is no trace 'tides'; choose from poisson, clusters, sessions"),
        (["--loads", "much"], "loads is 'much'; it must be numbers with commas between"),
        (["--replicas", "0"], "replicas is 0"),
        (["--seconds", "0"], "seconds is 0"),
    ],
)
def test_what_is_wrong_is_told(arguments: list[str], message: str) -> None:
    shown = CliRunner().invoke(app, ["bench", "validate", *arguments])
    assert shown.exit_code == 1
    assert message in shown.stderr


def test_a_model_whose_sequences_are_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a server is started."""
    monkeypatch.setattr(validate, "PROMPT", 1024)
    with pytest.raises(ConfigError, match="has sequences of 1024 tokens; it must have more than 1024"):
        next(validate.validate(DEVICE, None, [1], ["poisson"], [0.3], 1.0))
