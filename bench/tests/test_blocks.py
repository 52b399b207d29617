"""quire bench blocks: the memory told is that of the run, and of the arithmetic."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire_bench.engine import blocks
from quire_bench.engine.memory import Moment
from quire_bench.workloads import Workload, workload

pytestmark = pytest.mark.slow

OWN = Workload("own", [[5, 6, 7], [8] * 20, list(range(100, 160))], [4, 30, 9])
SHARED = Workload("shared", [[*range(2, 42), 50 + i, 60 + i] for i in range(5)], [7] * 5)


@pytest.mark.parametrize("work", [OWN, SHARED], ids=lambda work: work.name)
def test_the_memory_is_that_of_the_run(work: Workload) -> None:
    sizes = (1, 4, 16, 256)
    found = list(blocks.sweep(work, sizes, warmup=1, runs=1, num_blocks=400, num_speculative_tokens=0))
    assert [figure.block_size for figure in found] == list(sizes)
    for figure in found:
        # Here the request that computes the shared prefix is a step ahead: it ends before the others take a last block.
        ahead = 4 if work is SHARED and figure.block_size == 1 else 0
        assert figure.throughput.most_blocks == figure.peak_blocks - ahead
        assert figure.memory.fullest.used == figure.peak_blocks * figure.block_size
        assert figure.speed == pytest.approx(work.num_new_tokens / figure.throughput.median)
    if work is SHARED:  # 40 tokens of all prompts stand once: in 40, 10 or 2 full blocks
        assert [figure.peak_blocks for figure in found[:3]] == [40 + 5 * 8, 10 + 5 * 2, 2 + 5 * 1]


def test_by_hand() -> None:
    """Two requests side by side: of 3 prompt tokens each, the first one with 2 new tokens, the second one with 4."""
    work = Workload("two", [[2, 3, 4], [5, 6, 7]], [2, 4])
    in_fours = blocks.paged(work, 4, max_model_len=16)
    assert [(moment.used, moment.live) for moment in in_fours.run.moments] == [(8, 6), (8, 8), (8, 5), (8, 6)]
    assert in_fours.fullest.live == 8  # of the fullest steps the one with most tokens
    assert (in_fours.waste, in_fours.mean.waste) == pytest.approx((0, 1 - 25 / 32))
    assert in_fours.wasted_each == pytest.approx((2 + 0 + 3 + 2) / (2 + 2 + 1 + 1))
    singly = blocks.paged(work, 1, max_model_len=16)
    assert (singly.waste, singly.mean.waste, singly.wasted_each) == (0, 0, 0)
    whole, exact = blocks.contiguous(work, 16)
    assert whole.run.moments[1] == Moment(running=2, used=32, live=8, shared=0, unusable=0, is_short=False)
    assert (whole.waste, exact.fullest.used, exact.waste) == (1 - 8 / 32, 4 + 6, 1 - 8 / 10)


def test_what_is_said_of_block_sizes() -> None:
    """Half a block a request is wasted in the mean: 8 slots with 16, 64 with 128."""
    work = workload("decode")
    wasted = {size: blocks.paged(work, size, 1024).wasted_each for size in (1, 16, 128)}
    assert wasted[1] == 0
    assert wasted[16] == pytest.approx(8, abs=1)
    assert wasted[128] == pytest.approx(64, abs=1)
    assert blocks.contiguous(work, 1024)[0].mean.waste > 0.6


def run(arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench", "blocks", *arguments.split()])
    assert result.exit_code == status, result.output
    return result.stderr if status else result.stdout


def test_commands(tmp_path: Path) -> None:
    tiny = "single --block-size 16 --block-size 256 --warmup 0 --runs 1 --kv-cache-memory 8MiB"
    lines = [json.loads(line) for line in run(f"{tiny} --json --plot {tmp_path / 'x.png'}").splitlines()]
    assert [line["system"] for line in lines] == [
        "paged", "paged", "contiguous, max_model_len", "contiguous, exact length"
    ]  # fmt: skip
    assert [(line["block_size"], line["peak_blocks"], line["table_entries"]) for line in lines[:2]] == [
        (16, 9, 9), (256, 1, 1)
    ]  # fmt: skip
    assert [line["peak_slots"] for line in lines] == [144, 256, 1024, 143]
    assert lines[0]["new_tokens_per_second"] > 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    table = run(tiny).splitlines()
    assert table[0].split()[:2] == ["block", "size"]
    assert [line.split()[0] for line in table[1:]] == ["16", "256", "contiguous,", "contiguous,"]
    assert any(line.endswith("100.0%") for line in table[1:3])


def test_bad_options(tmp_path: Path) -> None:
    assert "there is no workload 'none'" in run("none", status=1)
    assert "block_size is 512; it must be in 1..256" in run("single --block-size 512", status=1)
    assert "a prompt may have at most 1023" in run("prefix --kv-cache-memory 8MiB", status=1)
    assert "there is no directory" in run(f"--plot {tmp_path / 'none' / 'x.png'}", status=1)
