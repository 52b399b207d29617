"""Seconds from process start to the first token of the embedded model, and of `quire --help`: python bench/startup.py.

Each figure is the median of several fresh processes after one that warms the page cache.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

RUNS = 5
FIRST_TOKEN = """
import sys
from quire import LLM, SamplingParams
[output] = LLM().generate("def fibonacci(", SamplingParams(max_tokens=1, temperature=0.0))
if len(output.outputs[0].token_ids) != 1 or "transformers" in sys.modules:
    raise SystemExit("no token came, or transformers was imported")
"""
COMMANDS = {
    "first token": [sys.executable, "-c", FIRST_TOKEN],
    "quire --help": [sys.executable, "-m", "quire", "--help"],
    "import torch (a floor)": [sys.executable, "-c", "import torch"],
}


def seconds(command: list[str]) -> float:
    """Wall time of one process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print one line a command."""
    for name, command in COMMANDS.items():
        seconds(command)
        runs = [seconds(command) for _ in range(RUNS)]
        print(f"{name:24s} {statistics.median(runs):6.2f} s   ({min(runs):.2f} to {max(runs):.2f})")


if __name__ == "__main__":
    main()
