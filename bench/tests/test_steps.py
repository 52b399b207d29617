"""quire bench steps: the steps are those that are named, and their limits are the work over the rates."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import QuireError
from quire.frontend.llm import LLM
from quire_bench.engine import steps
from quire_bench.engine.steps import Case
from quire_bench.kernels import attention
from tests.models.checkpoints import save


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 GB/s and 3 GFLOP/s."""
    monkeypatch.setattr(steps, "read_rate", lambda threads: lambda: 2.0)
    monkeypatch.setattr(steps, "product_rate", lambda dtype, threads: lambda: 3.0)


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    save(tmp_path, "Qwen3_5", vocab_size=2000, num_hidden_layers=4)
    return tmp_path


def test_limits_are_work_over_rates(hybrid: Path, rates: None) -> None:
    llm = LLM(hybrid, kv_cache_memory="64MiB", max_num_seqs=4)
    found = steps.measure(llm, Case(3, 1), steps=2)
    weights = llm.decoder.weight_bytes
    read = weights.layers + weights.head
    assert read < found.bytes_seconds * 2e9 < 2 * read + 2**22  # and the states of three sequences
    assert 6 * read / 4 < found.operations_seconds * 3e9 < 12 * read / 4  # of fp32
    assert found.ratio == pytest.approx(found.seconds / max(found.bytes_seconds, found.operations_seconds))
    assert {"linears", "attention", "states"} <= found.shares.keys()
    assert 0 < sum(found.shares.values()) <= 1
    assert not llm.engine.has_work


def test_a_prompt_is_one_step_of_all_its_tokens(hybrid: Path, rates: None) -> None:
    llm = LLM(hybrid, kv_cache_memory="64MiB", max_num_seqs=4, max_num_batched_tokens=96)
    one, two = (steps.measure(llm, Case(1, length), steps=2) for length in (48, 96))
    assert 1.9 < two.operations_seconds / one.operations_seconds < 2.5
    with pytest.raises(QuireError, match="prompt of 97: a step computed 96 tokens of 1 requests"):
        steps.measure(llm, Case(1, 97), steps=1)
    assert not llm.engine.has_work


@pytest.mark.slow
def test_the_command(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "READ_BYTES", 2**16)
    monkeypatch.setattr(steps, "CASES", (Case(1, 1), Case(1, 40)))
    command = ["bench", "steps", "--model", str(hybrid), "--kv-cache-memory", "64MiB", "--count", "1"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert "decode, 1" in shown.output
    assert "prompt of 40" in shown.output
    lines = CliRunner().invoke(app, [*command, "--quantization", "int8", "--json"]).output.splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["decode, 1", "prompt of 40"]


@pytest.mark.slow
def test_a_prompt_that_does_not_fit_is_refused(tmp_path: Path, rates: None) -> None:
    save(tmp_path, vocab_size=2000, max_position_embeddings=128)
    shown = CliRunner().invoke(app, ["bench", "steps", "--model", str(tmp_path), "--count", "1"])
    assert shown.exit_code == 1
    assert "has a prompt of 2048 tokens; with max_model_len=128" in shown.stderr
