"""quire bench gpu: everything that is to be known of a GPU."""

from __future__ import annotations

import typer


def gpu(context: typer.Context) -> None:
    """Everything that is to be known of a GPU, in under ten minutes. Its options: quire bench gpu --help."""
    from quire_bench.gpu.run import main

    raise typer.Exit(main(context.args))
