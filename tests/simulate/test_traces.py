"""Traces of others: their public layouts are read, and what is wrong with a row is told in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.engine.trace import TraceRow
from quire.errors import ConfigError
from quire.simulate.traces import read_rows

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def mooncake(**known: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]} | known) + "\n"


def test_mooncake(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(mooncake(timestamp=500) + mooncake(timestamp=3500, input_length=1300, hash_ids=[1, 2, 9]))
    assert read_rows(path) == [TraceRow(0.0, 600, 5, "1@512/2", 600), TraceRow(3.0, 1300, 5, "1@512/2@1024/9", 1300)]
    path.write_text('{"timestamp": 0, "input_length": 7, "output_length": 0}\n')
    assert read_rows(path) == [TraceRow(0.0, 7, 0)]


def test_azure(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319569,110,27\n")
    first, second = read_rows(path)
    assert first == TraceRow(0.0, 4808, 10)
    assert (second.prompt_tokens, second.new_tokens) == (110, 27)
    assert second.arrival == pytest.approx(0.0519969, abs=1e-6)
    path.write_text(AZURE + "2024-05-12 00:00:00+00:00,5,1\n2024-05-12T00:00:02Z,6,1\n")
    assert [row.arrival for row in read_rows(path)] == [0.0, 2.0]


def test_ours(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival,prompt_tokens,new_tokens\n5,10,1\n7,10,1\n")
    assert [row.arrival for row in read_rows(path)] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "is empty; a trace has a row for each request"),
        ("a.jsonl", mooncake() + "\n" + mooncake(), "line 2 is empty; a trace has no holes"),
        ("a.jsonl", mooncake() + '{"timestamp": 3, "input_length": 4}\n', "line 2 lacks output_length"),
        ("a.jsonl", mooncake(timestamp=9) + mooncake(timestamp=4), r"line 2: it arrives at 0.004 s, before"),
        ("a.jsonl", mooncake(timestamp=-1), "line 1: timestamp is -1"),
        ("a.jsonl", mooncake(hash_ids=[1]) + mooncake(hash_ids=[1, 2, 3]), "line 2: there are 3 hash_ids for 600"),
        ("a.jsonl", mooncake(hash_ids=["x"]), "hash_ids is"),
        ("a.jsonl", mooncake(input_length=0), "input_length is 0"),
        ("a.jsonl", "[1]\n", "line 1 lacks everything"),
        ("a.jsonl", "{\n", "line 1 is no JSON"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,5,\n", "line 2 is '2023-11-16 18:17:03,5,'; a row .* holes"),
        ("a.csv", AZURE + "yesterday,5,6\n", "line 2: TIMESTAMP is 'yesterday'"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,5,-6\n", "line 2: GeneratedTokens is '-6'"),
        ("a.csv", AZURE + "2023-11-16 18:17:03,5,6\n2023-11-16 18:17:02,5,6\n", "line 3: .* is before the first row"),
        ("a.csv", "arrival,prompt_tokens,new_tokens\n5,10,1\n4,10,1\n", "row 2: it arrives at 4 s, before the row"),
        ("none.csv", None, "cannot be read as CSV"),
        ("none.jsonl", None, "cannot be read as JSONL"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_rows(tmp_path / name)
