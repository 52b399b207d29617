"""quire bench validate: what the simulator predicts, against real servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import AsJson, fail, row
from quire.errors import ConfigError, QuireError, check_number
from quire.progress import progress_bar
from quire_bench.cli.options import Model


def validate(
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
    as_json: AsJson = False,
) -> None:
    """Replay traces to replicas and simulate the same: throughput, latencies and hits, and the errors.

    Starts replicas with as many threads as the device file was measured with, and stops them again.
    """
    from quire.simulate.device import read_device
    from quire_bench.fleet.replaying import TRACES
    from quire_bench.fleet.validate import FIGURES, Compared, within_goals
    from quire_bench.fleet.validate import validate as measure

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
            found += measure(known, model, counts, names, shares, seconds, repeats, seed, advance=advance)
    except QuireError as error:
        fail(error)
    table = _table(found, FIGURES)
    if out is not None:
        try:
            out.write_text(table, encoding="utf-8")
        except OSError as error:
            fail(ConfigError(f"{out} cannot be written: {error}"))
    if as_json:
        print(json.dumps([one.as_dict() for one in found]))
        return
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


def _table(found: list[Any], figures: tuple[str, ...]) -> str:
    """Measured, simulated, by how much that is wrong and how far this lies apart in runs, a line for each load."""
    speeds_of = ["reads", "computes", "16 streams", "all read"]
    titles = ["replicas", "trace", "load", "requests", *speeds_of, *map(_title, figures)]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for one in found:
        load = "all at once" if one.load == float("inf") else f"{one.load:.0%}"
        speeds = [f"{min(those):.2f} to {max(those):.2f}" for those in zip(*one.speeds, strict=True)]
        cells = [str(one.replicas), one.trace, load, str(one.requests), *speeds]
        for name in figures:
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
