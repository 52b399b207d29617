"""The command line: one module for each command or group of related commands.

Slow imports are inside the commands, so that `quire --help` answers at once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

from quire.errors import QuireError, check_installed

check_installed("quire.cli", "rich", "typer", "yaml")

import typer
from typer.core import TyperGroup

from quire import __version__
from quire.cli.batch import batch
from quire.cli.cache import cache
from quire.cli.chat import chat
from quire.cli.command import Command
from quire.cli.config_file import Sourced, with_variables
from quire.cli.convert import convert
from quire.cli.diff import diff
from quire.cli.embed import embed
from quire.cli.fleet import fleet
from quire.cli.generate import generate
from quire.cli.hub import list_models, pull, remove
from quire.cli.info import info, show
from quire.cli.interrupts import said_interrupts
from quire.cli.models import models
from quire.cli.options import fail
from quire.cli.ps import ps, stop
from quire.cli.router import router
from quire.cli.serve import serve
from quire.cli.simulate import simulate
from quire.cli.top import top
from quire.cli.verify import verify
from quire.cli.vllm_flags import PastedFlags

MEASURING = "quire_bench"  # a separate distribution that imports Quire; only this module knows its name
ALL_ARGUMENTS = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


class Reporting(TyperGroup):
    """Reports the error of any command in one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except QuireError as error:
            fail(with_variables(error, ctx))


app = typer.Typer(
    cls=Reporting,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich's tables would truncate long names
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Paged attention for Python: serve language models.",
)
app.command(cls=Sourced, short_help="Talk to a model in the terminal.")(chat)
app.command("run", cls=Sourced, short_help="The same as chat.")(chat)
app.command(cls=Command, short_help="Download a model from the hub.")(pull)
app.command("list", cls=Command, short_help="List the models that were downloaded.")(list_models)
app.command("ls", cls=Command, short_help="The same as list.")(list_models)
app.command("rm", cls=Command, short_help="Remove downloaded models.")(remove)
app.command(cls=Sourced, short_help="Continue texts.")(generate)
app.command(cls=Command, short_help="Compute the answers of receipts again.")(verify)
app.command(cls=Sourced, short_help="Embed lines: JSON lines, or an array.")(embed)
app.command(cls=Sourced, short_help="Answer a file of requests; resumes if interrupted.")(batch)
app.command(cls=PastedFlags, short_help="Serve a model over HTTP as OpenAI does.")(serve)
app.command(cls=Command, short_help="Monitor a running server.")(top)
app.command(cls=Command, short_help="List the models of a running server.")(ps)
app.command(hidden=True)(stop)
app.command(cls=Sourced, short_help="Serve a fleet's replicas under one address.")(fleet)
app.command(cls=Sourced, short_help="Serve several models, loaded on demand.")(router)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"quire {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Paged attention for Python: serve language models."""


@app.command(
    context_settings=ALL_ARGUMENTS, add_help_option=False, short_help="Measure speed and memory on this machine."
)
def bench(context: typer.Context) -> None:
    """Measure speed, start-up and memory on this machine."""
    if find_spec(MEASURING) is None:
        fail(
            "quire bench is not installed; get it with: pip install 'quire[bench]', or in a clone: "
            "pip install './bench[all]'"
        )
    import_module(f"{MEASURING}.cli").app(context.args, prog_name="quire bench")


app.command(cls=Sourced, short_help="Simulate the scheduler or a fleet under a load.")(simulate)
app.command(cls=Command, short_help="Write a model with its weights rounded.")(convert)
app.command(cls=Command, short_help="Find the first operator at which two runs differ.")(diff)
app.add_typer(cache, name="cache", short_help="See or remove the KV blocks on a disk.")
app.command(cls=Command, short_help="List published models, and how they are served.")(models)
app.command(cls=Command, short_help="Show the features of this machine, or the needs of a model.")(info)
app.command(cls=Command, short_help="Show the needs of a model.")(show)


def main() -> None:
    """Entry point of the `quire` command."""
    try:
        with said_interrupts():
            app()
    except ImportError as error:  # torch's wheels have the same minimum
        if "GLIBC" not in str(error):
            raise
        sys.exit(
            f"error: this system is older than PyTorch's wheels and Quire's, which need glibc 2.28 or later: {error}"
        )
