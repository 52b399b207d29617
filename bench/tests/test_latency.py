"""quire bench latency: every token of every batch is counted once."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire import LLM
from quire.cli import app
from quire_bench.engine import latency
from quire_bench.engine.latency import PERCENTS, Batch


@pytest.mark.parametrize("num_speculative_tokens", [0, 5])  # with drafts, several tokens come in a step
def test_counts(num_speculative_tokens: int) -> None:
    llm = LLM(num_blocks=64, num_speculative_tokens=num_speculative_tokens)
    ticks: list[int] = []
    batch = Batch(input_len=20, output_len=6, batch_size=3)
    found = latency.measure(llm, batch, warmup=1, iterations=2, advance=lambda: ticks.append(1))
    assert (len(ticks), len(found["latency"]), len(found["ttft"]), len(found["itl"])) == (3, 2, 2 * 3, 2 * 3 * 5)
    assert min(found["ttft"]) > 0
    assert max(found["ttft"]) < max(found["latency"])
    assert sum(found["ttft"]) + sum(found["itl"]) <= 3 * sum(found["latency"])
    assert llm.engine.scheduler.manager.hits.cached_tokens == 0  # each batch begins without a prefix cache


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
