"""quire bench quantisation: what rounding weights and caches costs in accuracy, and what it brings in speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import AsJson
from quire.errors import ConfigError
from quire_bench.cli.options import Backend, Dtype, Model, Save


def quantisation(
    model: Model = None,
    dtype: Dtype = "bfloat16",
    attention_backend: Backend = "auto",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="A text to compare on; may be repeated. Default: modules of the standard library."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Stretches of text of each length, at most.")] = 20,
    runs: Annotated[int, typer.Option(min=0, help="Of each workload against the clock; 0: accuracy alone.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Draw accuracy against speed into this file.")] = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Accuracy and speed of int8 and int4 weights, rounded at load, and of an int8 cache.

    KLD: divergence of the next token's distribution from that of the model as it is, in nats; p99 of its positions.
    The format's loss is what the rounded weights lose, the engine's what computing with them loses.
    """
    from quire_bench.engine import quantisation as bench
    from quire_bench.plot import check_path
    from quire_bench.tables import markdown_row, markdown_rule
    from quire_bench.tables import save as write

    options = {"dtype": dtype, "attention_backend": attention_backend}
    check_path(plot)
    if plot is not None and not runs:
        raise ConfigError("--plot draws accuracy against speed, which takes runs; --runs is 0")
    accuracies = []
    if not as_json:
        print(markdown_row(bench.HEAD), markdown_rule(len(bench.HEAD)), sep="\n")
    for one in bench.measure_accuracy(model, text or (), windows, options):
        accuracies.append(one)
        if not as_json:
            print(markdown_row(one.cells()), flush=True)
    speeds = bench.measure_speed(model, runs, options) if runs else []
    rows = [one.as_dict() for one in accuracies] + [one.as_dict() for one in speeds]
    write(save, "Rounded weights and caches", rows)
    if plot is not None:
        bench.plot(plot, accuracies, speeds)
    if as_json:
        for found in rows:
            print(json.dumps(found))
        return
    if speeds:
        print("", markdown_row(("rounded", *bench.WORKLOADS)), markdown_rule(1 + len(bench.WORKLOADS)), sep="\n")
    for speed in speeds:
        print(markdown_row((speed.name, *(f"{rate:,.1f} new tok/s" for rate in speed.tokens_per_second.values()))))
