"""A model computed by several processes, against one process with as many threads; and what one exchange takes."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from quire import LLM, SamplingParams, ops
from quire.errors import ConfigError
from quire.ops.collectives import Communicator, TorchCommunicator

VOCABULARY = 500  # token ids that every model has
SHORT = 16  # tokens of a prompt whose decoding is measured
ROW = 2048  # fp32 numbers of an exchange


@dataclass(frozen=True)
class Found:
    """Medians. A rank of `size` has threads // size threads."""

    size: int
    single: float  # tokens a second of one sequence
    streams: float  # the same of several at a time
    prefill: float  # seconds of a prompt

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self)


def measure(
    model: str | None, sizes: Sequence[int], threads: int, runs: int, steps: int, sequences: int, tokens: int
) -> list[Found]:
    """Each number of ranks in turn, `runs` times.

    steps: that are measured of decoding. tokens: of the prompt whose prefill is. Raises what `LLM` raises.
    """
    if any(threads % size for size in sizes):
        raise ConfigError(f"threads is {threads}; it must be a multiple of each of {', '.join(map(str, sizes))}")
    found: dict[int, list[tuple[float, float, float]]] = {size: [] for size in sizes}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(runs):
            for size in sizes:
                options: dict[str, Any] = {"num_speculative_tokens": 0, "enable_prefix_caching": False}
                with LLM(model, tensor_parallel_size=size, kv_cache_memory="1GiB", **options) as llm:
                    _seconds(llm, tokens, 1, 2)  # what the first steps of a process have to do besides
                    _seconds(llm, SHORT, sequences, 2)
                    found[size].append(
                        (
                            _rate(llm, steps, 1),
                            _rate(llm, steps, sequences),
                            statistics.median(_seconds(llm, tokens, 1, 1) for _ in range(3)),
                        )
                    )
    finally:
        torch.set_num_threads(before)
    return [Found(size, *map(statistics.median, zip(*found[size], strict=True))) for size in sizes]


def _rate(llm: LLM, steps: int, sequences: int) -> float:
    """Tokens a second."""
    took = _seconds(llm, SHORT, sequences, steps + 1) - _seconds(llm, SHORT, sequences, 1)
    return steps * sequences / took


def _seconds(llm: LLM, tokens: int, sequences: int, new: int) -> float:
    prompts = [[(7 * i + 13 * j) % VOCABULARY for i in range(tokens)] for j in range(sequences)]
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def exchange_seconds(cases: Sequence[tuple[str, int, int]]) -> list[float]:
    """Medians of exchanges of rows of 2,048 fp32 numbers between two processes.

    cases: "memory" or "gloo"; the number of rows; how many times to exchange them.
    """
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
        file.truncate(ops.load("cpu").exchange_bytes(2))
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=1))
        work = partial(_rank, file.name, store.port, cases)
        other = multiprocessing.get_context("spawn").Process(target=work, args=(1,))
        other.start()
        try:
            return work(0)
        finally:
            other.join(30)


def _rank(path: str, port: int, cases: Sequence[tuple[str, int, int]], rank: int) -> list[float]:
    torch.set_num_threads(1)
    backend, store = ops.load("cpu"), TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=1))
    memory = torch.from_file(path, shared=True, size=backend.exchange_bytes(2), dtype=torch.uint8)
    exchanges: dict[str, Communicator] = {
        "memory": backend.exchange(memory, rank, 2),
        "gloo": TorchCommunicator(store, rank, 2, size_here=2),
    }
    medians = []
    for through, rows, count in cases:
        x, took = torch.randn(rows, ROW), []
        for _ in range(count):
            start = time.perf_counter()
            exchanges[through].gather(x)
            took.append(time.perf_counter() - start)
        medians.append(statistics.median(took))
    for exchange in exchanges.values():
        exchange.leave()
    return medians
