"""quire convert: write a checkpoint whose weights are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import row


def convert(
    model: Annotated[str, typer.Argument(help="Directory or hub name of a model in 16 or 32 bits.")],
    out: Annotated[Path, typer.Argument(help="A directory to write, new or empty.")],
    quantization: Annotated[
        str,
        typer.Option(help="int4: a scale for each output and 128 inputs; int8: one for each output."),
    ],
) -> None:
    """Write a model with its linears rounded, as --quantization does at load, for Quire, vLLM and transformers.

    The layout is compressed-tensors' pack-quantized. The output projection is not rounded.
    """
    from quire.models import locate
    from quire.models.convert import convert as write

    written = write(locate(model), out, quantization)
    row("weights", f"{written.rounded} linears in {quantization}; {written.nbytes / 2**20:,.1f} MiB in all")
    row("serve it", f"quire serve {out} --quantization-head int8")
