"""quire diff: runs that are alike, planted and real faults, transformers' run, traces, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from quire.cli import app
from quire.diff.compare import compare
from quire.diff.live import Fault, open_live
from quire.diff.run import _Replay, diff, trace
from quire.diff.side import Side
from quire.diff.trace import MARK, Trace
from quire.errors import ConfigError, ModelError, QuireError
from quire.ops import native
from quire.ops.cpu.backend import CpuBackend
from tests.loopback import Quiet, answering
from tests.models.checkpoints import save
from tests.models.encoders import saved

PROMPTS: list[str | list[int]] = [[*range(3, 14)], [*range(50, 73)]]
needs_native = pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama in bf16."""
    path = tmp_path_factory.mktemp("diff") / "llama"
    save(path, "Llama", torch.bfloat16, num_hidden_layers=2)
    return str(path)


def quire(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["diff", *arguments])


def test_a_model_does_not_differ_from_itself() -> None:
    result = quire()
    assert result.exit_code == 0, result.output
    assert "\ndifferences        0 of 5,032\n" in result.stdout
    assert "0 of 74 rows choose another one" in result.stdout


PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"options": {"dtype": "float32"}}, {"options": {"dtype": "bfloat16"}}),
    ({}, {"options": {"quantization": "int8", "kv_cache_dtype": "int8"}}),
    ({"isa": "avx2"}, {"isa": "avx512"}),
]


@needs_native
@pytest.mark.parametrize(("a", "b"), PAIRS, ids=["fp32 and bf16", "bf16 and int8", "avx2 and avx512"])
def test_planted_changes_are_named(a: dict[str, Any], b: dict[str, Any], model: str) -> None:
    """Without them nothing is named, although most outputs differ."""
    if missing := {a.get("isa"), b.get("isa")} - {None, *native.runnable(native.library_path())}:
        pytest.skip(f"this machine does not run {missing}")
    report, planted = diff(Side(model, **a), Side(model, **b), PROMPTS, num_planted=50)
    assert report.named is None
    assert report.differing > report.compared / 2 or "isa" in a
    assert len(planted) == 50
    assert [one for one in planted if one.named != one.operator] == []


@needs_native
def test_an_indexer_that_chooses_other_keys_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It, and not the attention after it; so are planted choices of other keys."""
    save(tmp_path / "sparse", "DeepseekV32")
    side, prompts = Side(str(tmp_path / "sparse")), PROMPTS[1:]
    kept = trace(side, prompts)  # type: ignore[arg-type]
    kept.save(tmp_path / "before")
    name = next(name for name in kept.about.widths if name.endswith("select"))
    assert kept.prompts[0].outputs[name].values.sum(1).tolist() == [min(row + 1, 9) for row in range(23)]
    with open_live(side) as live:
        replay = _Replay.of(live, kept, side)
        assert isinstance(replay, _Replay)
        assert {error.excess for error in replay.errors()} == {0.0}
        for row, column in ((22, None), (22, 40), (3, 1)):
            assert replay.named(Fault(name, 0, row, column, 0.1)) == name
    scores = CpuBackend._index_scores
    monkeypatch.setattr(CpuBackend, "_index_scores", lambda self, q, *others: scores(self, -q, *others))
    report, _ = diff(Side(str(tmp_path / "before")), side)
    assert report.named is not None
    assert report.named.operator == name


@needs_native
def test_a_kernel_that_is_wrong_in_one_dtype_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    activate = CpuBackend.activate

    def wrong(self: CpuBackend, x: Tensor, *arguments: Any) -> Tensor:
        found = activate(self, x, *arguments)
        return found * 1.1 if x.dtype == torch.bfloat16 else found

    monkeypatch.setattr(CpuBackend, "activate", wrong)
    report, _ = diff(Side(model, {"dtype": "float32"}), Side(model), PROMPTS)
    assert report.named is not None
    assert report.named.operator == "layers.0.activation"


def test_transformers_run_differs_from_the_layer_that_was_changed_on(tmp_path: Path) -> None:
    save(tmp_path / "one", "Gemma2")
    save(tmp_path / "two", "Gemma2")
    weights = load_file(tmp_path / "two" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] += 0.05
    save_file(weights, tmp_path / "two" / "model.safetensors", {"format": "pt"})
    theirs = Side(str(tmp_path / "one"), run="transformers")
    same, _ = diff(Side(str(tmp_path / "one")), theirs, PROMPTS)
    assert same.granularity == "layers"
    assert [one.name for one in same.growth] == [
        "embedding",
        *(f"layers.{i}" for i in range(3)),
        "final_norm",
        "logits",
    ]
    assert all(one.relative < 1e-5 for one in same.growth)
    assert not same.flips
    assert not same.greedy
    other, _ = diff(theirs, Side(str(tmp_path / "two")), PROMPTS)
    assert all(one.relative < 1e-5 for one in other.growth[:2])
    assert all(one.relative > 1e-3 for one in other.growth[2:])


def test_traces_compare_as_runs_do(model: str, tmp_path: Path) -> None:
    """Whole ones exactly; those of samples name the same operator and row, and count the same rows."""
    one, two = Side(model), Side(model, {"dtype": "float32"})
    live, _ = diff(one, two, PROMPTS)
    trace(one, PROMPTS).save(tmp_path / "whole")  # type: ignore[arg-type]
    trace(one, PROMPTS, 0).save(tmp_path / "samples")  # type: ignore[arg-type]
    whole, _ = diff(Side(str(tmp_path / "whole")), two)
    assert whole == live
    sampled, _ = diff(Side(str(tmp_path / "samples")), two)
    assert sampled.sampled == 2
    assert sampled.differing == live.differing
    assert live.first is not None
    assert sampled.first is not None
    assert (sampled.first.output, sampled.first.row) == (live.first.output, live.first.row)
    assert (tmp_path / "samples").stat().st_size < (tmp_path / "whole").stat().st_size
    again, _ = diff(Side(str(tmp_path / "samples")), one)
    assert again.differing == 0


def test_a_trace_is_fetched_from_a_url(model: str, tmp_path: Path) -> None:
    class Published(Quiet):
        def do_GET(self) -> None:
            path = tmp_path / self.path[1:]
            self.send_response(200 if path.exists() else 404)
            self.end_headers()
            self.wfile.write(path.read_bytes() if path.exists() else b"")

    trace(Side(model), PROMPTS).save(tmp_path / "before")  # type: ignore[arg-type]
    (tmp_path / "notes").write_text("none")
    with answering(Published) as url:
        report, _ = diff(Side(f"{url}/before"), Side(model))
        for name, message in {
            "none": "cannot be fetched: HTTP Error 404",
            "notes": f"{url}/notes is not a trace",
        }.items():
            with pytest.raises(ConfigError, match=message):
                diff(Side(f"{url}/{name}"), Side(model))
    assert (report.differing, report.rows) == (0, 34)


def test_the_command_prints_json_and_plots(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "prompts").write_text("[5, 6, 7]\n")
    options = ["--prompts", str(tmp_path / "prompts"), "--a", "dtype=float32", "--plant", "2", "--json"]
    result = quire(model, *options, "--plot", str(tmp_path / "growth.svg"))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["first"]["operator"] == "layers.0.input_norm"
    assert found["first"]["ulps"] < 1
    assert [one["named"] == one["operator"] for one in found["planted"]] == [True] * 2
    assert "<svg" in (tmp_path / "growth.svg").read_text()


def test_what_cannot_be_compared_is_refused(model: str, tmp_path: Path) -> None:
    kept = trace(Side(model), [[1, 2, 3]])
    kept.save(tmp_path / "trace")
    with pytest.raises(ConfigError, match="prompt 0 has 3 tokens in A, and 2 or other ones in B"):
        compare(kept, trace(Side(model), [[1, 2]]))
    save_file({"x": torch.zeros(1)}, tmp_path / "newer", {MARK: "99"})
    saved(tmp_path / "bert", "bert")
    save(tmp_path / "adapted", "Olmo")
    for name, message in {
        str(tmp_path / "newer"): "is a trace of version 99, and this quire reads version 1",
        f"{model}/model.safetensors": "is a safetensors file, but not a trace",
        f"{model}/config.json": "is not a trace",
        str(tmp_path / "none"): "there is no directory",
        str(tmp_path / "bert"): "is an encoder, which writes no tokens",
        "src/quire/embedded": "where A has embedding of width 48, B has embedding of width 256",
    }.items():
        with pytest.raises(QuireError, match=message):
            diff(Side(str(tmp_path / "trace")), Side(name))
    with pytest.raises(ModelError, match="whose operators cannot be recorded"):
        diff(Side(str(tmp_path / "adapted")), Side(model), PROMPTS)
    assert Trace.load(tmp_path / "trace").about == kept.about
    for arguments, message in {
        ("--b", "colour=red"): "there is no setting 'colour'",
        ("--b", "dtype"): "it must be NAME=VALUE",
        ("--b", "isa=sse"): "this machine does not run the kernels for 'sse'",
        (str(tmp_path / "trace"),): "there is no B",
        (str(tmp_path / "trace"), model, "--prompts", "README.md"): "a trace has its prompts",
        ("--b", "run=transformers", "--plant", "1"): "there is no replay",
        (model,): "has no tokenizer",
    }.items():
        result = quire(*arguments)
        assert result.exit_code == 1
        assert message in result.stderr, result.stderr
