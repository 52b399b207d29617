"""quire bench latency: every token of every batch is counted once."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import LLM
from quire.cli import app
from quire.errors import ConfigError, QuireError
from quire_bench.engine import latency
from quire_bench.engine.latency import PERCENTS, Batch, Iteration, Latency


@pytest.mark.parametrize("num_speculative_tokens", [0, 5])  # with drafts, several tokens come in a step
def test_counts(num_speculative_tokens: int) -> None:
    llm = LLM(num_blocks=64, num_speculative_tokens=num_speculative_tokens)
    ticks: list[int] = []
    batch = Batch(input_len=20, output_len=6, batch_size=3)
    found = latency.measure(llm, batch, warmup=1, iterations=2, advance=lambda: ticks.append(1))
    assert (len(ticks), len(found.iterations)) == (3, 2)
    for one in found.iterations:
        assert (len(one.ttft), len(one.itl)) == (3, 3 * 5)
        assert min(one.ttft) > 0
        assert max(one.ttft) < one.seconds
        assert sum(one.ttft) + sum(one.itl) <= 3 * one.seconds
    assert llm.engine.scheduler.manager.hits.cached_tokens == 0  # each batch begins without a prefix cache


def test_prompts_are_the_same_every_time_and_share_nothing() -> None:
    batch = Batch(20, 1, 4)
    assert batch.prompts() == batch.prompts()
    assert len({prompt[0] for prompt in batch.prompts()}) == 4
    assert {len(prompt) for prompt in batch.prompts()} == {20}


def test_figures() -> None:
    found = Latency(Batch(8, 2, 2), (Iteration(1.0, (0.1, 0.3), (0.5, 0.7)), Iteration(3.0, (0.2, 0.2), (0.6, 0.6))))
    shown = found.as_dict()
    assert shown["seconds"] == [1.0, 3.0]
    assert (shown["input_len"], shown["output_len"], shown["batch_size"]) == (8, 2, 2)
    assert [shown[name]["mean"] for name in ("latency", "ttft", "itl")] == pytest.approx([2.0, 0.2, 0.6])
    assert [shown["latency"][f"p{percent}"] for percent in PERCENTS] == pytest.approx([1.2, 1.5, 2.0, 2.5, 2.8, 2.98])


def test_bad_batches() -> None:
    for name in asdict(Batch(1, 1, 1)):
        with pytest.raises(ConfigError, match=f"{name} is 0; it must be at least 1"):
            Batch(**(asdict(Batch(1, 1, 1)) | {name: 0}))
    with pytest.raises(QuireError, match="request 0 ended with 4 new tokens; expected 9"):
        latency.measure(LLM(max_model_len=24), Batch(20, 9, 1), 0, 1)


def run(arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", "latency", "--num-blocks", "64", *arguments.split()])
    assert result.exit_code == status, result.output
    return result.stderr if status else result.stdout


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    tiny = "--input-len 8 --output-len 3 --batch-size 2 --num-iters-warmup 0 --num-iters 2"
    shown = json.loads(run(f"{tiny} --json --plot {tmp_path / 'x.png'}"))
    assert len(shown["seconds"]) == 2
    assert shown["ttft"]["p99"] < shown["latency"]["p99"]
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    lines = run(tiny.replace("--output-len 3", "--output-len 1")).splitlines()
    assert [line[:14] for line in lines[:2]] == ["whole batch   ", "first token   "]
    assert all(f"p{percent} " in lines[0] for percent in PERCENTS)
    assert len(lines) == 2  # nothing comes between tokens where there is one
    assert "output_len is 0" in run("--output-len 0", status=1)
    assert "there is no directory" in run(f"--plot {tmp_path / 'none' / 'x.png'}", status=1)
