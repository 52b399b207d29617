"""Engines in alternation on the same prompts, each in a process of its own."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from quire_bench.peers.cases import READY, Case
from quire_bench.peers.process import EngineProcess, Failed
from quire_bench.peers.result import Result
from quire_bench.peers.runners.protocol import Settings
from quire_bench.proc import cpu_flags
from quire_bench.workloads import Workload

KV_CACHE_GIB = 4

Rates: TypeAlias = Callable[[], tuple[float, float]]  # measures GB/s that the memory reads, GFLOP/s of a product
Run: TypeAlias = Callable[[Path, list[int]], float]  # a file of prompts, tokens that have to come for each -> seconds


@dataclass
class Race:
    """The engines that run cases, and their settings."""

    commands: Mapping[str, Sequence[str]]  # engine -> what starts its runner; in the order of their turns
    checkpoints: Mapping[tuple[str, str], Path]  # engine and variant -> the model as that engine wants it
    folder: Path  # for files that nobody needs afterwards; the runners' working directory
    threads: int
    runs: int
    warmup: int
    rates: Rates
    versions: dict[str, str] = field(default_factory=dict)  # of the engines that were started

    def compare(self, cases: Sequence[Case]) -> Iterator[Result]:
        """Run the cases, one after the other; neighbours on the same model with the same processes."""
        for _, group in groupby(cases, lambda case: (case.variant, case.shares_prefix, case.workload == READY)):
            together = list(group)
            with ExitStack() as stack:
                runs: dict[str, Run] = {}
                failures = {}
                for engine in self.commands:
                    own = [case for case in together if engine in case.engines]
                    if not own:
                        continue
                    if own[0].workload == READY:
                        runs[engine] = partial(self._until_first_token, engine, own)
                        continue
                    note(f"{engine} starts on {own[0].variant}")
                    process = self._start(engine, own)
                    stack.callback(process.close)
                    try:
                        self.versions[engine] = process.wait()
                        runs[engine] = process.run
                    except Failed as error:
                        failures[engine] = str(error)
                for case in together:
                    yield self._alternate(case, runs, failures)

    def _alternate(self, case: Case, runs: Mapping[str, Run], failures: Mapping[str, str]) -> Result:
        engines = [engine for engine in self.commands if engine in case.engines]
        checkpoint = self.checkpoints["quire", case.variant]
        weights = [checkpoint] if checkpoint.is_file() else checkpoint.glob("*.safetensors")
        result = Result(
            case,
            weight_bytes=sum(path.stat().st_size for path in weights),
            seconds={engine: [] for engine in engines if engine in runs},
            failures={engine: why for engine, why in failures.items() if engine in engines},
        )
        work = case.work
        for turn in range(self.warmup + self.runs):
            prompts, counts = self._prompts(work, turn), turn >= self.warmup
            for engine in list(result.seconds):
                note(f"{work.name} on {case.variant}, {engine}, run {turn + 1} of {self.warmup + self.runs}")
                try:
                    seconds = runs[engine](prompts, work.new_tokens)
                    result.seconds[engine] += [seconds] * counts
                except Failed as error:
                    result.failures[engine] = str(error)
                    del result.seconds[engine]
            if counts:
                read, product = self.rates()
                result.read.append(read)
                result.product.append(product)
        return result

    def _until_first_token(self, engine: str, cases: Sequence[Case], prompts: Path, new_tokens: list[int]) -> float:
        begun = time.perf_counter()
        process = self._start(engine, cases)
        try:
            self.versions[engine] = process.wait()
            process.run(prompts, new_tokens)
            return time.perf_counter() - begun
        finally:
            process.close()

    def _start(self, engine: str, cases: Sequence[Case]) -> EngineProcess:
        works = [case.work for case in cases]
        lengths = [len(p) + new for work in works for p, new in zip(work.prompts, work.new_tokens, strict=True)]
        settings = Settings(
            model=str(self.checkpoints[engine, cases[0].variant]),
            dtype="bfloat16" if cases[0].quantization else plain_dtype(cpu_flags()),
            quantization=cases[0].at_load,
            threads=self.threads,
            max_model_len=-(-max(lengths) // 256) * 256,
            max_requests=max(len(work.prompts) for work in works),
            max_tokens=max(work.num_prompt_tokens + work.num_new_tokens for work in works),
            prefix_caching=cases[0].shares_prefix,
            kv_cache_gib=KV_CACHE_GIB,
        )
        return EngineProcess(self.commands[engine], settings, self.folder / f"{engine}.log")

    def _prompts(self, work: Workload, turn: int) -> Path:
        """A file with the workload; in each turn with other tokens, so that no cache knows them from the one before."""
        path = self.folder / "prompts.json"
        path.write_text(json.dumps({"prompts": work.shifted(turn).prompts, "new_tokens": work.new_tokens}))
        return path


def plain_dtype(flags: Collection[str]) -> str:
    """In which torch multiplies weights of 16 bits fastest: oneDNN has no products of bf16 for AVX2.

    flags: of the CPU, as `cpu_flags` returns them.
    """
    return "float32" if "avx2" in flags and "avx512f" not in flags else "bfloat16"


def note(what: str) -> None:
    """Tell whoever waits."""
    print(what, file=sys.stderr, flush=True)
