"""Seconds from the start of a process to the first token, offline and served, and to the answer of `quire --help`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from functools import partial

from quire_bench.server.process import server

FIRST_TOKEN = """
import sys
from quire import LLM, SamplingParams
[output] = LLM(sys.argv[1] or None).generate([2], SamplingParams(max_tokens=1, temperature=0.0))
if len(output.outputs[0].token_ids) != 1 or "transformers" in sys.modules:
    raise SystemExit("no token came, or transformers was imported")
"""


def measured(model: str | None) -> dict[str, Callable[[], float]]:
    """Return the measurements: a name, and a function that returns the seconds of one fresh process."""
    return {
        "first token": partial(seconds, [sys.executable, "-c", FIRST_TOKEN, model or ""]),
        "first token that quire serve streams": partial(seconds_served, model),
        "quire --help": partial(seconds, [sys.executable, "-m", "quire", "--help"]),
        "import torch (a floor of the first)": partial(seconds, [sys.executable, "-c", "import torch"]),
    }


def seconds(command: list[str]) -> float:
    """Wall time of one fresh process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - start


def seconds_served(model: str | None) -> float:
    """From the start of a server's process to the first token that a client reads."""
    body = json.dumps({"prompt": [2], "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}).encode()
    start = time.perf_counter()
    with server(*([] if model is None else ["--model", model])) as process:
        request = urllib.request.Request(f"{process.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            answer.readline()
            return time.perf_counter() - start


def measure(model: str | None, runs: int, advance: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    """The seconds of each one's runs, sorted, after one run that warms the page cache.

    `advance` is called after each of all these.
    """
    found = {}
    for name, run in measured(model).items():
        taken = []
        for _ in range(1 + runs):
            taken.append(run())
            advance()
        found[name] = sorted(taken[1:])
    return found
