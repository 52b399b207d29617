"""quire bench http: what the way over HTTP costs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from quire.cli.options import AsJson, fail, row
from quire.errors import QuireError
from quire.progress import progress_bar
from quire_bench.cli.options import Model

MANY_TOKENS = 1.2  # in a chunk: random weights draw tokens that have no text, and a server may hold chunks together


def http(
    model: Model = None,
    concurrency: Annotated[int, typer.Option(help="Requests, all at once.")] = 64,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens to generate for each.")] = 128,
    runs: Annotated[int, typer.Option(min=1, help="Each way, in turns; the medians are reported.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a run may take.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """What the way over HTTP costs: the same requests through LLM in a process, and through quire serve, streaming."""
    from quire_bench.server.http_path import Load, measure

    try:
        load = Load(model, concurrency, input_len, output_len)
        with progress_bar("runs", 2 * runs) as advance:
            figures = measure(load, runs, timeout, advance).as_dict()
    except QuireError as error:
        fail(error)
    if as_json:
        print(json.dumps(figures))
        return
    for name, shown in _rows(figures):
        row(name, shown)


def _rows(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for way in ("offline", "http"):
        seconds = figures[f"{way}_seconds"]
        rate = f"{figures[f'{way}_tokens_per_second']:10,.1f} tok/s"
        yield way, f"{rate}, {len(seconds)} runs of {min(seconds):.2f} to {max(seconds):.2f} s"
    few = "" if figures["tokens_per_chunk"] < MANY_TOKENS else ": fewer chunks than tokens, so less was sent"
    yield "", f"{figures['ratio']:10.1%} of offline; {figures['tokens_per_chunk']:.2f} tokens a chunk{few}"
    yield "without the client", f"{figures['http_tokens_per_second_without_client']:10,.1f} tok/s"
    message = f"{figures['ratio_without_client']:10.1%} of offline"
    yield "", f"{message}; its {figures['client_cpu_seconds']:.2f} s of CPU time are not counted"
