"""quire bench machine: what this CPU does at best, and what share of it our kernels reach."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson, row
from quire_bench.cli.options import Save


def machine(
    model: Annotated[
        list[str] | None,
        typer.Option(help="Directory or hub name; its workloads are measured, too. May be repeated. Default: none."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="That each comparison of linears takes.")] = 2.0,
    runs: Annotated[int, typer.Option(min=1, help="Calls of attention that count; their median is reported.")] = 21,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """All that is to be known of this CPU, in under ten minutes: rates, linears, attention, and the targets.

    All of it is in bf16. It takes 4 GiB of memory. The targets are for CPUs with AMX; on others there are figures only.
    """
    from quire_bench import machine as bench
    from quire_bench.tables import save as write

    found = bench.about()
    if not as_json:
        for name, shown in found.items():
            row(name, str(shown))
        print(bench.HEAD, flush=True)
    rows = []
    for one in bench.measure(model or (), seconds, runs):
        rows.append(one)
        if not as_json:
            print(one, flush=True)
    write(save, "The machine", (one.as_dict() for one in rows))
    if as_json:
        print(json.dumps({"machine": found, "rows": [one.as_dict() for one in rows]}))
        return
    judged = [one for one in rows if one.met is not None]
    if judged:
        row("targets", f"{sum(bool(one.met) for one in judged)} of {len(judged)} met")
    else:
        row("targets", f"none for {found['isa']}; they are for amx")
