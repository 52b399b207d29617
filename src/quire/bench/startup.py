"""Seconds from the start of a process to the first token, and to the answer of `quire --help`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

FIRST_TOKEN = """
import sys
from quire import LLM, SamplingParams
[output] = LLM(sys.argv[1] or None).generate([2], SamplingParams(max_tokens=1, temperature=0.0))
if len(output.outputs[0].token_ids) != 1 or "transformers" in sys.modules:
    raise SystemExit("no token came, or transformers was imported")
"""


def commands(model: str | None) -> dict[str, list[str]]:
    """What is measured: a name and a command each."""
    return {
        "first token": [sys.executable, "-c", FIRST_TOKEN, model or ""],
        "quire --help": [sys.executable, "-m", "quire", "--help"],
        "import torch (a floor of the first)": [sys.executable, "-c", "import torch"],
    }


def seconds(command: list[str]) -> float:
    """Wall time of one fresh process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - start


def measure(model: str | None, runs: int) -> dict[str, list[float]]:
    """The seconds of each command's runs, sorted, after one run that warms the page cache."""
    found = {}
    for name, command in commands(model).items():
        seconds(command)
        found[name] = sorted(seconds(command) for _ in range(runs))
    return found


def median(runs: list[float]) -> float:
    """The middle one."""
    return statistics.median(runs)
