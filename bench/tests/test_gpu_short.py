"""quire bench gpu --only short: its stages on small shapes, and the table that is read off their rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire_bench.gpu import nano, short
from quire_bench.gpu import run as gpu
from quire_bench.gpu.common import Bench, Row, Settings
from quire_bench.gpu.report import judged

pytestmark = pytest.mark.slow

TINY = Settings(device="cpu", backend="cpu", tiny=True)
RUN = ",".join(f"short.{name}" for name in short.STAGES if name != "suite")  # which runs tests


def test_every_stage_runs_and_nothing_is_wrong(tmp_path: Path) -> None:
    found = gpu.run(TINY, RUN, tmp_path / "short.json", isolated=False, seconds=100)
    for stage in RUN.split(","):
        rows = [row for row in found.rows if row["stage"] == stage and row["who"] != "time"]
        assert rows, stage
        assert not [row for row in rows if "error" in row or row.get("passed") is False], stage
        assert stage in (tmp_path / "short.json").read_text()
    exact = [row for row in found.rows if row["stage"] == "short.exact" and "passed" in row]
    assert len(exact) == len(short.MASKS)
    assert all(0 < row["value"] < short.MOST_ERROR for row in exact)
    skipped = {row["who"]: row["skipped"] for row in found.rows if "skipped" in row}
    assert skipped["hopper"] == "it serves GPUs of compute capability 9.0, not 'cpu'"
    assert skipped["nano-vllm"].endswith("were not given: --nano, --fa3")
    measured = {one["target"] for one in judged(found.rows, found.targets) if one["measured"] is not None}
    assert {"decode 64 x 4096: share of the copy", "GPT-2, 64 sequences: step over floor"} <= measured
    assert not {name for name in measured if "hopper" in name or "FA3" in name or "nano" in name}


def test_it_is_run_only_when_it_is_named() -> None:
    assert not [name for name in gpu.chosen(None, TINY) if name.startswith("short.")]
    assert list(gpu.chosen("short", TINY)) == [f"short.{name}" for name in short.STAGES]


@pytest.mark.parametrize(
    ("passed", "failed"),
    [
        ("tests/ops/a.py::x[a b] PASSED  [ 1%]", "tests/ops/a.py::y FAILED [ 2%]"),
        ("[gw0] [  1%] PASSED tests/ops/a.py::x[a b] ", "[gw3] [ 2%] FAILED tests/ops/a.py::y "),
    ],
)
def test_outcomes_of_tests_are_counted_also_in_the_middle(passed: str, failed: str) -> None:
    summary = "= short test summary =\nFAILED tests/ops/a.py::y - E"
    assert short.outcomes(f"{passed}\n{failed}\n{summary}") == (1, ["tests/ops/a.py::y"])
    assert short.outcomes(passed) == (1, [])


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("print('tests/a.py::x PASSED', flush=True)", {"value": 0.0, "passes": 1, "ended": True}),
        (
            "print('tests/a.py::x PASSED', flush=True); import time; time.sleep(60)",
            {"failures_so_far": 0.0, "passes": 1, "ended": False},
        ),
        ("raise SystemExit('no pytest')", {"error": "no test had ended"}),
    ],
)
def test_a_suite_without_an_end_is_not_a_suite_without_failures(
    monkeypatch: pytest.MonkeyPatch, script: str, expected: dict[str, Any]
) -> None:
    rows: list[Row] = []
    run = short.subprocess.run
    monkeypatch.setattr(short.subprocess, "run", lambda command, **options: run([command[0], "-c", script], **options))
    bench = Bench(TINY, "short.suite", rows.append)
    bench.deadline = gpu.time.monotonic() + 5
    short.suite(bench)
    [row] = rows
    assert {key: row[key] for key in expected} == expected
    met = {one["target"]: one["met"] for one in judged(rows, short.TARGETS)}
    assert met["tests/ops on the GPU: failures"] is (True if "value" in expected else None)


def test_a_stage_that_hangs_is_stopped_and_reported(tmp_path: Path) -> None:
    child = gpu.Child("short.exact", TINY, -5.0, tmp_path)  # its time is up before it has begun
    [row] = child.rows()
    assert row["error"].startswith("stopped after")
    assert child.process.poll() is not None


def test_targets_are_read_off_the_rows_of_their_stage() -> None:
    def row(stage: str, case: str, who: str, **figures: Any) -> Row:
        return {"stage": f"short.{stage}", "case": case, "who": who, **figures}

    wide = "8 x 4096 D128"
    rows = [
        row("prompts", wide, "hopper", us=2.0, value=520.0),
        row("prompts", wide, "quire", us=3.0),
        row("prompts", wide, "quire, reproducible", us=3.09),
        row("prompts", wide, "fa3", us=1.9),
        row("blocks", wide, "hopper, blocks of 16", us=2.5),  # another stage's
        row("blocks", wide, "hopper, blocks of 256", us=2.0),
        row("products", "32 x 14336 x 4096", "torch", us=10.0),
        row("products", "32 x 14336 x 4096", "quire, int8", us=6.0),
        row("nano", nano.CASE, "quire", value=26000.0),
        row("nano-peer", nano.CASE, "nano-vllm", value=20000.0),
    ]
    found = {one["target"]: one for one in judged(rows, short.TARGETS)}
    expected = {
        "prefill 8 x 4096, D 128, hopper: share of FA3": (0.95, True),
        "prefill 8 x 4096, D 128: hopper over triton": (1.5, True),
        "prefill, hopper: blocks of 16 against 256": (0.8, False),
        "reproducible: cost in prefill, D 128": (0.03, True),
        "int8, 32 rows of 14336 x 4096: time over bf16": (0.6, True),
        "nano-vllm's benchmark: new tokens a second over its own": (1.3, True),
    }
    for name, (measured, met) in expected.items():
        assert found[name]["measured"] == pytest.approx(measured), name
        assert found[name]["met"] is met, name
    assert sum(one["met"] is not None for one in found.values()) == len(expected) + 1  # the rate


def test_nano_vllm_calls_flash_attention_by_the_names_of_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "q",
        "k",
        "v",
        "out",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "max_seqlen_k",
        "page_table",
        "num_splits",
    ]
    calls: list[dict[str, Any]] = []

    def forward(*given: Any) -> list[torch.Tensor]:
        calls.append(dict(zip(names, given, strict=True)))
        return [calls[-1]["out"]]

    forward.default = SimpleNamespace(  # type: ignore[attr-defined]
        _schema=SimpleNamespace(arguments=[SimpleNamespace(name=name) for name in names])
    )
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=forward), raising=False)
    module: Any = nano._flash_attention("library")
    q, starts, table = torch.ones(3, 2, 4), torch.tensor([0, 3]), torch.zeros(1, 2)
    sizes = {"max_seqlen_q": 3, "max_seqlen_k": 3}
    module.flash_attn_varlen_func(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, causal=True, **sizes)
    module.flash_attn_varlen_func(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts, block_table=table, **sizes)
    module.flash_attn_with_kvcache(q, torch.ones(5, 16, 2, 4), q, cache_seqlens=starts[1:], block_table=table)
    assert [call["cu_seqlens_k"] is None for call in calls] == [False, True, True]
    assert calls[1]["seqused_k"].tolist() == [3]
    assert (calls[2]["max_seqlen_k"], calls[2]["num_splits"]) == (32, 0)
