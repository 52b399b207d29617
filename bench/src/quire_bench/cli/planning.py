"""quire bench planning: what the scheduler and the block manager take of a step."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson


def planning(
    sequences: Annotated[
        list[int] | None, typer.Option(min=1, help="That decode; may be repeated. Default: 1, 64, 1024.")
    ] = None,
    contexts: Annotated[
        list[int] | None, typer.Option("--context", min=1, help="Tokens of each. Default: 100, 1000, 10000, 100000.")
    ] = None,
    spare: Annotated[
        list[int] | None, typer.Option(min=0, help="Blocks in the pool besides theirs. Default: 0, 1000000.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What the scheduler and the block manager take of a step of decoding, in microseconds a sequence."""
    from itertools import product

    from quire_bench.engine import planning as bench_planning

    chosen = (sequences or (1, 64, 1024), contexts or (100, 1_000, 10_000, 100_000), spare or (0, 1_000_000))
    for point in product(*chosen):
        found = bench_planning.measure(*point, steps=max(64, 4096 // point[0]))
        if as_json:
            print(json.dumps(found.as_dict()))
        else:
            message = f"{found.sequences:6,d} sequences of {found.context:7,d} tokens, {found.pool:11,d} blocks"
            print(f"{message} {found.microseconds_each:8.2f} us each, worst step {found.worst_each:8.2f}", flush=True)
