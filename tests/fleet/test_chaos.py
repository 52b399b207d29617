"""What serves a fleet dies, hangs and is cut off, and no client notices: see tests.fleet.chaos."""

from __future__ import annotations

import asyncio
import os
from collections import Counter

import pytest

from tests.fleet.asks import Answer, verdict
from tests.fleet.chaos import play
from tests.forks import Spawner
from tests.marks import of_long_runs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked here")]

ROUNDS, LONG_ROUNDS = 4, 24  # of one fleet


@pytest.mark.parametrize("rounds", [range(ROUNDS), of_long_runs(range(ROUNDS, ROUNDS + LONG_ROUNDS))])
def test_clients_get_what_a_plain_server_answers(rounds: range, forks: Spawner) -> None:
    report = asyncio.run(play(rounds, 1, forks))
    assert not report.failures, str(report)
    assert sum(row.rounds for row in report.rows.values()) == len(rounds)
    hits = sum((row.hits for row in report.rows.values()), start=Counter[str]())
    assert hits.total() - hits["missed"] > len(rounds) / 2, str(report)
    assert report.total("resumed") > 0


def stream(text: str, *ends: str, usage: int = 3) -> Answer:
    choice = {"text": text, "ends": [[end, None] for end in ends]}
    return Answer(200, choices={0: choice}, usage={"completion_tokens": usage}, is_done=True)


def test_what_differs_is_seen() -> None:
    right = stream("abc", "stop")
    assert verdict(right, stream("abc", "stop")) == ""
    assert verdict(right, stream("abcc", "stop")) == "doubled"
    assert verdict(right, stream("abc", "stop", "stop")) == "doubled"
    assert verdict(right, stream("ab", "stop")) == "lost"
    assert verdict(right, stream("abc")) == "lost"
    assert verdict(right, stream("abx", "stop")) == "different"
    assert verdict(right, stream("abc", "length")) == "different"
    assert verdict(right, stream("abc", "stop", usage=4)) == "different"
    assert verdict(right, Answer(503, body={"error": {}}, is_done=True)) == "error"
    whole = {"id": "a", "choices": [{"text": "x"}], "usage": {"total_tokens": 3, "prompt_tokens_details": 1}}
    same = whole | {"id": "b", "usage": {"total_tokens": 3, "prompt_tokens_details": 2}}
    assert verdict(Answer(200, whole, is_done=True), Answer(200, same, is_done=True)) == ""
    assert verdict(Answer(200, whole, is_done=True), Answer(200, same | {"choices": []}, is_done=True)) == "different"
