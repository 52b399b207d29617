"""Everything that is to be known of a GPU, in one command of less than ten minutes.

    python -m quire_bench.gpu --json figures.json --markdown figures.md

Each stage runs in a process of its own with a limit to its time: one that fails, hangs or takes the GPU's context with
it leaves the others alone, and what it had found until then stays. The report is written after every stage. First the
repository's tests of the operators run, and with them, to fill the caches of compilers, the stages that compile much;
their figures of then are not reported. All that is timed runs alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from quire import ops
from quire.errors import ConfigError, QuireError
from quire.progress import progress_bar
from quire_bench.gpu import attention, engine, libraries, short
from quire_bench.gpu.common import Bench, Row, Settings, Stage, ceilings, shortened
from quire_bench.gpu.linears import linears
from quire_bench.gpu.report import TARGETS, Target, judged, markdown
from quire_bench.gpu.small import small
from quire_bench.gpu.sweep import sweep
from quire_bench.tables import save

ROOT = Path(__file__).parents[4]  # of the repository, where it is run from a clone


def correctness(bench: Bench) -> None:
    """Stage: the repository's tests of the operators on this backend and device, which compare them with float64."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", bench.settings.backend]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "6"]
    command += ["tests/ops/test_cascade.py"] if bench.settings.tiny else ["tests/ops"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    counts = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    share = counts.get("passed", 0) / max(1, sum(counts.values()))
    bench.row("tests/ops", "pytest", passed=done.returncode == 0, value=share, note=shortened(done.stdout, 1500))


STAGES: dict[str, Stage] = {
    "correctness": Stage(correctness, 120, beside=True),
    "ceilings": Stage(ceilings, 25),
    "decode": Stage(attention.decode, 60, compiles=True),
    "prefill": Stage(attention.prefill, 60, compiles=True),
    "cascade": Stage(attention.cascade, 40, compiles=True),
    "engine": Stage(engine.engine, 110, compiles=True),
    "engine.transformers": Stage(engine.transformers_batching, 60),
    "steps": Stage(engine.steps, 75, compiles=True),
    **{
        f"peers.{name}": Stage(partial(libraries.library, name=name), 40, compiles=name in ("flashinfer", "flex"))
        for name in (*libraries.MODULES, "fa3")
    },
    "small": Stage(small, 40, compiles=True),
    "linears": Stage(linears, 60, compiles=True),
    "sweep": Stage(sweep, 90, compiles=True),
    **{f"short.{name}": stage for name, stage in short.STAGES.items()},
}


def chosen(only: str | None, settings: Settings) -> dict[str, Stage]:
    """The stages of these names, all parts of them; without names all that can run here but those of `short`.

    Raises ConfigError for an unknown name.
    """
    if only is not None:
        wanted = only.split(",")
        for name in wanted:
            if not any(name in (stage, stage.split(".")[0]) for stage in STAGES):
                known = dict.fromkeys(stage.split(".")[0] for stage in STAGES)
                raise ConfigError(f"there is no stage {name!r}; there are {', '.join(known)}, and parts: peers.sdpa")
        return {name: stage for name, stage in STAGES.items() if name in wanted or name.split(".")[0] in wanted}
    absent = {f"peers.{name}" for name, module in libraries.MODULES.items() if not _importable(module)}
    absent |= set() if _importable("pytest") and (ROOT / "tests" / "ops").is_dir() else {"correctness"}
    absent |= set() if settings.fa3 else {"peers.fa3"}
    absent |= set() if _importable("transformers") else {"engine.transformers"}
    return {name: stage for name, stage in STAGES.items() if name not in absent and not name.startswith("short.")}


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # its parent is missing, say
        return False


class Warnings(logging.Handler):
    """Turns the warnings of Quire into rows, such as that a graph could not be captured."""

    def __init__(self, name: str, emit: Callable[[Row], None]) -> None:
        super().__init__(logging.WARNING)
        self.stage, self.emit_row = name, emit

    def emit(self, record: logging.LogRecord) -> None:
        """One warning."""
        self.emit_row({"stage": self.stage, "case": "stage", "who": "warning", "note": shortened(self.format(record))})


def run_stage(name: str, settings: Settings, seconds: float, emit: Callable[[Row], None]) -> None:
    """One stage, here. Its failure is a row."""
    warnings, log = Warnings(name, emit), logging.getLogger("quire")
    log.addHandler(warnings)
    try:
        STAGES[name].run(Bench(settings, name, emit, time.monotonic() + seconds))
    except Exception as error:  # of any kind: the others still run
        shown = "".join(traceback.format_exception(error)[-3:])
        emit({"stage": name, "case": "stage", "who": "", "error": shortened(shown, 1500)})
    finally:
        log.removeHandler(warnings)


class Child:
    """One stage in a process of its own, which writes its rows into a file."""

    def __init__(self, name: str, settings: Settings, seconds: float, folder: Path) -> None:
        self.name, self.seconds, self.start = name, seconds, time.monotonic()
        self.rows_file, self.log = folder / f"{name}.jsonl", folder / f"{name}.log"
        self.rows_file.write_text("")
        order = {
            "stage": name,
            "settings": asdict(settings),
            "until": time.time() + seconds,
            "rows": str(self.rows_file),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire_bench.gpu", "--child", json.dumps(order)],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that compilers that it started end with it
            )

    def rows(self) -> list[Row]:
        """Wait until it ends, or its time is up and some more: what it found."""
        reason = ""
        try:
            code = self.process.wait(max(0.1, self.start + self.seconds + 5 - time.monotonic()))
            if code != 0:
                reason = f"its process ended with {code}: {shortened(self.log.read_text(errors='replace'), 1200)}"
        except subprocess.TimeoutExpired:
            reason = f"stopped after {self.seconds:.0f} s: {shortened(self.log.read_text(errors='replace'), 600)}"
        finally:
            self.stop()
        rows = []
        for line in self.rows_file.read_text().splitlines():
            with suppress(ValueError):  # it was stopped while it wrote
                rows.append(json.loads(line))
        if reason:
            rows.append({"stage": self.name, "case": "stage", "who": "", "error": reason})
        return rows

    def stop(self) -> None:
        """End it and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def child(order: dict[str, Any]) -> None:
    """The other end of `Child`. Ends the process at once: threads that others left behind would hold it up."""
    with Path(order["rows"]).open("a") as file:

        def emit(row: Row) -> None:
            file.write(json.dumps(row) + "\n")
            file.flush()

        run_stage(order["stage"], Settings(**order["settings"]), order["until"] - time.time(), emit)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def environment(settings: Settings) -> dict[str, Any]:
    """Return the device, the versions and the time of this run."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("triton", "transformers", "flashinfer", "conch"):
        if _importable(name):
            with suppress(importlib.metadata.PackageNotFoundError):
                versions[name] = importlib.metadata.version(
                    {"flashinfer": "flashinfer-python", "conch": "conch-triton-kernels"}.get(name, name)
                )
    on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(settings.device) if on_gpu else platform.processor() or "cpu",
        "backend": settings.backend,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **versions,
    }


@dataclass
class Report:
    """All rows so far, and the files that they are written to."""

    environment: dict[str, Any]
    json_path: Path | None
    markdown_path: Path | None
    rows: list[Row]
    targets: tuple[Target, ...] = TARGETS

    def add(self, name: str, rows: list[Row], seconds: float) -> None:
        """Take over a stage's rows and write everything."""
        self.rows += [*rows, {"stage": name, "case": "stage", "who": "time", "seconds": round(seconds, 1)}]
        errors = sum("error" in row or row.get("passed") is False for row in rows)
        say(f"{name:24s} {seconds:6.1f} s {len(rows):5d} rows" + (f", {errors} failed" if errors else ""))
        self.write()

    def write(self) -> None:
        """Write the files."""
        if self.json_path is not None:
            content = {"environment": self.environment, "targets": judged(self.rows, self.targets), "rows": self.rows}
            self.json_path.write_text(json.dumps(content, indent=1))
        if self.markdown_path is not None:
            self.markdown_path.write_text(markdown(self.environment, self.rows, self.targets))


def say(line: str) -> None:
    """One line to standard output, now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(
    settings: Settings,
    only: str | None = None,
    json_path: Path | None = None,
    markdown_path: Path | None = None,
    *,
    isolated: bool = True,
    seconds: float = 570,
) -> Report:
    """Run the stages and report. isolated: each in a process of its own.

    Raises ConfigError for an unknown stage, Unsupported where there is no such device or backend.
    """
    ops.load(settings.backend, settings.device)  # or say at once that it cannot run here
    stages = chosen(only, settings)
    targets = short.TARGETS if all(name.startswith("short.") for name in stages) else TARGETS
    report = Report(environment(settings), json_path, markdown_path, [], targets)
    deadline = time.monotonic() + seconds
    with progress_bar("stages", len(stages)) as advance, TemporaryDirectory() as folder:
        for name, rows, took in (
            _isolated(stages, settings, deadline, Path(folder)) if isolated else _here(stages, settings, deadline)
        ):
            report.add(name, rows, took)
            advance()
    for one in judged(report.rows, targets):
        met = {True: "met", False: "NOT MET", None: ""}[one["met"]]
        say(f"{one['target']:72s} {one['wanted']:22s} {one['told']:>16s}  {met}")
    for row in report.rows:
        if "error" in row or row.get("passed") is False:
            shown = " ".join(row.get("error", "wrong").split())
            say(f"{row['stage']}, {row['case']}, {row['who']}: {shortened(shown, 240)}")
    return report


Found = Iterator[tuple[str, list[Row], float]]  # a stage's name, what it found, the seconds that it took


def _here(stages: dict[str, Stage], settings: Settings, deadline: float) -> Found:
    """All stages in this process, one after the other."""
    for name, stage in stages.items():
        start, rows = time.monotonic(), list[Row]()
        run_stage(name, settings, min(stage.seconds, deadline - start), rows.append)
        yield name, rows, time.monotonic() - start


def _isolated(stages: dict[str, Stage], settings: Settings, deadline: float, folder: Path) -> Found:
    """Each stage in a process: first those that run side by side, then the others alone."""
    beside = {name: stage for name, stage in stages.items() if stage.beside}
    alone = {name: stage for name, stage in stages.items() if not stage.beside}
    (warm_folder := folder / "warm").mkdir()
    limit = min(max((stage.seconds for stage in beside.values()), default=0), deadline - time.monotonic())
    compiling = {name: stage for name, stage in alone.items() if stage.compiles} if beside else {}
    with _ended([Child(name, settings, limit, warm_folder) for name in compiling]) as warm:
        for one in [Child(name, settings, min(stage.seconds, limit), folder) for name, stage in beside.items()]:
            rows = one.rows()
            yield one.name, rows, time.monotonic() - one.start
        for one in warm:
            one.rows()
    for name, stage in alone.items():
        left = deadline - time.monotonic()
        if left < 5:
            yield name, [{"stage": name, "case": "stage", "who": "", "error": "no time was left for it"}], 0.0
            continue
        one = Child(name, settings, min(stage.seconds, left - 5), folder)
        rows = one.rows()
        yield one.name, rows, time.monotonic() - one.start


@contextmanager
def _ended(children: list[Child]) -> Iterator[list[Child]]:
    """None of them outlives this."""
    try:
        yield children
    finally:
        for one in children:
            one.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="quire bench gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="triton", help="of attention: a name from `quire info`")
    parser.add_argument("--only", help=f"stages, with commas between: {', '.join(STAGES)}; or peers, short")
    parser.add_argument("--json", type=Path, dest="json_path", help="write everything into this file")
    parser.add_argument("--markdown", type=Path, dest="markdown_path", help="write tables into this file")
    parser.add_argument("--save", type=Path, help="write the targets into this file, in the format of bench/results")
    parser.add_argument("--fa3", help="the library of FlashAttention 3 that vLLM's wheel has")
    parser.add_argument("--nano", help="a folder with the source of nano-vllm, for `short`; it needs --fa3")
    parser.add_argument("--seconds", type=float, default=570, help="that all of it may take; default 570")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the benchmark itself")
    parser.add_argument(
        "--isolated", action=argparse.BooleanOptionalAction, help="a process a stage; default: on a GPU"
    )
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child is not None:
        child(given.child)
    settings = Settings(device=given.device, backend=given.backend, tiny=given.tiny, fa3=given.fa3, nano=given.nano)
    isolated = given.device != "cpu" if given.isolated is None else given.isolated
    try:
        paths = given.json_path, given.markdown_path
        found = run(settings, given.only, *paths, isolated=isolated, seconds=given.seconds)
        save(given.save, f"Targets on {found.environment['device']}", judged(found.rows, found.targets))
    except QuireError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0
