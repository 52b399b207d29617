"""quire bench fleet: what a fleet costs and brings."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from quire.cli.options import AsJson, row
from quire.errors import ConfigError
from quire.progress import progress_bar
from quire_bench.cli.options import Model, Save

WHAT = ("gateway", "kills", "routing", "leaving")


def fleet(
    what: Annotated[list[str] | None, typer.Argument(help=f"{', '.join(WHAT)}. Default: all.")] = None,
    model: Model = None,
    streams: Annotated[str, typer.Option(help="Numbers of streams at a time, for what the gateway costs.")] = "1,8,32",
    requests: Annotated[int, typer.Option(help="Each way, for the time to the first token.")] = 200,
    output_len: Annotated[int, typer.Option(help="Tokens of each of these streams.")] = 256,
    runs: Annotated[int, typer.Option(help="With so many streams each way, and of each way to leave.")] = 5,
    kills: Annotated[int, typer.Option(help="Answers, in each of which a replica is killed.")] = 20,
    prompt_len: Annotated[int, typer.Option(help="Tokens of their prompts.")] = 128,
    traces: Annotated[str, typer.Option(help="That are routed.")] = "sessions,documents,unshared",
    jobs: Annotated[int, typer.Option(help="Requests of each of them.")] = 240,
    trace_len: Annotated[int, typer.Option(help="Tokens of their longest prompts.")] = 1024,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Measure a gateway's cost, stalls after kills, gains from routing, and the time until a lost replica is avoided.

    Starts replicas of one thread each, and gateways, and stops them again.
    """
    from quire_bench.fleet import kills as killing
    from quire_bench.fleet import leaving, overhead, routing
    from quire_bench.tables import save as write

    figures: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    chosen = _chosen(what)
    counts = _counts(streams)
    options = [] if model is None else ["--model", model]
    if "gateway" in chosen:
        with progress_bar("gateway", -(-requests // overhead.AT_A_TIME) + runs * len(counts)) as advance:
            figures["gateway"] = overhead.measure(options, counts, requests, output_len, runs, advance)
    if "kills" in chosen:
        with progress_bar("kills", kills) as advance:
            figures["kills"] = killing.measure(options, kills, prompt_len, advance=advance)
    if "routing" in chosen:
        names = traces.split(",")
        with progress_bar("routing", routing.RUNS * len(names)) as advance:
            figures["routing"] = routing.measure(options, names, jobs, trace_len, advance=advance)
    if "leaving" in chosen:
        with progress_bar("leaving", 3 * runs) as advance:
            figures["leaving"] = leaving.measure(options, 8, runs, advance)
    write(save, "Fleet", _flat(figures))
    if as_json:
        print(json.dumps(figures))
        return
    for name, shown in _rows(figures):
        row(name, shown)


def _flat(figures: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each figure that is one of several, and for each part."""
    for name, found in figures.items():
        parts = found if isinstance(found, list) else [{name: found}] if not isinstance(found, dict) else [found]
        for part in parts:
            yield {"part": name} | part
        yield from ({"part": name} | one for one in (found.get("streams", ()) if isinstance(found, dict) else ()))


def _chosen(what: Sequence[str] | None) -> Sequence[str]:
    for one in what or ():
        if one not in WHAT:
            raise ConfigError(f"{one!r} cannot be measured; choose from {', '.join(WHAT)}")
    return what or WHAT


def _counts(streams: str) -> list[int]:
    """The numbers of streams. Raises ConfigError for what is none."""
    counts = streams.split(",")
    if not all(one.isascii() and one.isdigit() and int(one) > 0 for one in counts):
        raise ConfigError(
            f"streams is {streams!r}; it must be numbers from 1 on with commas between them, as in 1,8,32"
        )
    return [int(one) for one in counts]


def _rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "load average", f"{figures['load_average']:.1f} at the start: what else ran"
    if "gateway" in figures:
        yield from _gateway_rows(figures["gateway"])
    if "kills" in figures:
        found, stall = figures["kills"], figures["kills"]["stall_ms"]
        shown = ", ".join(f"{name} {stall[name]:.0f}" for name in ("p50", "p90", "p99", "max"))
        yield "stall at a kill", f"{shown} ms; {found['kills']} kills, {found['different']} answers differ"
    for one in figures.get("routing", ()):
        shown = f"first token {1e3 * one['mean_first_token']:.0f} ms, p99 {1e3 * one['p99_first_token']:.0f} ms"
        hits = f"{one['hit_rate']:.1%} cached, {one['of_infinite']:.1%} of what an infinite cache has"
        yield one["trace"], f"{one['load']:4.0%} load, {one['way']:11s}  {shown}; {hits}"
    for one in figures.get("leaving", ()):
        wait = f"longest wait of a client {1e3 * one['longest_wait']:.0f} ms"
        yield one["what"], f"{one['seconds']:.3f} s; {wait}; {one['answers']} answers, {len(one['errors'])} errors"


def _gateway_rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    first = figures["first_token"]
    for percent in ("p50", "p99"):
        direct, through = first[f"direct_{percent}_ms"], first[f"gateway_{percent}_ms"]
        added = f"{first[f'added_{percent}_ms']:+.2f} ms"
        yield f"first token, {percent}", f"{added}: {direct:.2f} ms directly, {through:.2f} through the gateway"
    for one in figures["streams"]:
        rates = (
            f"{one['direct_tokens_per_second']:,.0f} tok/s directly, {one['gateway_tokens_per_second']:,.0f} through"
        )
        cpu = f"{one['cpu_microseconds_per_token']:.0f} us of its CPU time a token"
        yield f"{one['streams']} streams", f"{one['share']:.1%}: {rates} the gateway; {cpu}"
