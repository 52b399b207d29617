"""The examples run and say what they promise."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISES = {
    "demo.py": ["tokens", "seconds", "tokens/s", "blocks used", "memory wasted", "def "],
    "offline_batch.py": ["12 tokens, ended by length", "ended by stop", "class Queue:"],
    "streaming.py": ["def parse(line):\n", "--- the first three lines", "blocks in use afterwards: 0"],
    "sampling_tour.py": ["greedy", "min_p 0.2", "2: ", "1: ", "logprob -"],
}


def test_every_example_is_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISES)


@pytest.mark.parametrize("name", PROMISES)
def test_example(name: str) -> None:
    result = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for promise in PROMISES[name]:
        assert promise in result.stdout
