"""`quire bench`: one module for each command.

A command imports the modules that it measures with when it runs, so that `quire bench --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer

from quire.cli.options import fail
from quire.errors import QuireError
from quire_bench.cli.attention import attention
from quire_bench.cli.calibrate import calibrate
from quire_bench.cli.drafts import drafts
from quire_bench.cli.fleet import fleet
from quire_bench.cli.gpu import gpu
from quire_bench.cli.host import host
from quire_bench.cli.latency import latency
from quire_bench.cli.machine import machine
from quire_bench.cli.memory import memory
from quire_bench.cli.quantisation import quantisation
from quire_bench.cli.serve import serve
from quire_bench.cli.soak import soak
from quire_bench.cli.startup import startup
from quire_bench.cli.throughput import throughput

COMMANDS = (
    throughput,
    latency,
    serve,
    host,
    drafts,
    soak,
    fleet,
    startup,
    memory,
    attention,
    quantisation,
    machine,
    calibrate,
)
P = ParamSpec("P")
OPTIONS_OF_ITS_OWN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _whole(command: Callable[..., None]) -> str:
    """Return the summary of a command, for the list of all: by default it would be cut off at the line's end."""
    return " ".join((command.__doc__ or "").partition("\n\n")[0].split())


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """Return the command, which ends with an error message where it raises QuireError."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except QuireError as error:
            fail(error)

    return run


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables cut long names off
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure speed, start-up and memory on this machine. Further studies are scripts in bench/studies.",
)
for command in COMMANDS:
    app.command(short_help=_whole(command))(reporting(command))
app.command(context_settings=OPTIONS_OF_ITS_OWN, add_help_option=False, short_help=_whole(gpu))(gpu)
