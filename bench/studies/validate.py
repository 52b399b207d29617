"""Measure the simulator's predictions against real servers: the same traces, replayed and simulated.

    quire bench calibrate --model MODEL --threads 1 --max-num-seqs 32 --out device.json
    python bench/studies/validate.py --model MODEL --device device.json --replicas 1,2 --out table.md

A run of some seconds has few requests, of which a percentile says little. So a load is sent several times, each time
with rows of its own, and the requests of all runs are looked at together; how far the errors of single runs lie apart
is noted as well. Memory and cores are as fast as others on the same machine let them be, from minute to minute. So
around each run a stream shows how long reading takes now, at one replica and at all of them, prompts how long computing
does, and many streams how long what each sequence adds. Each run is simulated with that; all else is as it was
calibrated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from quire.cli.options import fail, row
from quire.engine.cost import ModelCost, model_cost
from quire.engine.trace import TraceRow
from quire.errors import ConfigError, QuireError, check_number
from quire.models import expected_weight_bytes, locate, read_config
from quire.progress import progress_bar
from quire.simulate.device import DeviceFile, read_device
from quire.simulate.outcome import Outcome
from quire_bench.cli.options import Model
from quire_bench.fleet.replaying import TRACES, Serving, Sizes, at_once, seconds_of, sent, serving, simulated
from quire_bench.fleet.running import prefix_hits
from quire_bench.fleet.speed import PROMPT, Probes, at_speed, expected, mean, probed
from quire_bench.server.client import Run
from quire_bench.server.report import latencies, percentile

SIZES = Sizes()  # of each replica
TURN_SEEDS = 10  # from the seed of a run to that of the next one
SATURATING = 3  # times as many requests as there are seats, to find what the replicas sustain
GOALS: Mapping[str, float] = MappingProxyType(  # the largest error of each figure
    {"throughput": 0.05, "ttft_p50": 0.1, "ttft_p90": 0.1, "itl_p50": 0.1, "itl_p99": 0.1, "hit_rate": 0.1}
)
FIGURES = tuple(GOALS)
MOST_LOAD = 0.8  # to which they are goals


def main(
    device: Annotated[Path, typer.Option(help="What `quire bench calibrate` wrote of this model.")] = Path(
        "device.json"
    ),
    model: Model = None,
    replicas: Annotated[str, typer.Option(help="Numbers of replicas; more than one have a gateway.")] = "1,2",
    traces: Annotated[str, typer.Option(help="That are replayed.")] = "poisson,clusters,sessions",
    loads: Annotated[str, typer.Option(help="In percent of what the replicas sustain.")] = "30,60,80,95",
    seconds: Annotated[float, typer.Option(help="In which the requests of a run come.")] = 20.0,
    repeats: Annotated[int, typer.Option(help="Runs of each load, looked at together.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of the traces.", min=0)] = 0,
    out: Annotated[Path | None, typer.Option(help="A file for the table, in Markdown.")] = None,
) -> None:
    """Replay traces to replicas and simulate the same: throughput, latencies and hits, and the errors.

    Starts replicas with as many threads as the device file was measured with, and stops them again.
    """
    try:
        counts = [int(one) for one in _numbers("replicas", replicas, 1, 16)]
        shares = [one / 100 for one in _numbers("loads", loads, 1, 200)]
        names = traces.split(",")
        for one in names:
            if one not in TRACES:
                raise ConfigError(f"there is no trace {one!r}; choose from {', '.join(TRACES)}")
        check_number(ConfigError, "seconds", seconds, 1.0)
        known = read_device(device)
        found: list[Compared] = []
        with progress_bar("validate", len(counts) * len(names) * (1 + len(shares))) as advance:
            found += validate(known, model, counts, names, shares, seconds, repeats, seed, advance=advance)
    except QuireError as error:
        fail(error)
    table = _table(found)
    if out is not None:
        try:
            out.write_text(table, encoding="utf-8")
        except OSError as error:
            fail(ConfigError(f"{out} cannot be written: {error}"))
    print(table, end="")
    for name in FIGURES:
        met, count, median, largest = within_goals(found, name)
        row(
            _title(name),
            f"{met} of {count} loads up to 80% are within the goal; errors: median {median:.1%}, largest {largest:.1%}",
        )


def _numbers(name: str, given: str, least: float, most: float) -> list[float]:
    """Numbers with commas between. Raises ConfigError for what is none."""
    try:
        found = [float(one) for one in given.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name} is {given!r}; it must be numbers with commas between") from error
    for one in found:
        check_number(ConfigError, name, one, least, most)
    return found


def _table(found: Sequence[Compared]) -> str:
    """Measured, simulated, by how much that is wrong and how far this lies apart in runs, a line for each load."""
    speeds_of = ["reads", "computes", "16 streams", "all read"]
    titles = ["replicas", "trace", "load", "requests", *speeds_of, *map(_title, FIGURES)]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for one in found:
        load = "all at once" if one.load == float("inf") else f"{one.load:.0%}"
        speeds = [f"{min(those):.2f} to {max(those):.2f}" for those in zip(*one.speeds, strict=True)]
        cells = [str(one.replicas), one.trace, load, str(one.requests), *speeds]
        for name in FIGURES:
            real, predicted = (_shown(name, those[name]) for those in (one.real, one.simulated))
            apart = f" ± {one.spread[name]:.0%}" if one.spread[name] else ""
            wrong = f": {one.error(name):+.1%}{apart}" if one.real[name] else ""
            cells.append(f"{real}, {predicted}{wrong}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _title(figure: str) -> str:
    if figure == "throughput":
        return "tokens a second"
    return f"{figure.upper().replace('_', ' ')}, ms" if "_p" in figure else figure.replace("_", " ")


def _shown(figure: str, value: float) -> str:
    if figure == "throughput":
        return f"{value:,.0f}"
    return f"{value:.1%}" if figure == "hit_rate" else f"{1e3 * value:.1f}"


@dataclass(frozen=True)
class Compared:
    """A trace at a load: figures of the replicas, and what the simulator said they would be."""

    replicas: int
    trace: str
    load: float  # of what was sustained; infinite: all requests came at once
    requests: int
    real: Mapping[str, float]  # of FIGURES: tokens or requests a second, seconds, a share
    simulated: Mapping[str, float]
    spread: Mapping[str, float]  # half of how far the errors of single runs lie apart
    speeds: Sequence[Probes]  # before and after each run, how many times as fast as by the device file

    def error(self, figure: str) -> float:
        """Return the error of the prediction, relative to the measurement."""
        return _error(self.simulated[figure], self.real[figure])


def _error(simulated: float, real: float) -> float:
    return simulated / real - 1 if real else 0.0


# --------------------------------------------------------------------------------------------------- the comparison


def validate(
    device: DeviceFile,
    model: str | None,
    counts: Sequence[int],
    traces: Sequence[str],
    loads: Sequence[float],
    seconds: float,
    repeats: int = 1,
    seed: int = 0,
    options: Sequence[str] = (),
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Compared]:
    """Each trace at each load, with each number of replicas; before, what these sustain of it.

    model: as `quire serve` has it. seconds: in which the requests of a run come. repeats: runs of each load, with
    rows of their own. seed: of the traces. options: of each replica. advance: is called for each load.
    Raises ConfigError for a model whose sequences are too short, QuireError where a request fails or a server does
    not get ready.
    """
    path = locate(model)
    known = _Known(device, str(path.absolute()), model_cost(*read_config(path), expected_weight_bytes(path)))
    if known.cost.max_model_len <= PROMPT:
        raise ConfigError(f"{path} has sequences of {known.cost.max_model_len} tokens; it must have more than {PROMPT}")
    own = [*options, *([] if model is None else ["--model", model])]
    for count in counts:
        with serving(count, int(device.machine.get("threads", 1)), SIZES, own) as running:
            requests = SATURATING * SIZES.seats * count
            for number, name in enumerate(traces):
                trace_seed = 10_000 * seed + 1000 * count + 100 * number
                rows = at_once(TRACES[name](1.0, 1.1 * requests, trace_seed), requests)
                runs = [_replayed(running, rows, trace_seed, 0)]
                sustained = _rate(sorted(record.ended for record in runs[0].run.records if record.ended is not None))
                yield _compared(known, count, name, float("inf"), runs)
                advance()
                for load_seed, load in enumerate(loads, trace_seed + 1):
                    runs = []
                    for turn in range(repeats):
                        run_seed = load_seed + TURN_SEEDS * turn
                        rows = TRACES[name](load * sustained, seconds, run_seed)
                        runs.append(_replayed(running, rows, run_seed, turn))
                    yield _compared(known, count, name, load, runs)
                    advance()


@dataclass(frozen=True)
class _Known:
    """The inputs of predictions."""

    device: DeviceFile
    model: str  # its directory or file
    cost: ModelCost


@dataclass(frozen=True)
class _Replay:
    """One run of a load."""

    rows: Sequence[TraceRow]
    run: Run
    looked_for: float  # tokens of prompts, in the caches
    hits: float
    probes: tuple[Probes, Probes]  # before and after


def _replayed(running: Serving, rows: Sequence[TraceRow], seed: int, turn: int) -> _Replay:
    if not rows:
        raise QuireError("a trace has no request within its seconds; give more of them")
    probes, before = probed(running.replicas), prefix_hits(running.replicas)
    run = sent(running.url, rows, seed, turn)
    looked_for, hits = (after - other for after, other in zip(prefix_hits(running.replicas), before, strict=True))
    return _Replay(rows, run, looked_for, hits, (probes, probed(running.replicas)))


def _figures(replays: Sequence[_Replay]) -> dict[str, float]:
    """Return the figures of all runs together."""
    records = [record for one in replays for record in one.run.records]
    found = [one for one in map(latencies, records) if one is not None]
    first, gaps = sorted(one.ttft for one in found), sorted(gap for one in found for gap in one.gaps)
    return {
        "throughput": sum(record.answer.num_tokens for record in records) / sum(seconds_of(one.run) for one in replays),
        "ttft_p50": percentile(first, 50),
        "ttft_p90": percentile(first, 90),
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
        "hit_rate": sum(one.hits for one in replays) / max(1.0, sum(one.looked_for for one in replays)),
    }


def _rate(ends: Sequence[float]) -> float:
    """Requests a second that end in the middle of a run, without its start and its tail."""
    low, high = len(ends) // 5, len(ends) * 4 // 5
    return (high - low) / max(1e-9, ends[high] - ends[low]) if high > low else len(ends) / max(1e-9, ends[-1])


def _compared(known: _Known, count: int, name: str, load: float, replays: Sequence[_Replay]) -> Compared:
    outcomes = [_simulated(known, count, one) for one in replays]
    each = [(_figures([one]), _predicted([outcome])) for one, outcome in zip(replays, outcomes, strict=True)]
    errors = {figure: [_error(predicted[figure], real[figure]) for real, predicted in each] for figure in FIGURES}
    spread = {figure: (max(those) - min(those)) / 2 for figure, those in errors.items()}
    says = expected(known.cost, known.device, count)
    speeds = [Probes(*(a / b for a, b in zip(says, took, strict=True))) for replay in replays for took in replay.probes]
    sent_rows = sum(len(one.rows) for one in replays)
    return Compared(count, name, load, sent_rows, _figures(replays), _predicted(outcomes), spread, speeds)


def _simulated(known: _Known, count: int, replay: _Replay) -> Outcome:
    device = at_speed(known.device, known.cost, count, mean(replay.probes))
    return simulated(count, 0 if count == 1 else 1, SIZES, replay.rows, device, known.model)


def _predicted(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the same as `_figures`, of the simulator."""
    together = Outcome()
    for one in outcomes:
        together.add(one)
    return {
        "throughput": together.counts["new_tokens"] / sum(one.seconds for one in outcomes),
        **{figure: together.figure(figure) for figure in FIGURES[1:-1]},
        "hit_rate": together.hit_rate,
    }


def within_goals(found: Sequence[Compared], figure: str) -> tuple[int, int, float, float]:
    """Return the loads that meet their goal, the loads with a goal, and their median and largest unsigned error."""
    errors = sorted(abs(one.error(figure)) for one in found if one.load <= MOST_LOAD)
    if not errors:
        return 0, 0, 0.0, 0.0
    return sum(error <= GOALS[figure] for error in errors), len(errors), percentile(errors, 50), errors[-1]


if __name__ == "__main__":
    typer.run(main)
