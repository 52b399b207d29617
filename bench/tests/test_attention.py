"""quire bench attention: the work that is counted, and that the figures describe the calls."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quire import ops
from quire.cli import app
from quire.errors import Unsupported
from quire.ops import native
from quire_bench.kernels import attention
from quire_bench.kernels.attention import SETS, Shape

TINY = Shape(batch=2, num_heads=4, num_kv_heads=2, head_dim=8, context_len=6, block_size=4, dtype="float32")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CACHE_BYTES", 4096)
    monkeypatch.setattr(attention, "READ_BYTES", 2**16)


def test_work_leaves_masked_scores_out() -> None:
    assert TINY.kv_bytes == 2 * 2 * 2 * 6 * 8 * 4
    assert TINY.operations == 4 * 4 * 8 * 2 * 6
    assert replace(TINY, query_len=6).operations == 4 * 4 * 8 * 2 * (1 + 2 + 3 + 4 + 5 + 6)
    assert replace(TINY, query_len=2).operations == 4 * 4 * 8 * 2 * (5 + 6)


@pytest.mark.parametrize("query_len", [1, 3, 6])
@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8")])
def test_measured_calls(query_len: int, dtype: str, kv_dtype: str | None) -> None:
    shape = replace(TINY, query_len=query_len, dtype=dtype, kv_dtype=kv_dtype)
    figure = attention.measure(ops.load("cpu"), shape, runs=3, sdpa_runs=1)
    assert len(figure.seconds) == 3
    assert len(figure.sdpa_seconds) == 1
    work = shape.kv_bytes if query_len == 1 else shape.operations
    assert figure.rate == pytest.approx(work / statistics.median(figure.seconds) / 1e9)
    ceiling = figure.ceilings.read if query_len == 1 else figure.ceilings.multiply
    assert figure.fraction == pytest.approx(figure.rate / ceiling)
    assert figure.speedup == pytest.approx(figure.sdpa_seconds[0] / statistics.median(figure.seconds))
    assert json.loads(json.dumps(figure.as_dict()))["rate"] == figure.rate


def test_another_instruction_set_runs_and_an_unknown_one_does_not() -> None:
    best = native.default()
    other = native.runnable(native.library_path())[-1]
    with attention.instruction_set(other) as name:
        assert name == native.default().isa == other
    assert native.default() is best
    with pytest.raises(Unsupported, match="'mmx'"), attention.instruction_set("mmx"):
        pass


@pytest.mark.slow
def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SETS, "peers", (TINY, replace(TINY, query_len=6)))
    before = torch.get_num_threads()
    shown = CliRunner().invoke(app, ["bench", "attention", "--runs", "2", "--sdpa-runs", "1"])
    assert shown.exit_code == 0, shown.output
    assert "GB/s" in shown.output
    assert "GFLOP/s" in shown.output
    assert "smallest call" in shown.output
    lines = CliRunner().invoke(app, ["bench", "attention", "--runs", "2", "--sdpa-runs", "0", "--json"]).output
    parsed = [json.loads(line) for line in lines.splitlines()]
    assert [line["name"] for line in parsed[:2]] == [TINY.name, replace(TINY, query_len=6).name]
    assert all(line["backend"] == "cpu" and line["isa"] in native.ISAS for line in parsed)
    assert torch.get_num_threads() == before
    failed = CliRunner().invoke(app, ["bench", "attention", "pears"])
    assert failed.exit_code == 1


# ----------------------------------------------------------------------------------------------------- cascades
