"""quire bench host: each case runs on the fake device, and the parts add up."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from quire_bench.cli import app
from quire_bench.engine.host import CASES, PARTS, FakeModel, make_engine, measure, measure_http

RUN = ["host", "--sequences", "3", "--steps", "10", "--json"]


def test_every_case_has_all_parts() -> None:
    done = CliRunner().invoke(app, RUN, catch_exceptions=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["case"] for one in found] == list(CASES)
    for one in found:
        assert list(one["parts"]) == list(PARTS)
        assert one["sequences"] == 3
        assert 0 < one["quick"] <= one["milliseconds"]
        assert one["microseconds_each"] == pytest.approx(1e3 * one["milliseconds"] / 3)


def test_steps_overlap_and_replay() -> None:
    found = measure("text", 2, steps=10, overlapped=True)
    assert found.parts["plan"] > 0
    engine, model = make_engine(2, overlapped=True)
    assert isinstance(engine.runner.runner.model, FakeModel)  # type: ignore[attr-defined]
    assert engine.runner.runner.model is model  # type: ignore[attr-defined]


def test_the_event_loop_is_measured_without_sockets() -> None:
    assert measure_http(2, tokens=4) > 0


def test_an_unknown_case_is_refused() -> None:
    done = CliRunner().invoke(app, ["host", "--case", "gready"])
    assert done.exit_code == 1
    assert "--case is 'gready'; it must be one of greedy, text" in done.output + done.stderr
