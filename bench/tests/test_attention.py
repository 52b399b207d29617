"""quire bench attention: the work that is counted, and that the figures describe the calls."""

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quire import ops
from quire.cli import app
from quire.errors import ConfigError, Unsupported
from quire.ops.cpu import native
from quire_bench.kernels import attention, cascade
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


def test_the_sets_hold_what_peers_are_measured_on() -> None:
    assert [(s.batch, s.num_heads, s.num_kv_heads, s.head_dim, s.context_len, s.query_len) for s in SETS["peers"]] == [
        (32, 32, 8, 64, 1024, 1), (8, 32, 8, 128, 4096, 1), (32, 12, 12, 64, 872, 1), (1, 32, 8, 128, 16384, 1),
        (1, 12, 12, 64, 1024, 1024), (1, 32, 8, 64, 2048, 2048), (1, 32, 8, 128, 2048, 2048),
        (4, 32, 8, 128, 2048, 256),
    ]  # fmt: skip
    everything = attention.chosen(["all"])
    assert len(everything) == len(set(everything))
    assert {s.num_heads // s.num_kv_heads for s in everything} >= {1, 3, 4, 7, 8}
    assert [(s.batch, s.num_heads, s.num_kv_heads) for s in SETS["mqa"]] == [(1, 1, 1), (1, 8, 1)]
    assert {s.head_dim for s in everything} >= {64, 80, 128, 256}
    assert {s.block_size for s in everything} >= {1, 16, 32, 128}
    assert {s.context_len for s in everything} >= {128, 32768}
    assert {s.batch for s in everything} >= {1, 64}
    assert {s.dtype for s in everything} == {"bfloat16", "float16", "float32"}
    assert [s.kv_dtype for s in SETS["int8"]] == [None, "int8"] * 4
    with pytest.raises(ConfigError, match="there is no set of shapes 'pears'"):
        attention.chosen(["pears"])


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


def test_bytes_of_an_int8_cache() -> None:
    shape = replace(TINY, kv_dtype="int8")
    rows = 2 * shape.batch * shape.num_kv_heads * shape.context_len
    assert shape.kv_bytes == rows * (shape.head_dim + 4)
    assert shape.name.endswith(f"{shape.dtype}, int8 cache")
    kv = attention.filled_cache(shape.spec(1))
    assert kv.k_scale is not None
    assert kv.k.count_nonzero() > 0
    assert bool((kv.k_scale > 0).all())


def test_each_call_reads_another_part_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    backend = ops.load("reference")
    monkeypatch.setattr(backend, "attention", lambda q, kv, plan, out: seen.append(plan.block_tables.tolist()))
    call = attention._paged(backend, TINY)
    for _ in range(6):
        call()
    copies = -(-4096 // TINY.kv_bytes)
    used = [block for tables in seen[:copies] for table in tables for block in table]
    assert len(used) == len(set(used)) == copies * 4
    assert seen[copies] == seen[0]


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


def test_the_plot_is_drawn_or_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = attention.measure(ops.load("cpu"), TINY, runs=1, sdpa_runs=0)
    attention.plot([figure], tmp_path / "figures.png")
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    for name, shown in (("x.foo", "its ending must be one of"), ("none/x.png", "there is no directory")):
        with pytest.raises(ConfigError, match=shown):
            attention.plot([figure], tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        attention.plot([figure], tmp_path / "figures.png")


# ----------------------------------------------------------------------------------------------------- cascades


def test_what_a_cascade_saves() -> None:
    shape = cascade.CascadeShape(batch=4, shared=2048, own=32, num_heads=4, num_kv_heads=2, head_dim=8)
    assert shape.group_size == 2
    assert shape.bytes_saved == 4 * 2080 / (2048 + 4 * 32)
    backend = ops.load("cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # or long contexts are cut for the threads' sake
    try:
        outs = [cascade.call(backend, shape, shares=shares)() for shares in (False, True)]
        figure = cascade.measure(backend, shape, runs=2)
    finally:
        torch.set_num_threads(threads)
    assert outs[0].shape == (4, 4, 8)
    assert all(out.isfinite().all() for out in outs)
    bound = cascade.CascadeFigure(shape, 6.0, 2.0, read=10.0, multiply=30.0)
    assert bound.speedup == 3.0
    assert bound.roof == 1.5  # 30 / (2 * 10), and not the bytes
    assert bound.as_dict()["share"] == 2.0
    assert figure.speedup == figure.apart_seconds / figure.shared_seconds
    assert figure.roof == min(shape.bytes_saved, figure.multiply / (2 * figure.read))
    assert figure.as_dict()["share"] == figure.speedup / figure.roof


def test_sequences_apart_have_blocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And sequences that share have not: seen by the blocks of the cache that each call makes."""
    made = []
    real = cascade.filled_cache
    monkeypatch.setattr(cascade, "filled_cache", lambda spec: (made.append(spec.num_blocks), real(spec))[1])
    shape = cascade.CascadeShape(batch=4, shared=64, own=32, num_heads=2, num_kv_heads=2, head_dim=8)
    for shares in (False, True):
        cascade.call(ops.load("cpu"), shape, shares=shares)
    assert made == [4 * 4 + 4 * 2, 4 + 4 * 2]


@pytest.mark.slow
def test_the_cascade_command() -> None:
    arguments = "bench cascade --batch 2 --shared 1024 --own 16 --head-dim 8 --runs 1"
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.output
    assert [line[:6] for line in result.output.splitlines()] == ["G = 1:", "G = 4:", "G = 8:"]
    result = CliRunner().invoke(app, [*arguments.split(), "--json"])
    figures = [json.loads(line) for line in result.output.splitlines()]
    assert [figure["group_size"] for figure in figures] == [1, 4, 8]
    assert all(figure["shape"]["batch"] == 2 and figure["shared_seconds"] > 0 for figure in figures)
    result = CliRunner().invoke(app, [*arguments.split(), "--attention-backend", "nope"])
    assert result.exit_code == 1
    assert "there is no attention backend 'nope'" in result.output
