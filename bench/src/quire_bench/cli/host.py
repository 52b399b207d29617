"""quire bench host: the host's time of a step."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.errors import ConfigError


def host(
    sequences: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows of a step; may be repeated. Default: 1, 64, 256, 1024.")
    ] = None,
    cases: Annotated[
        list[str] | None,
        typer.Option(
            "--case", help="greedy, text, stop, penalties, logprobs or grammar; may be repeated. Default: all."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=10, help="Steps of each measurement.")] = 128,
    overlapped: Annotated[bool, typer.Option(help="Plan ahead and replay graphs, as on a GPU.")] = False,
    http: Annotated[bool, typer.Option(help="Also the event loop's time per streamed token.")] = False,
    as_json: AsJson = False,
) -> None:
    """The host's part of a decoding step, by its parts, on a device that takes no time."""
    import torch

    from quire_bench.engine import host as bench_host

    unknown = [case for case in cases or () if case not in bench_host.CASES]
    if unknown:
        fail(ConfigError(f"--case is {unknown[0]!r}; it must be one of {', '.join(bench_host.CASES)}"))
    torch.set_num_threads(1)  # sampling small rows in several threads takes longer
    for case in cases or bench_host.CASES:
        for count in sequences or (1, 64, 256, 1024):
            found = bench_host.measure(case, count, steps, overlapped=overlapped)
            if as_json:
                print(json.dumps(found.as_dict()), flush=True)
                continue
            parts = "  ".join(f"{part} {milliseconds:.3f}" for part, milliseconds in found.parts.items())
            rate = f"{found.milliseconds:8.3f} ms ({found.quick:.3f}) {found.microseconds_each:8.2f} us each"
            print(f"{case:10} {count:5,d} {rate}   {parts}", flush=True)
    for count in (sequences or (1, 64)) if http else ():
        each = bench_host.measure_http(count)
        print(
            json.dumps({"http": count, "us": each}) if as_json else f"http {count:11,d} {each:37.2f} us each",
            flush=True,
        )
