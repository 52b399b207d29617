"""Quire beside the engines that people would use instead: the same prompts, in alternation, on one machine.

    python -m quire_bench.peers --models DIR --vllm PYTHON --openvino PYTHON --llama-cpp PYTHON --mistralrs PYTHON

DIR has checkpoints that `python -m quire_bench.peers.make_models DIR` wrote; PYTHON is the interpreter of an engine's
environment, of which its runner says more. Where `--quantization` is int8 or int4, each engine rounds the model in its
own way; where it is awq, all have one checkpoint, which `make_awq` writes; where it is a kind of GGUF file, Quire and
llama.cpp have one file, which llama.cpp's quantiser writes. Weights that are not quantised vLLM and transformers
multiply in bf16, on a CPU with AVX2 and without AVX-512 in fp32. Each engine has a process of its own, which is asked
to run and stopped while others do, because idle engines spin. What the memory reads and what a bf16 product reaches is
measured between the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quire_bench.peers.cases import CASES, ENGINES, GGUF, PEERS, Case
from quire_bench.peers.process import runners_in
from quire_bench.peers.race import Race, Rates, note
from quire_bench.peers.result import COLUMNS, Result, line, short
from quire_bench.proc import cpu_flags, num_cores, processor
from quire_bench.tables import markdown_rule, save


def converted(engine: str, pythons: Mapping[str, Path], case: Case, checkpoint: Path, folder: Path) -> Path:
    """The case's checkpoint as the engine wants it, made if it is not there yet. folder: from `runners_in`."""
    python = pythons[engine]
    if case.quantization in GGUF:
        return _gguf(pythons["llama-cpp"], checkpoint, folder, case.quantization)
    if case.quantization == "awq":
        return _made(checkpoint, "awq", [sys.executable, "-m", "quire_bench.peers.make_awq", checkpoint], folder)
    environment = ENGINES[engine].environment or engine
    if environment == "openvino":
        export: list[str | Path] = ["export", "openvino", "--task", "text-generation-with-past", "--model", checkpoint]
        export += ["--weight-format", case.quantization or "fp16"]
        if case.quantization == "int4" and json.loads((checkpoint / "config.json").read_text())["hidden_size"] % 128:
            export += ["--group-size", "64"]  # it wants groups that divide
        name = "openvino" if case.quantization is None else f"openvino-{case.quantization}"
        return _made(checkpoint, name, [python.with_name("optimum-cli"), *export], folder)
    if environment == "llama-cpp":
        kinds = {None: None, "int8": "q8_0", "int4": "q4_k_m" if engine == "llama-cpp-k" else "q4_0"}
        return _gguf(python, checkpoint, folder, kinds[case.quantization])
    return checkpoint


def _gguf(python: Path, checkpoint: Path, folder: Path, kind: str | None) -> Path:
    """The checkpoint as a GGUF file of that kind, in bf16 where it is None. python: of llama.cpp's environment."""
    to_gguf = [str(python), "-m", "quire_bench.peers.runners.to_gguf", str(checkpoint)]
    plain = _made(checkpoint, "llama-cpp.gguf", to_gguf, folder)
    if kind is None:
        return plain
    quantize = [str(python), "-m", "quire_bench.peers.runners.quantize_gguf", str(plain)]
    return _made(checkpoint, f"llama-cpp-{kind}.gguf", quantize, folder, kind)


def _made(checkpoint: Path, name: str, command: Sequence[str | Path], folder: Path, *after: str) -> Path:
    """Convert a checkpoint by a command, which takes its path as an argument before those in `after`."""
    target = checkpoint.parent / "converted" / f"{checkpoint.name}-{name}"
    part = target.with_name(target.name + ".part")
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        begun = time.perf_counter()
        subprocess.run([*command, part, *after], check=True, cwd=folder, stdout=sys.stderr)
        part.rename(target)
        note(f"{target.name} made in {time.perf_counter() - begun:.0f} s")
    return target


def machine_rates(threads: int) -> Rates:
    """Return a function that measures the machine's rates."""
    import torch

    from quire_bench.kernels.attention import product_rate, read_rate

    torch.set_num_threads(threads)
    read, product = read_rate(threads), product_rate("bfloat16", threads)
    return lambda: (read(), product())


def report(race: Race, results: Sequence[Result]) -> dict[str, Any]:
    """All figures, for JSON."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "processor": processor(),
        "threads": race.threads,
        "versions": race.versions,
        "read": statistics.median(rate for result in results for rate in result.read),
        "product": statistics.median(rate for result in results for rate in result.product),
        "results": [result.as_dict() for result in results],
    }


def about(found: dict[str, Any]) -> str:
    """Return the line of a report about the engines and the machine."""
    versions = ", ".join(f"{ENGINES[engine].title} {version}" for engine, version in found["versions"].items())
    rates = f"{short(found['read'])} GB/s read, {short(found['product'])} GFLOP/s of a bf16 product"
    return f"{versions}. {found['date']}, {found['processor']}, {found['threads']} threads; between the runs {rates}."


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """The options. Ends the program where they are wrong."""
    cores = num_cores()
    known = list(dict.fromkeys(case.workload for case in CASES))
    kinds = list(dict.fromkeys(case.quantization or "none" for case in CASES))
    parser = argparse.ArgumentParser(prog="python -m quire_bench.peers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--models",
        type=Path,
        required=True,
        metavar="DIR",
        help="has gpt2, smol135, llama1b, qwen35_08b, qwen35_2b, or some",
    )
    for peer in PEERS:
        message = f"the interpreter of {ENGINES[peer].title}'s environment; left out by default"
        parser.add_argument(f"--{peer}", type=Path, metavar="PYTHON", help=message)
    parser.add_argument("--workloads", nargs="+", choices=known, default=known, metavar="NAME", help=", ".join(known))
    parser.add_argument(
        "--quantization", nargs="+", choices=kinds, default=kinds, metavar="NAME", help=", ".join(kinds)
    )
    parser.add_argument("--runs", type=int, default=5, help="of each engine, that count; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=1, help="runs before those; default: %(default)s")
    parser.add_argument("--threads", type=int, default=cores, help="of each engine; default: %(default)s, all cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the table there, as bench/results keeps it")
    parser.add_argument("--markdown", action="store_true", help="print the table as a document wants it")
    options = parser.parse_args(given)
    if not 1 <= options.threads <= cores:
        parser.error(f"--threads is {options.threads}; it must be 1 to {cores}")
    if options.runs < 1 or options.warmup < 0:
        parser.error(f"--runs is {options.runs} and --warmup {options.warmup}; at least 1 and 0")
    # The name that is given leads to an environment, the file after it does not: no symbolic link is followed.
    peers = {peer: vars(options)[peer.replace("-", "_")] for peer in PEERS}
    options.pythons = {peer: python.absolute() for peer, python in peers.items() if python is not None}
    for peer, python in options.pythons.items():
        if not os.access(python, os.X_OK):
            parser.error(f"--{peer} is {python}; there is no such program")
    options.models = options.models.absolute()
    wanted = [case for case in CASES if case.workload in options.workloads]
    wanted = [case for case in wanted if (case.quantization or "none") in options.quantization]
    models = list(dict.fromkeys(case.model for case in wanted))
    missing = [model for model in models if not (options.models / model / "config.json").exists()]
    if missing == models:
        parser.error(f"--models is {options.models}; it has none of {', '.join(models)}")
    for model in missing:
        note(f"{options.models} has no {model}, so nothing is measured on it")
    options.cases = [
        case
        for case in wanted
        if case.model not in missing and (case.quantization not in GGUF or "llama-cpp" in options.pythons)
    ]
    return options


def interpreters(given: Mapping[str, Path], cases: Sequence[Case]) -> dict[str, Path]:
    """Those of all engines that take part, by engine. given: those of environments."""
    found = {}
    flags = cpu_flags()
    for name, engine in ENGINES.items():
        home = engine.environment or name
        if home not in given or not any(name in case.engines for case in cases):
            continue
        if engine.cpu_flag and engine.cpu_flag not in flags:
            note(f"this CPU has no {engine.cpu_flag}, so {engine.title} is left out: it would be {ENGINES[home].title}")
            continue
        found[name] = given[home]
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Compare, and print a table as it grows. 1 if an engine failed."""
    options = arguments(given)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.threads])  # the engines inherit it
    pythons = interpreters({"quire": Path(sys.executable)} | options.pythons, options.cases)
    commands = {engine: [str(python), "-m", *ENGINES[engine].runner.split()] for engine, python in pythons.items()}
    results = []
    with TemporaryDirectory() as made:
        folder = runners_in(Path(made))
        checkpoints = {
            (engine, case.variant): converted(engine, pythons, case, options.models / case.model, folder)
            for engine in pythons
            for case in options.cases
            if engine in case.engines
        }
        rates = machine_rates(options.threads)
        race = Race(commands, checkpoints, folder, options.threads, options.runs, options.warmup, rates)
        print(line(COLUMNS, options.markdown))
        if options.markdown:
            print(markdown_rule(len(COLUMNS)))
        for result in race.compare(options.cases):
            results.append(result)
            for row in result.rows():
                print(line(row, options.markdown), flush=True)
            for engine, why in result.failures.items():
                note(f"{engine} failed: {why}")
            if options.json:
                options.json.write_text(json.dumps(report(race, results), indent=1) + "\n")
    rows = (dict(zip(COLUMNS, row, strict=True)) for result in results for row in result.rows())
    save(options.save, "Other engines", rows)
    print()
    print(about(report(race, results)))
    return int(any(result.failures for result in results))
