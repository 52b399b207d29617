"""quire fleet: one address for many replicas."""

from __future__ import annotations

import logging
import sys
from typing import Any

import typer

from quire.cli.config_file import ConfigFile, with_variables
from quire.cli.environment import warn_of_unknown_variables
from quire.cli.options import fail_in, taken, with_options
from quire.errors import QuireError
from quire.fleet.config import GatewayConfig
from quire.server.logs import JSON, set_up_logs

log = logging.getLogger("quire.fleet")


@with_options(GatewayConfig)
def fleet(
    context: typer.Context,
    _config: ConfigFile = None,
    **options: Any,
) -> None:
    """Serve a fleet's replicas under one address. If a replica is lost, another one continues its answers."""
    from quire.server.signals import obey_as_first_process

    obey_as_first_process()
    config = GatewayConfig(**taken(GatewayConfig, options))
    set_up_logs(config.log_format)
    warn_of_unknown_variables(context)
    try:
        from quire.fleet.gateway import FleetServer  # imported late, since its imports are slow
        from quire.fleet.membership import parse_members

        members = parse_members(config.replicas)
        FleetServer(
            members, config, logging.getLogger("quire.fleet").info if config.log_format == JSON else _print
        ).run()
    except QuireError as error:
        fail_in(config.log_format, with_variables(error, context))


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
