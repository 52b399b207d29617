"""quire bench drafts: speculative decoding."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from quire.cli.options import AsJson, fail
from quire.errors import ConfigError

PROMPTS = (
    "import os\nimport json\n\n\ndef read_config(path):\n",
    "class Stack:\n    def ",
    "def main():\n    parser = ",
)
SOURCES = ("lookup", "head", "model", "auto")


def drafts(
    model: Annotated[str | None, typer.Option(help="Directory or repository. Default: the embedded model.")] = None,
    source: Annotated[
        list[str] | None,
        typer.Option("--draft", help="lookup, head, model or auto; may be repeated. Default: lookup, head."),
    ] = None,
    draft_model: Annotated[
        str | None, typer.Option(help="Draft model of `--draft model`. Default: the model itself, which is slow.")
    ] = None,
    num_tokens: Annotated[int, typer.Option(min=1, help="Most draft tokens of a request in a step.")] = 3,
    check: Annotated[int, typer.Option(min=0, help="Compare this number of requests with and without drafts.")] = 0,
    accepted: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Measure a head of random weights whose tokens are right with this probability; may be repeated.",
        ),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Requests at the same time, with --accepted.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each request whose speed is measured.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of these requests.")] = 0.0,
    json_schema: Annotated[bool, typer.Option(help="Answer by a JSON schema of five properties.")] = False,
    quantization: Annotated[str | None, typer.Option(help="Of the weights, as in `quire serve`.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each source, in alternation.")] = 5,
    as_json: AsJson = False,
) -> None:
    """The speed of one request with drafts; or, with --check, the requests whose tokens differ from those without."""
    from quire import StructuredOutputsParams
    from quire.models import EMBEDDED
    from quire_bench.engine import drafts as bench_drafts

    for name in source or ():
        if name not in SOURCES:
            fail(ConfigError(f"--draft is {name!r}; it must be one of {', '.join(SOURCES)}"))
    given = {"model": model, "quantization": quantization}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    options["num_speculative_tokens"] = num_tokens
    chosen = source or ["lookup", "head"]
    if "model" in chosen:
        options["draft_model"] = draft_model or model or str(EMBEDDED)
    if check:
        for name in chosen:
            for part in bench_drafts.check(bench_drafts.source(options, name), check):
                row = {"draft": name, **part._asdict()}
                words = "  ".join(f"{key} {value}" for key, value in row.items())
                print(json.dumps(row) if as_json else words, flush=True)
        return
    if accepted:
        prompts = [[7 + i, *range(10, 25)] for i in range(sequences)]
        found = bench_drafts.accepted_speeds(options, accepted, prompts, max_tokens, runs)
    else:
        structured = StructuredOutputsParams(json=bench_drafts.PERSON) if json_schema else None
        found = bench_drafts.speeds(options, chosen, PROMPTS, max_tokens, temperature, runs, structured)
    for speed in found:
        text = f"{speed.draft:8} {speed.rate:8.1f} tokens/s  {speed.ratio:5.2f} x  {speed.per_step:.2f} tokens a step"
        print(json.dumps(speed._asdict()) if as_json else text, flush=True)
