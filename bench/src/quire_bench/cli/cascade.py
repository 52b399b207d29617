"""quire bench cascade: what a shared prefix saves in decode."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.errors import QuireError
from quire_bench.cli.options import Backend


def cascade(
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 64,
    shared: Annotated[int, typer.Option(min=1, help="Tokens that all of them begin with.")] = 8192,
    own: Annotated[int, typer.Option(min=1, help="Tokens of each one's own.")] = 256,
    head_dim: Annotated[int, typer.Option(min=1, max=1024)] = 64,
    attention_backend: Backend = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Calls that count; their median is reported.")] = 9,
    as_json: AsJson = False,
) -> None:
    """What a shared prefix saves in decode: the speedup, and its share of what bytes and products allow."""
    from quire import ops
    from quire_bench.kernels.cascade import measure, shapes

    try:
        for shape in shapes(batch, shared, own, head_dim):
            figure = measure(ops.load(attention_backend), shape, runs)
            if as_json:
                print(json.dumps(figure.as_dict()), flush=True)
            else:
                milliseconds = f"{1e3 * figure.apart_seconds:.2f} -> {1e3 * figure.shared_seconds:.2f} ms"
                message = f"{figure.speedup:5.1f} x, {figure.speedup / figure.roof:4.0%} of {figure.roof:.1f}"
                print(f"G = {shape.group_size}: {milliseconds:>20s} {message}", flush=True)
    except QuireError as error:
        fail(error)
