"""quire bench: the figures describe the run, and the workloads are what they say."""

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from quire import LLM
from quire.cli import app
from quire.engine.workloads import WORKLOADS
from quire_bench.engine import loading, startup, throughput
from quire_bench.engine.loading import Loading
from quire_bench.workloads import Workload, workload
from tests.models.checkpoints import save


@pytest.mark.parametrize(
    ("name", "requests", "prompt_tokens", "new_tokens"),
    [
        ("rose", 64, 64 * 856, 64 * 16),
        ("rose_shared", 64, 64 * 856, 64 * 16),
        ("mixed", 48, 13_424, 3_956),
        ("decode", 32, 32 * 16, 32 * 128),
        ("single", 1, 16, 128),
        ("prefill", 1, 512, 1),
        ("prefix", 32, 32 * 1088, 32 * 32),
    ],
)
def test_workloads(name: str, requests: int, prompt_tokens: int, new_tokens: int) -> None:
    work = workload(name)
    assert (len(work.prompts), work.num_prompt_tokens, work.num_new_tokens) == (requests, prompt_tokens, new_tokens)
    assert all(2 <= token < 2000 for prompt in work.prompts for token in prompt)
    assert work == workload(name)


# Figures stand beside those of other engines on the same tokens, so the tokens must never change.
DIGESTS = {
    "rose": "ceb08bb850b2a35e",
    "rose_shared": "bd2ce5780745a40d",
    "mixed": "2f559a964df5fe18",
    "decode": "18d57884a9de2a0c",
    "single": "ed4f14df7c8ed760",
    "prefill": "bba24a0b1149a132",
    "prefix": "e6430e9e615346b9",
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_tokens_of_a_workload_never_change(name: str) -> None:
    content = repr((workload(name).prompts, workload(name).new_tokens))
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == DIGESTS[name]


def test_throughput_counts_what_was_done() -> None:
    work = Workload("tiny", [[5, 6, 7], [8] * 20], [4, 9])
    ticks = []
    found = throughput.measure(LLM(num_blocks=8), work, warmup=1, runs=2, advance=lambda: ticks.append(1))
    figures = found.as_dict()
    assert len(figures["seconds"]) == 2
    assert (figures["prompt_tokens"], figures["new_tokens"]) == (23, 13)
    assert figures["new_tokens_per_second"] == pytest.approx(13 / found.median)
    assert figures["total_tokens_per_second"] == pytest.approx(36 / found.median)
    assert figures["most_blocks"] == 3  # one of 7 tokens, one of 29
    assert throughput.measure(LLM(num_blocks=8), work, warmup=0, runs=1).most_blocks is None
    assert len(ticks) == 3 * 13


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(not loading.STATUS.exists(), reason="only Linux tells how much memory is anonymous")
@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_loading_takes_little_more_memory_than_what_stays(tmp_path: Path, saved: torch.dtype) -> None:
    """A sharded checkpoint of 64 MB with a tied embedding, as it was saved and narrowed."""
    shape = {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
    model = save(tmp_path / "one", dtype=saved, tie_word_embeddings=True, **shape)
    model.save_pretrained(tmp_path / "many", max_shard_size="10MB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    config = tmp_path / "many" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "bfloat16"}))
    found = loading.measure(str(tmp_path / "many"))
    assert found is not None
    assert found.weights == sum(2 * one.numel() for one in model.parameters())
    assert found.weights <= found.resident <= 1.15 * found.weights
    assert found.resident <= found.peak <= 1.15 * found.resident
    assert found.mapped > 0
    assert found.as_dict()["ratio"] == found.peak / found.resident
    assert f"{found.ratio:.2f} times" in loading.told(found)


def run(arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments.split()])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_throughput_is_measured(tmp_path: Path) -> None:
    assert "new tok/s" in run(f"throughput single --warmup 0 --runs 2 --plot {tmp_path / 'throughput.svg'}")
    gathered = json.loads(run("throughput single --warmup 0 --runs 1 --json --attention gather"))
    assert gathered["new_tokens"] == 128
    assert "single" in (tmp_path / "throughput.svg").read_text()
    for command in ("startup", "throughput"):
        shown = CliRunner().invoke(app, ["bench", command, "--plot", str(tmp_path / "x.odd")])
        assert shown.exit_code == 1
        assert "its ending must be one of" in shown.stderr
    refused = CliRunner().invoke(app, ["bench", "throughput", "prefix"])  # longer than the embedded model serves
    assert refused.exit_code == 1
    assert "a prompt may have at most 1023" in refused.stderr


@pytest.mark.slow
@pytest.mark.long
def test_startup_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:  # its four processes start once; usually that is to warm the page cache
        each = startup.measured(None)
        patched.setattr(startup, "measured", lambda model: {name: cache(once) for name, once in each.items()})
        startup_json = run(f"startup --runs 1 --json --plot {tmp_path / 'startup.png'}")
    *seconds, memory = [json.loads(line) for line in startup_json.splitlines()]
    assert [one["what"] for one in seconds][:2] == ["first token", "first token that quire serve streams"]
    assert all(len(one["seconds"]) == 1 and one["median_seconds"] > 0 for one in seconds)
    measured = {one["what"]: one["seconds"] for one in seconds}
    assert memory["what"] == "memory of loading"
    found = None if memory["bytes"] is None else Loading(**{k: v for k, v in memory["bytes"].items() if k != "ratio"})
    with monkeypatch.context() as patched:  # each run of it starts nine processes
        patched.setattr(startup, "measure", lambda *_: measured)
        patched.setattr(loading, "measure", lambda *_: found)
        lines = run("startup --runs 1").splitlines()
        assert lines[0].startswith("first token  ")
        assert lines[-1].startswith("memory of loading  ")
    assert (tmp_path / "startup.png").stat().st_size > 1_000
    refused = CliRunner().invoke(app, ["bench", "startup", "--model", "no such model", "--runs", "1"])
    assert refused.exit_code == 1
    assert "is neither a directory nor the name of a Hugging Face repository" in refused.stderr
