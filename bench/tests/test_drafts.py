"""quire bench drafts: both of its measurements, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.models.eagle import LAYERS
from quire_bench.cli import app
from tests.models.heads import save_eagle


def test_requests_with_drafts_are_those_without(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the requests of a step have different numbers of draft tokens, and preempt one another."""
    result = CliRunner().invoke(app, ["drafts", "--check", "60", "--json"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["draft"], row["requests"], row["different"]) for row in rows] == [
        *[("lookup", 30, 0)] * 2,
        *[("head", 30, 0)] * 2,
    ]
    # Of few requests. With many, measured times decide: where no draft token pays, only a few are tried, which may all
    # be rejected, or all accepted.
    assert all(0 < row["accepted"] < row["draft_tokens"] for row in rows[::2])
    result = CliRunner().invoke(app, ["drafts", "--check", "20", "--draft", "model", "--json"])
    row, many = [json.loads(line) for line in result.stdout.splitlines()]
    assert (row["draft"], row["requests"], row["different"], many["different"]) == ("model", 10, 0, 0)
    assert 0 < row["accepted"] < row["draft_tokens"]
    assert "without draft tokens" not in caplog.text


def test_requests_with_drafts_of_an_eagle_checkpoint(tmp_path: Path) -> None:
    save_eagle(tmp_path, hidden_size=256, vocab_size=2048, eagle_config={LAYERS: [0, 2, 4]})
    arguments = ["drafts", "--check", "20", "--draft", "model", "--draft-model", str(tmp_path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["requests"], row["different"]) for row in rows] == [(10, 0)] * 2
    assert rows[0]["draft_tokens"] > 10


def test_the_speed_is_that_of_each_source() -> None:
    arguments = ["drafts", "--draft", "head", "--runs", "1", "--max-tokens", "12", "--json"]
    off, head = map(json.loads, CliRunner().invoke(app, arguments).stdout.splitlines())
    assert (off["draft"], off["ratio"], head["draft"]) == ("off", 1.0, "head")
    assert off["per_step"] == pytest.approx(1.0)
    assert head["per_step"] > 1.5
    result = CliRunner().invoke(app, ["drafts", "--draft", "eagle"])
    assert result.exit_code == 1
    assert "--draft is 'eagle'; it must be one of lookup, head, model, auto" in result.stderr


def test_a_head_that_is_always_right_saves_steps() -> None:
    arguments = ["drafts", "--accepted", "1.0", "--runs", "1", "--max-tokens", "17", "--sequences", "2", "--json"]
    off, right = map(json.loads, CliRunner().invoke(app, arguments).stdout.splitlines())
    assert (off["draft"], right["draft"]) == ("off", "1.0")
    assert right["per_step"] > 2.0 > off["per_step"]
