"""quire router: several models at one address."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.config_file import ConfigFile, with_variables
from quire.cli.environment import warn_of_unknown_variables
from quire.cli.options import ENGINE, fail_in, taken, with_options
from quire.config import options_of
from quire.errors import QuireError
from quire.router.config import RouterConfig, read_models
from quire.server.logs import JSON, set_up_logs
from quire.server.server_config import ServerConfig


@with_options(RouterConfig, without=("fleet_secret",))
def router(
    context: typer.Context,
    models: Annotated[
        Path, typer.Argument(help="YAML: names of models, each with model: and other options of quire serve.")
    ],
    _config: ConfigFile = None,
    **options: Any,
) -> None:
    """Serve several models at one address. A model is loaded for its first request and unloaded when it is idle."""
    from quire.server.signals import obey_as_first_process

    obey_as_first_process()
    config = RouterConfig(**taken(RouterConfig, options))
    set_up_logs(config.log_format)
    warn_of_unknown_variables(context)
    known = [name for one in (ServerConfig, *ENGINE) for name in options_of(one)]
    try:
        found = read_models(models, known)
        from quire.router.app import Router  # imported late, since its imports are slow

        tell = logging.getLogger("quire.router").info if config.log_format == JSON else _print
        Router(found, config, len(os.sched_getaffinity(0))).run(tell)
    except QuireError as error:
        fail_in(config.log_format, with_variables(error, context))


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
