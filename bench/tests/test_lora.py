"""What adapters cost: that the steps which are timed have them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from quire.frontend.llm import LLM
from quire_bench.cli import app
from quire_bench.engine.lora import measure


def test_steps_with_adapters_are_timed() -> None:
    llm = LLM(num_blocks=256, enable_lora=True, max_loras=3, max_lora_rank=4, num_speculative_tokens=0)
    seen: list[set[int]] = []
    run = llm.engine.runner.run

    def watched(batch: object) -> object:
        slots = batch.lora_slots  # type: ignore[attr-defined]
        seen.append(set() if slots is None else set(slots.tolist()))
        return run(batch)  # type: ignore[arg-type]

    llm.engine.runner.run = watched  # type: ignore[method-assign,assignment]
    found = measure(llm, adapters=3, rank=4, streams=5, steps=2, rounds=1)
    assert set() in seen
    assert {0, 1, 2} in seen
    assert found.adapter_bytes > 0
    assert found.ratio == found.seconds / found.alone_seconds


@pytest.mark.slow
def test_the_command_prints_figures() -> None:
    command = ["lora", "--adapters", "2", "--rank", "2", "--streams", "3", "--steps", "1", "--rounds", "1", "--json"]
    result = CliRunner().invoke(app, [*command, "--kv-cache-memory", "16MiB"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["adapters"], figures["rank"], figures["streams"]) == (2, 2, 3)
    assert figures["seconds"] > 0
