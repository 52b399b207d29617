"""quire simulate --fleet: a fleet on a virtual clock."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.options import fail, row
from quire.errors import ConfigError
from quire.progress import progress_bar

if TYPE_CHECKING:
    from quire.simulate.outcome import Outcome


def simulate_fleet(
    path: Path, goals: Sequence[str], plot: Path | None, processes: int, *, as_json: bool, is_alone: bool
) -> None:
    """Run a fleet's load, or find the replicas needed to meet goals. is_alone: no conflicting option was given."""
    from quire.simulate.fleet import FleetSimulation, least_replicas
    from quire.simulate.plot import check_plot
    from quire.simulate.plot import plot as draw
    from quire.simulate.spec import read_spec

    found: dict[str, object] = {}
    start = time.perf_counter()
    if not is_alone:
        raise ConfigError("a load and its options are part of the --fleet file; leave them out")
    if plot is not None:
        check_plot(plot)
    spec = read_spec(path)
    wanted = dict(spec.goal) | _goals(goals)
    if wanted:
        with progress_bar("simulate", 0) as advance:
            count, outcome, tried = least_replicas(spec, wanted, advance)
        found = {"goal": wanted, "replicas": count, "tried": {str(number): met for number, met in tried.items()}}
    else:
        with progress_bar("simulate", 0) as advance:
            outcome = FleetSimulation(spec).run(processes, advance)
    if plot is not None:
        draw(outcome, plot)
    if as_json:
        print(json.dumps(found | outcome.as_dict()))
    else:
        if found:
            shown = ", ".join(f"{name} <= {most:g} s" for name, most in wanted.items())
            row("replicas", f"{found['replicas']} of {spec.replicas[0].kind!r} meet {shown}")
        _print_table(outcome, time.perf_counter() - start)
    if not outcome.counts["finished"]:
        fail(f"no request of {outcome.counts['requests']} finished: {outcome.first_refusal or dict(outcome.errors)}")


def _goals(given: Sequence[str]) -> dict[str, float]:
    from quire.simulate.spec import check_goals

    found = {}
    for one in given:
        name, _, value = one.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"goal is {one!r}; it must be a figure and seconds, as in ttft_p90=0.5") from error
    check_goals(found)
    return found


def _print_table(outcome: Outcome, wall_seconds: float) -> None:
    shown = outcome.as_dict()
    message = f"{shown['finished']:,} of {shown['requests']:,} finished, {shown['failed']:,} failed"
    message += f", {shown['retries']:,} repeated by clients, {shown['resumed']:,} resumed by another replica"
    if shown["refused"]:
        message += f"; {shown['refused']:,} refused, the first because {shown['first_refusal']}"
    row("requests", message)
    for why, count in outcome.errors.items():
        row("error", f"{count:,} x {why}")
    row("virtual time", f"{shown['seconds']:,.1f} s in {shown['steps']:,} steps")
    row(
        "served",
        f"{shown['requests_per_second']:,.2f} requests, {shown['new_tokens_per_second']:,.1f} new tokens a second",
    )
    for name in ("ttft", "itl", "e2e", *(("stalls",) if outcome.stalls.count else ())):
        figures = ", ".join(f"{which} {1e3 * value:,.2f}" for which, value in shown[name].items())
        row(name.upper() if name != "stalls" else name, f"{figures} ms")
    row("prefix hit rate", f"{shown['hit_rate']:.1%} of the prompt tokens")
    row("preemptions", f"{shown['preemptions']:,}; {shown['evicted_blocks']:,} blocks evicted")
    numbers = [one.numbers for one in outcome.moments.values() if one.numbers["replicas"]]
    if numbers:
        counts = [one["replicas"] for one in numbers]
        row("replicas", f"{min(counts)} to {max(counts)}")
        used = max(one["used_blocks"] / max(1, one["blocks"]) for one in numbers)
        row("blocks in use", f"{used:.1%} of all at most")
    row("trace hash", outcome.trace_hash)
    row("simulated in", f"{wall_seconds:,.2f} s")
