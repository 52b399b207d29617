"""quire bench recurrent: the work that is counted, and that the figures describe the calls."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from quire import ops
from quire.cli import app
from quire_bench.kernels import attention, recurrent
from quire_bench.kernels.recurrent import RecurrentShape

TINY = RecurrentShape(rule="delta", batch=2, num_heads=4, num_k_heads=2, dim_k=8, dim_v=6, taps=3, dtype="float32")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "STATE_BYTES", 4096)
    monkeypatch.setattr(attention, "READ_BYTES", 2**16)


def test_work() -> None:
    assert TINY.width == 2 * 2 * 8 + 4 * 6
    assert TINY.state_bytes == 2 * 4 * 8 * 6 * 4
    assert TINY.step_bytes == TINY.state_bytes * 33 / 32 + 2 * 16 * (2 * 8 + 4 * 6) * 4
    assert replace(TINY, query_len=5).operations == 3 * 2 * 5 * 4 * 8 * 6 * 2
    assert replace(TINY, query_len=5, rule="ssd").operations == 2 * 2 * 5 * 4 * 8 * 6 * 2


def test_plans_go_on_from_a_piece_and_write_the_next() -> None:
    backend = ops.load("cpu")
    first, last = (TINY.plan(backend, 32 + t) for t in (0, 31))
    assert first.state_tables.tolist() == [[0, -1], [2, -1]]
    assert first.row_tables.tolist() == [[0, -1], [1, -1]]
    assert last.state_tables.tolist() == [[0, 1], [2, 3]]
    assert last.row_tables.tolist() == [[0, -1], [1, -1]]
    prompt = replace(TINY, query_len=70).plan(backend, 0)
    assert prompt.state_tables.tolist() == [[-1, -1, 1], [-1, -1, 3]]
    assert prompt.row_tables.tolist() == [[-1, -1, 0], [-1, -1, 1]]


@pytest.mark.parametrize("rule", ["delta", "ssd"])
@pytest.mark.parametrize("query_len", [1, 64, 70])
def test_measured_calls(rule: str, query_len: int) -> None:
    shape = replace(TINY, rule=rule, query_len=query_len)
    figure = recurrent.measure(ops.load("cpu"), shape, runs=2)
    assert min(figure.recurrence_seconds, figure.convolution_seconds, figure.ceiling) > 0
    work = shape.step_bytes if query_len == 1 else shape.operations
    assert figure.rate == pytest.approx(work / figure.recurrence_seconds / 1e9)
    found = recurrent._calls(ops.load("cpu"), shape)
    assert found[2] == (32 * -(-4096 // shape.state_bytes) if query_len == 1 else 1)


@pytest.mark.slow
def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "shapes", lambda: [TINY, replace(TINY, query_len=40)])
    shown = CliRunner().invoke(app, ["bench", "recurrent", "--runs", "1"])
    assert shown.exit_code == 0, shown.output
    assert "GB/s" in shown.output
    assert "GFLOP/s" in shown.output
    lines = CliRunner().invoke(app, ["bench", "recurrent", "--runs", "1", "--json"]).output.splitlines()
    assert [json.loads(line)["unit"] for line in lines] == ["GB/s", "GFLOP/s"]
