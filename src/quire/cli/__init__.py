"""The command line: `quire generate`, `quire serve`, `quire bench`, `quire simulate`, `quire models`, `quire info`.

Everything heavy is imported inside the commands, so that `quire --help` answers at once.
"""

from __future__ import annotations

import typer

from quire.cli import bench
from quire.cli.generate import generate
from quire.cli.info import info
from quire.cli.models import models
from quire.cli.serve import serve
from quire.cli.simulate import simulate

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Paged attention for Python: serve language models.")
app.command()(generate)
app.command()(serve)
app.add_typer(bench.app, name="bench")
app.command()(simulate)
app.command()(models)
app.command()(info)


def main() -> None:
    """Entry point of the `quire` command."""
    app()
