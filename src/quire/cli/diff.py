"""quire diff: the first operator at which two runs of a model differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.options import AsJson, complete_model, print_table, row
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.diff.compare import Element, Report
    from quire.diff.run import Planted

MOST_SHOWN = 5  # operators and tokens of a list
BAR = 40  # characters of the longest bar
SIDE = "a trace (a file or its URL), or the directory, GGUF file or name of a model"


def diff(
    a: Annotated[
        str | None, typer.Argument(metavar="A", help=f"First side: {SIDE}.", autocompletion=complete_model)
    ] = None,
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="Second side. Default: A.", autocompletion=complete_model)
    ] = None,
    of_a: Annotated[
        list[str] | None, typer.Option("--a", metavar="NAME=VALUE", help="A setting of A; may be repeated.")
    ] = None,
    of_b: Annotated[
        list[str] | None,
        typer.Option(
            "--b",
            metavar="NAME=VALUE",
            help="A setting of B: dtype, quantization, quantization_head, quantization_activations, kv_cache_dtype, "
            "attention_backend, gguf_file, isa (see quire info), or run=transformers, for its own eager run.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="A file with a prompt on each line: a text, or JSON: a string or a list of token ids."),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the trace of A into this file, and compare nothing.")] = None,
    size: Annotated[
        int, typer.Option(min=0, help="MiB of outputs that a side keeps whole. Of later prompts it keeps samples.")
    ] = 256,
    plant: Annotated[
        int, typer.Option(min=0, help="Test the search: plant that many changes, and count those that are named.")
    ] = 0,
    plot: Annotated[Path | None, typer.Option(help="Plot the growth of the difference into this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find the first operator, row and element at which two runs differ, and the operator that causes it.

    A and B are models with settings, traces of other builds of Quire, or transformers' run of a model. Their default is
    the embedded model.
    """
    from quire.diff.run import diff as compared
    from quire.diff.run import tokenize, trace
    from quire.diff.side import DEFAULT_PROMPTS, parse_side, read_prompts
    from quire.simulate.plot import check_plot

    given = None if prompts is None else read_prompts(prompts)
    one = parse_side(a, of_a or [], "--a")
    if save is not None:
        if b is not None or of_b or one.is_trace:
            raise ConfigError("--save is for one model; leave B and --b out, and give a model as A")
        trace(one, tokenize(one, given or DEFAULT_PROMPTS), size * 2**20).save(save)
        row("trace", f"{save}, {save.stat().st_size / 2**20:,.1f} MiB")
        return
    if b is None and one.is_trace:
        raise ConfigError(f"A is the trace {a}, and there is no B; give a model or another trace")
    if plot is not None:
        check_plot(plot)
    report, planted = compared(one, parse_side(b or a, of_b or [], "--b"), given, size * 2**20, plant)
    if plot is not None:
        _plot(report, plot)
    if as_json:
        print(json.dumps(report.to_json() | {"planted": [_planted(one) for one in planted]}))
    else:
        _print(report, planted)


def _planted(one: Planted) -> dict[str, Any]:
    return {"operator": one.operator, "named": one.named, **vars(one.fault)}


def _print(report: Report, planted: list[Planted]) -> None:
    row("A", report.a)
    row("B", report.b)
    row("compared", f"the outputs of {report.granularity}, for {report.rows} rows of {report.prompts} prompts")
    if report.sampled:
        row("", f"{report.sampled} of the prompts by a digest of each row and some columns: see --size")
    row("differences", f"{report.differing:,} of {report.compared:,}")
    if report.first is not None:
        row("first", _element(report.first))
        print()
        _print_growth(report)
        print()
    flips, ends = report.flips, report.greedy
    row("next token", f"{len(flips)} of {report.rows} rows choose another one")
    for flip in flips[:MOST_SHOWN]:
        row("", f"prompt {flip.prompt}, row {flip.row}: {flip.a} in A, {flip.b} in B")
    row("continuation", f"{len(ends)} of {report.prompts} differ")
    for flip in ends[:MOST_SHOWN]:
        row("", f"prompt {flip.prompt}, from token {flip.row} on: {flip.a} in A, {flip.b} in B")
    row("replayed", report.replayed)
    _print_own(report)
    if planted:
        print()
        right = sum(one.operator == one.named for one in planted)
        row("planted", f"{right} of {len(planted)} changes of one operator were named")
        for one in [one for one in planted if one.operator != one.named][:MOST_SHOWN]:
            row("", f"{one.operator}: {one.named} was named; {one.fault}")


def _element(first: Element) -> str:
    at = f"{first.output}, prompt {first.prompt}, row {first.row}"
    if first.element is None:
        return f"{at}; the element is not among those that were kept"
    relative = "" if first.relative is None else f"{first.relative:.1e} of A's value, "
    return (
        f"{at}, element {first.element}: {first.a:.6g} in A, {first.b:.6g} in B; the difference is "
        f"{first.absolute:.1e}, {relative}{first.ulps:.2g} ulps"
    )


def _print_growth(report: Report) -> None:
    most = max((one.relative for one in report.growth if one.relative < float("inf")), default=0.0)
    table = [("after", "rows", "relative", "largest", "")]
    for one in report.growth:
        bar = "#" * round(BAR * min(1.0, one.relative / most)) if most else ""
        table.append((one.name, str(one.rows), f"{one.relative:.2e}", f"{one.absolute:.2e}", bar))
    print_table(table)


def _print_own(report: Report) -> None:
    named = report.named
    if named is not None:
        row("named", f"{named.operator}: prompt {named.prompt}, row {named.row}, element {named.element}")
    elif report.own:
        row("named", "nothing: all operators are within their allowance")
    if report.own and report.differing:
        print()
        largest = sorted(report.own, key=lambda one: -one.excess)[:MOST_SHOWN]
        rows = [(one.operator, f"{one.excess:.2f}", f"{one.relative:.2e}") for one in largest]
        print_table([("operator's own error", "of its allowance", "relative"), *rows])


def _plot(report: Report, path: Path) -> None:
    """Plot the relative difference after each layer. Raises ConfigError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    panel = figure.subplots()
    panel.plot([one.relative for one in report.growth], "o-")
    panel.set_xticks(range(len(report.growth)), [one.name for one in report.growth], rotation=90)
    panel.set(ylabel="relative difference", ylim=(0, None), title=f"{report.a}\n{report.b}")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
