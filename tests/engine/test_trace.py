"""Traces: read as written, refused with the line, and recorded so that a replay shares what was shared."""

import random
from array import array
from itertools import combinations
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine.trace import TraceRecorder, TraceRow, poisson, prompt_of, read_trace, write_trace
from quire.errors import ConfigError
from quire.request import Request

ROWS = [
    TraceRow(0.0, 100, 7),
    TraceRow(0.25, 80, 1, "system", 64),
    TraceRow(1.5, 90, 0, "system@64/second, turn", 70),
]


def common(a: array, b: array) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.csv", ROWS)
    assert read_trace(tmp_path / "trace.csv") == ROWS
    assert (tmp_path / "trace.csv").read_text().splitlines()[:3] == [
        "arrival,prompt_tokens,new_tokens,prefix_id,prefix_tokens",
        "0.0,100,7,,0",
        "0.25,80,1,system,64",
    ]


def test_columns_may_stand_in_any_order_and_those_of_the_prefix_be_missing(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\ufeffnew_tokens,arrival,prompt_tokens\n3, 0.5 ,9\n\n1,1e1,2\n", encoding="utf-8")
    assert read_trace(path) == [TraceRow(0.5, 9, 3), TraceRow(10.0, 2, 1)]


HEADER = "arrival,prompt_tokens,new_tokens,prefix_id,prefix_tokens\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"line 1: the columns are missing; they must be arrival,prompt_tokens,new_tokens and may be prefix_id"),
        ("arrival,prompt_tokens\n", r"line 1: the columns are arrival,prompt_tokens; they must be"),
        ("arrival,prompt_tokens,new_tokens,color\n", r"the columns are arrival,prompt_tokens,new_tokens,color"),
        ("arrival,arrival,prompt_tokens,new_tokens\n", r"the columns are arrival,arrival"),
        (HEADER + "0,5,5\n", r"line 2 has 3 cells; the header has 5"),
        (HEADER + "0,5,5,,\n0,5,x,,\n", r"line 3: new_tokens is 'x'; it must be a whole number"),
        (HEADER + "soon,5,5,,\n", r"line 2: arrival is 'soon'; it must be a number of seconds"),
        (HEADER + "nan,5,5,,\n", r"line 2: arrival is nan; it must be finite and at least 0"),
        (HEADER + "-1,5,5,,\n", r"line 2: arrival is -1.0; it must be finite and at least 0"),
        (HEADER + "0,0,5,,\n", r"line 2: prompt_tokens is 0; it must be"),
        (HEADER + "0,99999999,5,,\n", r"line 2: prompt_tokens is 99999999; it must be"),
        (HEADER + "0,9999999999,5,,\n", r"line 2: prompt_tokens is '9999999999'; .* at most 9 digits"),
        (HEADER + "0,5,5,a,6\n", r"line 2: prefix_tokens is 6; it must be .*5"),
        (HEADER + "0,5,5,a,\n", r"line 2: prefix_id is 'a' and prefix_tokens is 0; give both or neither"),
        (HEADER + "0,5,5,a@b,3\n", r"line 2: prefix_id is 'a@b'; it must be a name, or a path such as a@50/b"),
        (HEADER + "0,5,5,a@4/b,3\n", r"line 2: prefix_id is 'a@4/b'; its ends must ascend to prefix_tokens=3"),
        (HEADER + '0,5,5,"a,3\n', r"cannot be read as CSV"),
    ],
)
def test_a_malformed_file_is_refused_with_line_and_value(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_files_that_are_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read as CSV"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as CSV"):
        read_trace(tmp_path / "binary.csv")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(tmp_path, ROWS)


def test_prompts_share_what_the_rows_say_and_nothing_else() -> None:
    rows = [*ROWS, TraceRow(2.0, 70, 1, "system", 50), TraceRow(2.0, 70, 1, "system@50/other", 60)]
    prompts = [prompt_of(row, number, seed=3) for number, row in enumerate(rows)]
    assert [len(prompt) for prompt in prompts] == [row.prompt_tokens for row in rows]
    shared = {(1, 2): 64, (1, 3): 50, (2, 3): 50, (1, 4): 50, (2, 4): 50, (3, 4): 50}
    for pair in combinations(range(len(rows)), 2):
        found = common(prompts[pair[0]], prompts[pair[1]])
        assert shared.get(pair, 0) <= found <= shared.get(pair, 0) + 1  # the next one may be equal by chance
    assert prompt_of(ROWS[0], 0, seed=3) == prompts[0] != prompt_of(ROWS[0], 0, seed=4)


def test_arrivals_at_a_rate() -> None:
    rows = poisson(4000, 10, 5, rate=8.0, seed=1)
    assert rows == poisson(4000, 10, 5, rate=8.0, seed=1) != poisson(4000, 10, 5, rate=8.0, seed=2)
    assert 450 < rows[-1].arrival < 550
    assert {row.arrival for row in poisson(3, 10, 5, None, 0)} == {0.0}
    for rate in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="rate is"):
            poisson(1, 1, 1, rate, 0)


def test_a_recorded_trace_shares_what_the_requests_shared() -> None:
    """200 prompts grown out of each other at random points: a replay's prompts have the same common prefixes."""
    rng = random.Random(7)
    prompts = [array("i", [1, 2, 3])]
    for _ in range(200):
        start = rng.choice(prompts)
        prompts.append(start[: rng.randint(1, len(start))] + array("i", rng.choices(range(500), k=rng.randint(1, 9))))
    recorder = TraceRecorder(clock=iter(range(5, 1000)).__next__)
    for i, prompt in enumerate(prompts):
        recorder.add(Request(str(i), prompt + array("i", [9] * (i % 4)), len(prompt), SamplingParams()))
    rows = recorder.rows()
    assert [row.arrival for row in rows] == list(range(201))
    assert [row.prompt_tokens for row in rows] == [len(prompt) for prompt in prompts]
    assert [row.new_tokens for row in rows] == [i % 4 for i in range(201)]
    replayed = [prompt_of(row, i, 0) for i, row in enumerate(rows)]
    for i, j in combinations(range(201), 2):
        assert common(replayed[i], replayed[j]) == common(prompts[i], prompts[j])


def test_tenants_share_nothing_in_a_recorded_trace() -> None:
    recorder = TraceRecorder()
    assert recorder.rows() == []
    for i, salt in enumerate(["a", "a", "b", "b", "c"]):
        recorder.add(Request(str(i), array("i", [4] * 8), 8, SamplingParams(), cache_salt=salt))
    rows = recorder.rows()
    assert [row.prefix_tokens for row in rows] == [8, 8, 8, 8, 0]
    assert rows[0].prefix_id == rows[1].prefix_id != rows[2].prefix_id == rows[3].prefix_id


def test_the_engine_records(tmp_path: Path) -> None:
    llm = LLM(num_blocks=100)
    recorder = llm.engine.recorder = TraceRecorder()
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [*range(20), 30 + i]} for i in range(3)], params)
    write_trace(tmp_path / "day.csv", recorder.rows())
    rows = read_trace(tmp_path / "day.csv")
    assert [(row.prompt_tokens, row.new_tokens, row.prefix_tokens) for row in rows] == [(21, 5, 20)] * 3
    assert rows[0].arrival == 0.0
    assert len({row.prefix_id for row in rows}) == 1
