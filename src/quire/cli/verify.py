"""quire verify: compute the answers of receipts again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import ENGINE, AsJson, with_options
from quire.config import parse_loras


@with_options(*ENGINE, without=("seed", "receipts", "enable_lora"))
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that --receipts has written.")],
    sample: Annotated[int | None, typer.Option(min=1, help="Verify this number of lines, chosen at random.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choice of --sample.")] = 0,
    lora: Annotated[list[str] | None, typer.Option(help="NAME=PATH of a LoRA adapter. May be repeated.")] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Compute the answers of receipts again, and report the tokens and logprobs that differ.

    The exit status is 1 if any answer differs, or a line cannot be verified.
    """
    from quire import LLM
    from quire.frontend.verification import Difference, Unverified, count_lines, verify
    from quire.progress import progress_bar

    loras, count = parse_loras(lora or []), count_lines(file)
    with LLM(lora=loras, **options) as llm, progress_bar("receipts", min(count, sample or count)) as advance:
        report = verify(llm, file, sample, seed, advance)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        bad_lines: list[Difference | Unverified] = [*report.different, *report.unverified]
        for one in sorted(bad_lines, key=lambda one: one.line):
            print(one)
        bad = f"{len(report.different):,} different, {len(report.unverified):,} not verified"
        print(f"{report.num_lines:,} lines: {report.num_same:,} the same, {bad}")
    raise typer.Exit(0 if report.is_good else 1)
