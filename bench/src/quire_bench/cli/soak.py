"""quire bench soak: a server under load for long."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail, row
from quire.progress import progress_bar


def soak(
    minutes: Annotated[float, typer.Option(help="Of load that counts.")] = 60.0,
    warm_up: Annotated[
        float | None, typer.Option(help="Minutes of load before those. Default: a third, but 3 to 20.")
    ] = None,
    clients: Annotated[int, typer.Option(help="That ask at the same time.")] = 24,
    seed: Annotated[int, typer.Option(help="Of what they ask.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Is quire serve as it was after hours of mixed load, hang-ups and bad requests? Status 1 if it is not."""
    from quire_bench.server.soak import Soak
    from quire_bench.server.soak import soak as run
    from quire_bench.server.verdict import judge, table

    warm_up = min(20.0, max(3.0, minutes / 3)) if warm_up is None else warm_up
    plan = Soak(60 * minutes, 60 * warm_up, clients, seed)
    with progress_bar("seconds", round(plan.warm_up + plan.seconds)) as advance:
        found = run(plan, advance)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        for name, shown in table(found):
            row(name, shown)
    if problems := judge(found):
        fail("; ".join(problems))
