"""quire bench machine and lists of threads: each row has its figure, and what is missing is said."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import ConfigError
from quire_bench import machine, threads
from quire_bench.kernels import attention, linear, onednn
from quire_bench.kernels.attention import SETS, Shape
from quire_bench.kernels.linear import LinearShape

TINY = Shape(batch=2, num_heads=4, num_kv_heads=2, head_dim=64, context_len=6, block_size=4)
LINEARS = (LinearShape("135M", 32, 48), LinearShape("1B", 64, 32))
ROWS = (4, linear.FEW_ROWS + 1)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CACHE_BYTES", 4096)
    monkeypatch.setattr(attention, "READ_BYTES", 2**16)
    monkeypatch.setattr(machine, "POOL_BYTES", 2**16)
    monkeypatch.setattr(machine, "LINEARS", LINEARS)
    monkeypatch.setattr(machine, "ROWS", ROWS)
    monkeypatch.setattr(machine, "PREFILL", (replace(TINY, query_len=6),))
    monkeypatch.setattr(machine, "DECODE", (TINY,))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 1
    return result.stderr


def test_every_row_has_its_figure() -> None:
    found = json.loads(run("machine", "--seconds", "0", "--runs", "1", "--json"))
    assert set(found["machine"]) == {"processor", "cores", "threads", "isa", "fetching", "torch", "date"}
    names = [one["name"] for one in found["rows"]]
    linears = [
        f"{shape.name}, {rows}" for shape in LINEARS for rows in ("1 row", "4 rows", "4 rows", f"{ROWS[1]} rows")
    ]
    tail = ["prefill, D = 64, 2 x 6 tokens", "decode, G = 2, 2 x 6 tokens", "workloads"]
    assert names == ["read rate", "product rate", *linears, *tail]
    *measured, left_out = found["rows"]
    assert all(one["value"] > 0 and one["unit"] for one in measured)
    assert all((one["ratio"] is None) == (one["compared_to"] == "") for one in measured)
    assert (left_out["value"], left_out["note"]) == (None, "left out: no --model was given")


def test_only_amx_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in ("avx2", "amx"):
        library = replace(machine.native.default(), isa=isa)
        with monkeypatch.context() as patched:
            patched.setattr(machine.native, "default", lambda library=library: library)
            rows = list(machine.measure((), seconds=0, runs=1))
        targets = [str(row.target) for row in rows if row.target is not None]
        if isa == "avx2":
            assert not targets
        elif onednn.lacking() is None:
            assert targets == [">= 1", ">= 1", ">= 0.85", "<= 1.15", ">= 1.2", ">= 1.2", ">= 0.35", ">= 0.8"]


# -------------------------------------------------------------------------------------------- lists of threads


def test_numbers_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 4)
    assert threads.thread_counts(None) == (torch.get_num_threads(),)
    assert threads.thread_counts("1, 4,2,4") == (1, 4, 2)
    for wrong in ("0", "5", "-1", "x", "1,,2", ""):
        with pytest.raises(ConfigError, match="each must be a number from 1 to 4, which is how many cores"):
            threads.thread_counts(wrong)


@pytest.mark.slow
def test_attention_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    monkeypatch.setitem(SETS, "peers", (TINY,))
    before = torch.get_num_threads()
    arguments = ["attention", "--runs", "1", "--sdpa-runs", "0", "--threads", "1,2"]
    head, line, *_ = run(*arguments).splitlines()
    assert head.split() == ["threads", "1", "2"]
    assert line.startswith(TINY.name)
    assert line.count(" x ") == 2
    first, second, _ = map(json.loads, run(*arguments, "--json").splitlines())
    assert (first["threads"], second["threads"], first["speedup_over_first"]) == (1, 2, 1.0)
    assert second["speedup_over_first"] == second["rate"] / first["rate"]
    assert torch.get_num_threads() == before
    assert "threads has '3'" in refused("attention", "--threads", "1,3")
