"""Quire beside the engines that people would use instead: the same prompts, in alternation, on one machine.

    python -m bench.peers --models DIR --vllm PYTHON --openvino PYTHON --llama-cpp PYTHON --transformers PYTHON

DIR has checkpoints that bench/make_models.py wrote; PYTHON is the interpreter of an engine's environment, of which its
runner tells more. Each engine has a process of its own, told when to run, and stopped while others do, because
idle engines spin. What the memory reads and what a bf16 product reaches is measured between the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from bench.cases import CASES, ENGINES, PEERS, READY, Case
from bench.contestant import ROOT, Contestant, Failed
from bench.result import COLUMNS, Result, line, short
from bench.runners.protocol import Settings

from quire.bench.workloads import FIRST_TOKEN, VOCABULARY, Workload

KV_CACHE_GIB = 4

Rates: TypeAlias = Callable[[], tuple[float, float]]  # measures GB/s that the memory reads, GFLOP/s of a product
Run: TypeAlias = Callable[[Path, list[int]], float]  # a file of prompts, tokens that have to come for each -> seconds


@dataclass
class Race:
    """How cases are run, and by whom."""

    commands: Mapping[str, Sequence[str]]  # engine -> what starts its runner; in the order of their turns
    checkpoints: Mapping[tuple[str, str], Path]  # engine and model -> the model as that engine wants it
    folder: Path  # for files that nobody needs afterwards
    threads: int
    runs: int
    warmup: int
    rates: Rates
    versions: dict[str, str] = field(default_factory=dict)  # of the engines that were started

    def compare(self, cases: Sequence[Case]) -> Iterator[Result]:
        """Run the cases, one after the other; neighbours on the same model with the same processes."""
        for _, group in groupby(cases, lambda case: (case.model, case.shares_prefix, case.workload == READY)):
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
                    note(f"{engine} starts on {own[0].model}")
                    contestant = self._start(engine, own)
                    stack.callback(contestant.close)
                    try:
                        self.versions[engine] = contestant.wait()
                        runs[engine] = contestant.run
                    except Failed as error:
                        failures[engine] = str(error)
                for case in together:
                    yield self._alternate(case, runs, failures)

    def _alternate(self, case: Case, runs: Mapping[str, Run], failures: Mapping[str, str]) -> Result:
        engines = [engine for engine in self.commands if engine in case.engines]
        weights = self.checkpoints["quire", case.model].glob("*.safetensors")
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
                note(f"{work.name} on {case.model}, {engine}, run {turn + 1} of {self.warmup + self.runs}")
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
        contestant = self._start(engine, cases)
        try:
            self.versions[engine] = contestant.wait()
            contestant.run(prompts, new_tokens)
            return time.perf_counter() - begun
        finally:
            contestant.close()

    def _start(self, engine: str, cases: Sequence[Case]) -> Contestant:
        works = [case.work for case in cases]
        lengths = [len(p) + new for work in works for p, new in zip(work.prompts, work.new_tokens, strict=True)]
        settings = Settings(
            model=str(self.checkpoints[engine, cases[0].model]),
            threads=self.threads,
            max_model_len=-(-max(lengths) // 256) * 256,
            max_requests=max(len(work.prompts) for work in works),
            max_tokens=max(work.num_prompt_tokens + work.num_new_tokens for work in works),
            prefix_caching=cases[0].shares_prefix,
            kv_cache_gib=KV_CACHE_GIB,
        )
        return Contestant(self.commands[engine], settings, self.folder / f"{engine}.log")

    def _prompts(self, work: Workload, turn: int) -> Path:
        """A file with the workload; in each turn with other tokens, so that no cache knows them from the one before."""

        def turned(token: int) -> int:
            return FIRST_TOKEN + (token - FIRST_TOKEN + turn) % (VOCABULARY - FIRST_TOKEN)

        path = self.folder / "prompts.json"
        prompts = [[turned(token) for token in prompt] for prompt in work.prompts]
        path.write_text(json.dumps({"prompts": prompts, "new_tokens": work.new_tokens}))
        return path


def converted(engine: str, python: Path, checkpoint: Path) -> Path:
    """The checkpoint as the engine wants it, made beside it if it is not there yet."""
    target = checkpoint.parent / "converted" / f"{checkpoint.name}-{engine}"
    part = target.with_name(target.name + ".part")
    export = ["export", "openvino", "--task", "text-generation-with-past", "--weight-format", "fp16", "--model"]
    commands: dict[str, list[str | Path]] = {
        "openvino": [python.with_name("optimum-cli"), *export, checkpoint, part],
        "llama-cpp": [python, "-m", "bench.runners.to_gguf", checkpoint, part],
    }
    if engine not in commands:
        return checkpoint
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        begun = time.perf_counter()
        subprocess.run(commands[engine], check=True, cwd=ROOT, stdout=sys.stderr)
        part.rename(target)
        note(f"{checkpoint.name} converted for {engine} in {time.perf_counter() - begun:.0f} s")
    return target


def machine_rates(threads: int) -> Rates:
    """What measures the machine."""
    import torch

    from quire.bench.attention import product_rate, read_rate

    torch.set_num_threads(threads)
    read, product = read_rate(threads), product_rate("bfloat16", threads)
    return lambda: (read(), product())


def report(race: Race, results: Sequence[Result]) -> dict[str, Any]:
    """All figures, for JSON."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": names[0] if names else platform.machine(),
        "threads": race.threads,
        "versions": race.versions,
        "read": statistics.median(rate for result in results for rate in result.read),
        "product": statistics.median(rate for result in results for rate in result.product),
        "results": [result.as_dict() for result in results],
    }


def about(found: dict[str, Any]) -> str:
    """What a report says of the engines and of the machine."""
    versions = ", ".join(f"{ENGINES[engine].title} {version}" for engine, version in found["versions"].items())
    rates = f"{short(found['read'])} GB/s read, {short(found['product'])} GFLOP/s of a bf16 product"
    return f"{versions}. {found['date']}, {found['processor']}, {found['threads']} threads; between the runs {rates}."


def note(what: str) -> None:
    """Tell whoever waits."""
    print(what, file=sys.stderr, flush=True)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The options. Ends the program where they are wrong."""
    cores = len(os.sched_getaffinity(0))
    known = list(dict.fromkeys(case.workload for case in CASES))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="has gpt2, smol135, llama1b, or some")
    for peer in PEERS:
        told = f"the interpreter of {ENGINES[peer].title}'s environment; left out by default"
        parser.add_argument(f"--{peer}", type=Path, metavar="PYTHON", help=told)
    parser.add_argument("--workloads", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))
    parser.add_argument("--runs", type=int, default=5, help="of each engine, that count; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=1, help="runs before those; default: %(default)s")
    parser.add_argument("--threads", type=int, default=cores, help="of each engine; default: %(default)s, all cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", action="store_true", help="print the table as a document wants it")
    options = parser.parse_args(given)
    if not 1 <= options.threads <= cores:
        parser.error(f"--threads is {options.threads}; it must be 1 to {cores}")
    if options.runs < 1 or options.warmup < 0:
        parser.error(f"--runs is {options.runs} and --warmup {options.warmup}; at least 1 and 0")
    # The name that is given leads to an environment, the file behind it does not: no symbolic link is followed.
    peers = {peer: vars(options)[peer.replace("-", "_")] for peer in PEERS}
    options.pythons = {peer: python.absolute() for peer, python in peers.items() if python is not None}
    for peer, python in options.pythons.items():
        if not os.access(python, os.X_OK):
            parser.error(f"--{peer} is {python}; there is no such program")
    options.models = options.models.absolute()
    wanted = [case for case in CASES if case.workload in options.workloads]
    models = list(dict.fromkeys(case.model for case in wanted))
    missing = [model for model in models if not (options.models / model / "config.json").exists()]
    if missing == models:
        parser.error(f"--models is {options.models}; it has none of {', '.join(models)}")
    for model in missing:
        note(f"{options.models} has no {model}, so nothing is measured on it")
    options.cases = [case for case in wanted if case.model not in missing]
    return options


def main(given: Sequence[str] | None = None) -> int:
    """Compare, and print a table as it grows. 1 if an engine failed."""
    options = arguments(given)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])  # the engines inherit it
    pythons = {"quire": Path(sys.executable)} | options.pythons
    checkpoints = {
        (engine, case.model): converted(engine, python, options.models / case.model)
        for engine, python in pythons.items()
        for case in options.cases
        if engine in case.engines
    }
    commands = {engine: [str(python), "-m", ENGINES[engine].runner] for engine, python in pythons.items()}
    results = []
    with TemporaryDirectory() as folder:
        rates = machine_rates(options.threads)
        race = Race(commands, checkpoints, Path(folder), options.threads, options.runs, options.warmup, rates)
        print(line(COLUMNS, options.markdown))
        if options.markdown:
            print("|---" * len(COLUMNS) + "|")
        for result in race.compare(options.cases):
            results.append(result)
            for row in result.rows():
                print(line(row, options.markdown), flush=True)
            for engine, why in result.failures.items():
                note(f"{engine} failed: {why}")
            if options.json:
                options.json.write_text(json.dumps(report(race, results), indent=1) + "\n")
    print()
    print(about(report(race, results)))
    return int(any(result.failures for result in results))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no stopped process is left
    sys.exit(main())
