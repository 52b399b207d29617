"""quire bench ranks: tensor parallelism on this machine."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.errors import QuireError
from quire_bench.cli.options import Model


def ranks(
    model: Model = None,
    size: Annotated[list[int] | None, typer.Option(help="Ranks; may be given several times. Default: 1 and 2.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 2,
    runs: Annotated[int, typer.Option(min=1, help="Times that each number of ranks is measured, in turn.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="That decode.")] = 64,
    sequences: Annotated[int, typer.Option(min=1, help="Of the streams.")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="Of the prompt whose prefill is measured.")] = 512,
    as_json: AsJson = False,
) -> None:
    """A model that several processes compute, against one with as many threads; and what an exchange takes."""
    from quire_bench.engine.ranks import exchange_seconds, measure

    try:
        found = measure(model, size or [1, 2], threads, runs, steps, sequences, tokens)
        cases = [(through, rows, 2000 // rows) for through in ("memory", "gloo") for rows in (1, 64)]
        names = [f"{through}, {rows} x 2,048 fp32" for through, rows, _ in cases]
        exchanges = dict(zip(names, exchange_seconds(cases), strict=True))
    except QuireError as error:
        fail(error)
    if as_json:
        print(json.dumps({"ranks": [one.as_dict() for one in found], "exchange_seconds": exchanges}))
        return
    print(f"ranks    1 stream{sequences:5} streams   prefill of {tokens} tokens")
    first = found[0]
    for one in found:
        ratios = first.single / one.single, first.streams / one.streams, one.prefill / first.prefill
        print(
            f"{one.size:5} {one.single:8.1f} tok/s {one.streams:8.1f} tok/s {1e3 * one.prefill:8.1f} ms"
            f"   time: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
        )
    for name, seconds in exchanges.items():
        print(f"exchange by {name}: {1e6 * seconds:.1f} us")
