"""quire bench gpu: every stage runs on small shapes, what fails is told, and targets are read off the right rows."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from quire.cli import app
from quire_bench.gpu import libraries
from quire_bench.gpu import run as gpu
from quire_bench.gpu.common import Bench, Clock, Contestant, Row, Settings, race
from quire_bench.gpu.report import TARGETS, judged, markdown

pytestmark = pytest.mark.slow

TINY = Settings(device="cpu", backend="cpu", tiny=True)
TIMED = [name for name in gpu.chosen(None, TINY) if name != "correctness"]
ROOT = Path(__file__).parent.parent.parent


def bench_of(stage: str = "test", settings: Settings = TINY) -> tuple[Bench, list[Row]]:
    rows: list[Row] = []
    return Bench(settings, stage, rows.append), rows


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The whole benchmark, as the command runs it."""
    folder = tmp_path_factory.mktemp("gpu")
    arguments = [
        "--device",
        "cpu",
        "--backend",
        "cpu",
        "--tiny",
        "--json",
        f"{folder}/g.json",
        "--only",
        ",".join(TIMED),
    ]
    assert gpu.main([*arguments, "--markdown", f"{folder}/g.md"]) == 0
    return json.loads((folder / "g.json").read_text()), (folder / "g.md").read_text()


@pytest.mark.long
def test_every_target_has_its_row(report: tuple[dict[str, Any], str]) -> None:
    content, text = report
    assert [one["target"] for one in content["targets"]] == [target.name for target in TARGETS]
    assert all(target.name in text for target in TARGETS)
    unmeasured = {one["target"] for one in content["targets"] if one["met"] is None}
    absent = {  # what libraries that are not installed would tell, and a stage that has a test of its own
        "correctness: tests that pass",
        "decode against FA3 paged",
        "decode against FlashInfer",
        "prefill against vLLM's Triton kernel",
    }
    assert unmeasured <= absent
    assert content["environment"]["torch"] == torch.__version__


def test_every_stage_finds_something_and_nothing_is_wrong(report: tuple[dict[str, Any], str]) -> None:
    rows = report[0]["rows"]
    assert {"ceilings", "decode", "prefill", "cascade", "engine", "steps", "peers.sdpa", "sweep"} <= set(TIMED)
    for stage in TIMED:
        assert [row for row in rows if row["stage"] == stage and row["who"] != "time"], stage
    failed = {row["stage"] for row in rows if "error" in row or row.get("passed") is False}
    assert failed <= {"peers.varlen", "peers.conch", "peers.flashinfer"}  # which want a GPU


def test_a_stage_that_raises_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench) -> None:
        bench.row("before", "it")
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(gpu.STAGES, "decode", gpu.Stage(broken, 10))
    found = gpu.run(TINY, "decode,prefill", isolated=False)
    decode = [row for row in found.rows if row["stage"] == "decode"]
    assert [row["case"] for row in decode] == ["before", "stage", "stage"]
    assert "RuntimeError: an illegal memory access" in decode[1]["error"]
    assert any(row.get("value") for row in found.rows if row["stage"] == "prefill")


@pytest.mark.long
def test_stages_in_processes_of_their_own(tmp_path: Path) -> None:
    arguments = "--device cpu --backend cpu --tiny --isolated --only correctness,ceilings --json".split()
    assert gpu.main([*arguments, str(tmp_path / "g.json")]) == 0
    rows = json.loads((tmp_path / "g.json").read_text())["rows"]
    assert {row["stage"] for row in rows} == {"correctness", "ceilings"}
    assert not any("error" in row for row in rows)
    assert [row["value"] for row in rows if row["stage"] == "correctness" and row["who"] == "pytest"] == [1.0]


def test_the_command() -> None:
    shown = CliRunner().invoke(app, "bench gpu --device cpu --backend cpu --tiny --only ceilings".split())
    assert shown.exit_code == 0, shown.output
    assert "not measured" in shown.output
    assert (
        CliRunner().invoke(app, ["bench", "gpu", "--only", "nope", "--device", "cpu", "--backend", "cpu"]).exit_code
        == 1
    )
    assert "--fa3" in CliRunner().invoke(app, ["bench", "gpu", "--help"]).output


@pytest.mark.long
def test_it_needs_neither_the_native_library_nor_the_command_line() -> None:
    code = """
import sys
sys.modules |= {"typer": None, "rich": None}
from quire_bench.gpu.run import main
sys.exit(main("--device cpu --backend reference --tiny --only decode,cascade".split()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " failed" not in done.stdout


@pytest.mark.long
def test_tiles_are_tried_and_the_kernels_run_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    code = f"""
import sys
from tests import interpreter
interpreter.enable()
from quire_bench.gpu.run import main
stages = "small,sweep"
sys.exit(main(["--device", "cpu", "--tiny", "--only", stages, "--json", {str(tmp_path / "g.json")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "g.json").read_text())["rows"]
    assert not [row for row in rows if "error" in row or row.get("passed") is False]
    swept = [row for row in rows if row["stage"] == "sweep" and "the table has it" in row["who"]]
    assert [row["value"] for row in swept] == [1.0] * 7
    assert {row["value"] for row in rows if row["who"].endswith(", tried")} <= {3, 4, 5, 6, 7}


# ------------------------------------------------------------------------------------------------- the clock


class FakeGpu:
    """Stands in for torch.cuda: an event is a number of calls made so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, captures: bool) -> None:
        self.calls = self.replayed = 0
        self.captures = captures
        self.stream = "the caller's"
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        gpu_self = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = gpu_self.calls + 0.5 * gpu_self.replayed

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return other.at - self.at  # milliseconds

        class CUDAGraph:
            def replay(self) -> None:
                gpu_self.replayed += self.size

        @contextmanager
        def graph(graph: Any) -> Iterator[None]:
            before, stream = gpu_self.calls, gpu_self.stream
            gpu_self.stream = "the capture's"
            yield
            if not gpu_self.captures:
                raise RuntimeError("operation not permitted when stream is capturing")
            graph.size, gpu_self.stream = gpu_self.calls - before, stream

        for name, fake in (("Event", Event), ("CUDAGraph", CUDAGraph), ("graph", graph)):
            monkeypatch.setattr(torch.cuda, name, fake)

    def call(self) -> None:
        self.calls += 1


@pytest.mark.parametrize("captures", [True, False])
def test_the_clock_on_a_gpu(monkeypatch: pytest.MonkeyPatch, captures: bool) -> None:
    fake = FakeGpu(monkeypatch, captures=captures)
    clock = Clock(fake.call, on_gpu=True)
    clock.sample()
    clock.sample()
    assert clock.samples == {"eager": [1e-3, 1e-3]} | ({"graph": [0.5e-3, 0.5e-3]} if captures else {})
    assert clock.seconds == (0.5e-3 if captures else 1e-3)
    assert clock.host_seconds > 0
    assert fake.stream == "the caller's"


def test_a_race_tells_shares_and_leaves_out_who_fails() -> None:
    bench, rows = bench_of()
    turns: list[str] = []

    def broken() -> Callable[[], object]:
        raise ImportError("no such module")

    seconds = race(
        bench,
        "case",
        {
            "a": Contestant(lambda: lambda: turns.append("a"), 1e9),
            "b": Contestant(lambda: lambda: turns.append("b"), 2e9),
            "c": Contestant(broken),
        },
        ceiling="a",
        shape="s",
    )
    assert turns == ["a", "b", "a", "b", "b", "a"]  # to warm up, forwards, backwards
    assert seconds.keys() == {"a", "b"}
    failed, first, second = rows
    assert (failed["who"], failed["error"]) == ("c", "ImportError: no such module")
    assert first["share"] == 1.0
    assert second["share"] == pytest.approx(2 * seconds["a"] / seconds["b"])
    assert (first["shape"], first["unit"]) == ("s", "GB/s")
    bench.deadline = 0.0
    assert race(bench, "late", {"a": Contestant(broken)}) == {}
    assert rows[-1]["error"] == "the stage's time was up"


# --------------------------------------------------------------------------------------------------- targets


def test_targets_are_read_off_the_rows() -> None:
    def row(stage: str, case: str, who: str, us: float, **more: Any) -> Row:
        return {"stage": stage, "case": case, "who": who, "us": us, **more}

    rows = [
        {"stage": "correctness", "case": "tests/ops", "who": "pytest", "passed": False, "value": 0.5},
        row("prefill", "8 x 4096 D128", "quire", 2.0, value=460.0, unit="TFLOP/s"),
        row("prefill", "8 x 4096 D128", "quire, reproducible", 2.2),
        row("peers.conch", "8 x 4096 D128", "quire", 2.0, value=460.0, unit="TFLOP/s"),
        row("peers.conch", "8 x 4096 D128", "vllm's triton", 5.0, value=184.0, unit="TFLOP/s"),
        row("peers.fa3", "8 x 4096 D128", "quire", 1.0),  # another run, not to be compared with
        row("steps", "8B, batch 32", "step", 9.0, value=1.4),
    ]
    for case, share in (("64 x 4096", 0.92), ("8 x 32768", 0.89)):
        rows += [
            row("decode", case, "quire", 1.0, value=3.0, share=share),
            row("decode", case, "quire, blocks of 256", 1.0, value=3.1 if case == "64 x 4096" else 3.0),
            row("peers.fa3", case, "quire", 4.0),
            row("peers.fa3", case, "quire, blocks of 256", 4.0),
            row("peers.fa3", case, "fa3", 6.0),
            row("peers.fa3", case, "fa3, blocks of 256", 5.0 if case == "64 x 4096" else 4.4),
        ]
    found = {one["target"]: one for one in judged(rows)}
    expected = {
        "correctness: tests that pass": (0.5, False),
        "decode 64 x 4096, bf16, 32/8 heads, D 128: share of the copy's bandwidth": (0.92, True),
        "decode 8 x 32768, bf16, 32/8 heads, D 128: share of the copy's bandwidth": (0.89, False),
        "decode against FA3 paged": (1.1, True),
        "decode against FlashInfer": (None, None),
        "decode: blocks of 16 against 256": (3.0 / 3.1, False),
        "prefill, causal, 8 x 4096, D 128": (460.0, True),
        "prefill against vLLM's Triton kernel": (2.5, True),
        "decode step over its floor, 8B": (1.4, False),
        "prefill: cost of being reproducible": (None, None),  # D 64 is missing
    }
    for name, (measured, met) in expected.items():
        assert found[name]["measured"] == (None if measured is None else pytest.approx(measured)), name
        assert found[name]["met"] is met
    assert "vllm's triton 184 TFLOP/s" in found["prefill, causal, 8 x 4096, D 128"]["beside"]
    text = markdown({"device": "none"}, rows)
    assert "| decode against FA3 paged | at least 1 x | 1.1 x | yes |" in text


# ------------------------------------------------------------------------------------------------- libraries

FA3 = (  # the schema that vLLM's library registers
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)


def paged_sdpa(*args: Any) -> list[torch.Tensor]:
    q, k, v, _, _, _, out, starts, _, _, _, lens, _, _, tables, *_ = args
    for s, length in enumerate(lens.tolist()):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        keys, values = (x[tables[s].long()].flatten(0, 1)[:length].transpose(0, 1).float() for x in (k, v))
        first = length - (rows.stop - rows.start)
        mask = torch.arange(length)[None] <= torch.arange(first, length)[:, None]
        found = F.scaled_dot_product_attention(q[rows].transpose(0, 1).float(), keys, values, mask, enable_gqa=True)
        out[rows] = found.transpose(0, 1).to(out.dtype)
    return []


def test_fa3_is_called_by_the_names_of_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    library.define(FA3)
    library.impl("fwd", paged_sdpa, "CPU")
    loaded: list[str] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    bench, rows = bench_of("peers.fa3", Settings(device="cpu", backend="cpu", tiny=True, fa3="/lib.so"))
    libraries.library(bench, "fa3")
    assert loaded[0] == "/lib.so"
    assert not [row for row in rows if "error" in row]
    assert {row["who"] for row in rows} == {
        "copy",
        "product",
        "quire",
        "quire, blocks of 256",
        "fa3",
        "fa3, blocks of 256",
    }
