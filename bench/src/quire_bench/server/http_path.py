"""What the way over HTTP costs: the same requests through `LLM` in a process, and through a server with its client."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.errors import ConfigError, QuireError, check_integer
from quire_bench.server.process import START_SECONDS, last_line, server

OFFLINE = """
import json, sys
from quire import LLM
from quire_bench.engine.throughput import measure
from quire_bench.workloads import Workload
from quire_bench.server.prompts import random_prompts
model, count, input_len, output_len, seed = sys.argv[1] or None, *map(int, sys.argv[2:])
prompts = random_prompts(count, input_len, output_len, seed)
work = Workload("http", [prompt.content for prompt in prompts], [prompt.max_tokens for prompt in prompts])
print(json.dumps(measure(LLM(model), work, warmup=1, runs=1).as_dict()))
"""


@dataclass(frozen=True)
class Load:
    """Requests that all begin at once: random prompts of one length, as many tokens to generate for each."""

    model: str | None
    concurrency: int
    input_len: int
    output_len: int

    def __post_init__(self) -> None:
        for name in ("concurrency", "input_len", "output_len"):
            check_integer(ConfigError, name, getattr(self, name), 1)

    @property
    def num_new_tokens(self) -> int:
        """Tokens to generate, of all requests."""
        return self.concurrency * self.output_len


@dataclass(frozen=True)
class Pair:
    """One run each way, in seconds."""

    offline_seconds: float
    http_seconds: float
    client_cpu_seconds: float  # of http_seconds, on a core that the server could have used
    chunks: int  # that came over HTTP: where they are fewer than the tokens, less was asked of the way


@dataclass(frozen=True)
class Overhead:
    """The runs, in order."""

    load: Load
    pairs: tuple[Pair, ...]

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON: medians, and all runs."""
        offline = statistics.median(pair.offline_seconds for pair in self.pairs)
        http = statistics.median(pair.http_seconds for pair in self.pairs)
        without = statistics.median(pair.http_seconds - pair.client_cpu_seconds for pair in self.pairs)
        tokens = self.load.num_new_tokens
        return {
            "concurrency": self.load.concurrency,
            "input_len": self.load.input_len,
            "output_len": self.load.output_len,
            "offline_tokens_per_second": tokens / offline,
            "http_tokens_per_second": tokens / http,
            "http_tokens_per_second_without_client": tokens / without,
            "tokens_per_chunk": tokens / statistics.median(pair.chunks for pair in self.pairs),
            "client_cpu_seconds": statistics.median(pair.client_cpu_seconds for pair in self.pairs),
            "ratio": offline / http,
            "ratio_without_client": offline / without,
            "offline_seconds": [pair.offline_seconds for pair in self.pairs],
            "http_seconds": [pair.http_seconds for pair in self.pairs],
        }


def measure(load: Load, runs: int, timeout: float, advance: Callable[[], None] = lambda: None) -> Overhead:
    """Measure both ways in turns, each time in fresh processes and after a run that warms up.

    advance is called after each of the 2 x runs. Raises QuireError where a process fails or tokens are missing.
    """
    pairs = []
    options = [] if load.model is None else ["--model", load.model]
    for seed in range(runs):
        offline = _offline(load, seed, timeout)
        advance()
        with server(*options) as process:
            _client(load, process.url, runs + seed, timeout)  # warms up; other prompts: none is found in the cache
            http = _client(load, process.url, seed, timeout)
        advance()
        if (came := http["output_tokens"]) != load.num_new_tokens:
            raise QuireError(f"{came} tokens came over HTTP; expected {load.num_new_tokens}. {http['errors']}")
        pairs.append(Pair(offline, http["seconds"], http["client_cpu_seconds"], http["chunks"]))
    return Overhead(load, tuple(pairs))


def _offline(load: Load, seed: int, timeout: float) -> float:
    sizes = (load.concurrency, load.input_len, load.output_len, seed)
    figures = _run([sys.executable, "-c", OFFLINE, load.model or "", *map(str, sizes)], timeout)
    return float(figures["median_seconds"])


def _client(load: Load, url: str, seed: int, timeout: float) -> Any:
    options = {
        "--url": url,
        "--num-prompts": load.concurrency,
        "--random-input-len": load.input_len,
        "--random-output-len": load.output_len,
        "--seed": seed,
        "--timeout": timeout,
    }
    arguments = [str(word) for option in options.items() for word in option]
    return _run([sys.executable, "-m", "quire", "bench", "serve", *arguments, "--json"], timeout + START_SECONDS)


def _run(command: list[str], timeout: float) -> Any:
    """What a process prints as JSON in its last line."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired as error:
        raise QuireError(f"{' '.join(command)[:60]}... did not end within {timeout:g} s") from error
    except (ValueError, IndexError) as error:
        raise QuireError(last_line(done.stderr) or f"the process ended with {done.returncode}") from error
