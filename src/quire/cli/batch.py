"""quire batch: a file of requests, answered into a file of results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import ENGINE, fail, taken, with_options
from quire.server.server_config import ServerConfig

STANDARD = Path("-")
SERVING = (
    "served_model_name",
    "lora",
    "chat_template",
    "tool_call_parser",
    "reasoning_parser",
    "default_chat_template_kwargs",
    "reranker",
    "max_logprobs",
    "max_body_size",
)  # options of `quire serve` that change answers


@with_options(*ENGINE)
@with_options(ServerConfig, only=SERVING)
def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="File of requests, a line each; - is stdin.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File of answers, in the same order; - is stdout.")],
    errors: Annotated[
        Path | None,
        typer.Option(
            help="File of the lines that fail. Default: OUT's name with .errors before its end; if OUT is -, OUT."
        ),
    ] = None,
    **options: Any,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Started again after an interruption, it continues with the first line that has no result, and the files get the
    bytes that they would have got without it.
    """
    apart = errors or (out if out == STANDARD else out.with_name(f"{out.stem}.errors{out.suffix}"))
    if source != STANDARD:
        if not source.is_file():
            fail(f"{source} is no file of requests; give one with a JSON object in each line, or - for stdin")
        if any(path.exists() and path.samefile(source) for path in (out, apart)):
            fail(f"{source} is the input and an output; choose another file for the results")
    config = ServerConfig(**taken(ServerConfig, options))
    from quire.server.batch.command import answer_file
    from quire.server.batch.results import Results

    results = Results(out, apart)  # first: a file that cannot be written must not cost the time to load a model
    try:
        answer_file(options, config, source, results)
    except OSError as error:
        fail(
            f"{error.filename or source}: {error.strerror}, after the results of {results.count} lines; the same "
            f"command continues there"
        )
    finally:
        results.close(drop_empty_errors=True)
    where = out if apart == out else f"{out}, errors in {apart}" if results.num_errors else out
    said = sys.stderr if STANDARD in (out, apart) else sys.stdout
    print(f"{results.num_answers} answers, {results.num_errors} errors: {where}", file=said)
