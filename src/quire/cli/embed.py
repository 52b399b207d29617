"""quire embed: vectors of lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import ENGINE, OF_MANY, fail, with_options


@with_options(*ENGINE, without=(*OF_MANY, "receipts"))
def embed(
    files: Annotated[list[Path] | None, typer.Argument(help="Files of lines. Default: stdin.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="A file: .npy for an array, else JSON lines. Default: stdout.")
    ] = None,
    prompt_name: Annotated[str | None, typer.Option(help="A prompt of the checkpoint, such as query.")] = None,
    dimensions: Annotated[int | None, typer.Option(help="Leading values to keep. Default: all.")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate/--no-truncate", help="Cut lines that are too long, instead of failing.")
    ] = True,
    **options: Any,
) -> None:
    """Embed each line of files or of stdin, with a progress bar if stderr is a terminal."""
    import numpy as np

    from quire import LLM

    lines = _read(files or [])
    if not lines:
        fail("there is no line; give files, or lines on stdin, as in: quire embed --model DIRECTORY lines.txt")
    llm = LLM(**options)
    cut = -1 if truncate else None
    outputs = llm.embed(lines, dimensions=dimensions, prompt_name=prompt_name, truncate_prompt_tokens=cut)
    for output in outputs:
        if output.error is not None:
            fail(output.error)
    vectors = [output.outputs.embedding for output in outputs]
    if out is not None and out.suffix == ".npy":
        np.save(out, np.array(vectors, np.float32))
        return
    records = (
        json.dumps({"text": line, "embedding": vector}) + "\n" for line, vector in zip(lines, vectors, strict=True)
    )
    if out is None:
        sys.stdout.writelines(records)
    else:
        with out.open("w", encoding="utf-8") as file:
            file.writelines(records)


def _read(files: list[Path]) -> list[str]:
    """Return the lines of files, or of stdin without any."""
    try:
        texts = [path.read_text(encoding="utf-8") for path in files] or [sys.stdin.read()]
    except (OSError, UnicodeDecodeError) as error:
        fail(f"the lines cannot be read as text: {error}")
    return [line for text in texts for line in text.splitlines()]
