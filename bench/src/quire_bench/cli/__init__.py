"""`quire bench`: one module for each command.

What a command measures with is imported inside it, so that `quire bench --help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from quire_bench.cli.attention import attention
from quire_bench.cli.blocks import blocks
from quire_bench.cli.calibrate import calibrate
from quire_bench.cli.cascade import cascade
from quire_bench.cli.constraints import constraints
from quire_bench.cli.disk import disk
from quire_bench.cli.fleet import fleet
from quire_bench.cli.gpu import gpu
from quire_bench.cli.host import host
from quire_bench.cli.http import http
from quire_bench.cli.latency import latency
from quire_bench.cli.lora import lora
from quire_bench.cli.machine import machine
from quire_bench.cli.memory import memory
from quire_bench.cli.planning import planning
from quire_bench.cli.quantisation import quantisation
from quire_bench.cli.ranks import ranks
from quire_bench.cli.recurrent import recurrent
from quire_bench.cli.scheduler import scheduler
from quire_bench.cli.serve import serve
from quire_bench.cli.soak import soak
from quire_bench.cli.startup import startup
from quire_bench.cli.steps import steps
from quire_bench.cli.throughput import throughput
from quire_bench.cli.validate import validate

COMMANDS = (
    latency,
    scheduler,
    blocks,
    serve,
    host,
    http,
    soak,
    fleet,
    throughput,
    attention,
    calibrate,
    validate,
    cascade,
    recurrent,
    machine,
    steps,
    quantisation,
    lora,
    constraints,
    startup,
    planning,
    memory,
    disk,
    ranks,
)
OPTIONS_OF_ITS_OWN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _whole(command: Callable[..., None]) -> str:
    """What a command does, for the list of all: by default it would be cut off at the line's end."""
    return " ".join((command.__doc__ or "").partition("\n\n")[0].split())


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # its tables cut long names off
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure speed, start-up and memory on this machine.",
)
for command in COMMANDS:
    app.command(short_help=_whole(command))(command)
app.command(context_settings=OPTIONS_OF_ITS_OWN, add_help_option=False, short_help=_whole(gpu))(gpu)
