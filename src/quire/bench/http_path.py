"""What the way over HTTP costs: the same requests through `LLM` in a process, and through a server with its client."""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quire.errors import ConfigError, QuireError, check_integer

OFFLINE = """
import json, sys
from quire import LLM
from quire.bench.throughput import measure
from quire.bench.workloads import Workload
from quire.server.load.prompts import random_prompts
model, count, input_len, output_len, seed = sys.argv[1] or None, *map(int, sys.argv[2:])
prompts = random_prompts(count, input_len, output_len, seed)
work = Workload("http", [prompt.content for prompt in prompts], [prompt.max_tokens for prompt in prompts])
print(json.dumps(measure(LLM(model), work, warmup=1, runs=1).as_dict()))
"""
ADDRESS = re.compile(rb"http://127\.0\.0\.1:\d+(?=\D)")  # of the listening line, once it is written to its end
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 120.0, 30.0, 0.05


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
        raise QuireError(_last_line(done.stderr) or f"the process ended with {done.returncode}") from error


@dataclass
class Process:
    """A running `quire serve`."""

    url: str
    pid: int
    # Once it has ended:
    status: int | None = None
    said: str = ""  # on standard error


@contextmanager
def server(*options: str) -> Iterator[Process]:
    """`quire serve` in a process of its own, on a free port, once it is ready. It is stopped at the end.

    Raises QuireError with what it said last where it does not get ready.
    """
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *options]
    with TemporaryDirectory() as directory, (said := Path(directory, "stderr")).open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
        running = Process("", process.pid)
        try:
            running.url = _ready(process, said)
            yield running
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                running.status = process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                running.status = process.wait()
            running.said = said.read_text(errors="replace")


def _ready(process: subprocess.Popen[bytes], said: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = ADDRESS.search(said.read_bytes())
        if found is not None and _healthy(url := found[0].decode()):
            return url
        time.sleep(POLL_SECONDS)
    raise QuireError(f"quire serve did not get ready: {_last_line(said.read_text(errors='replace'))}")


def _healthy(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it said nothing"
