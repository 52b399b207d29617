"""quire bench recurrent: layers that keep a state, against what the machine reads and multiplies."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.errors import QuireError
from quire_bench.cli.options import Backend


def recurrent(
    attention_backend: Backend = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Rounds that count; their median is reported.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Layers that keep a state: GB/s of states or GFLOP/s, and the share of what the machine reads or multiplies."""
    from quire import ops
    from quire_bench.kernels import recurrent as bench_recurrent

    try:
        backend = ops.load(attention_backend)
        for shape in bench_recurrent.shapes():
            figure = bench_recurrent.measure(backend, shape, runs)
            if as_json:
                print(json.dumps({"backend": backend.name} | figure.as_dict()), flush=True)
                continue
            unit = "GB/s" if shape.query_len == 1 else "GFLOP/s"
            times = (f"{1e6 * seconds:9.1f} us" for seconds in (figure.recurrence_seconds, figure.convolution_seconds))
            recurrence, convolution = times
            print(
                f"{shape.name:36s}{recurrence} {figure.rate:7.1f} {unit:7s} {figure.fraction:5.0%}   convolution"
                f"{convolution}",
                flush=True,
            )
    except QuireError as error:
        fail(error)
