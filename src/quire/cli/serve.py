"""quire serve: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from quire.cli.config_file import ConfigFile, with_variables
from quire.cli.environment import warn_of_unknown_variables
from quire.cli.options import ENGINE, ModelName, fail_in, no_model, taken, taken_model, with_options
from quire.cli.vllm_flags import PASTED
from quire.errors import QuireError
from quire.importing import uncollected
from quire.server.logs import JSON, fields, set_up_logs
from quire.server.server_config import ServerConfig

if TYPE_CHECKING:
    from quire.server.run import FleetMember

log = logging.getLogger("quire.server")


@with_options(ServerConfig, *ENGINE)
def serve(
    context: typer.Context,
    model_name: ModelName = None,
    _config: ConfigFile = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP as OpenAI does, with a window into its KV cache at /inspector."""
    began = time.monotonic()
    options["model"] = taken_model(context, model_name, options["model"])
    options |= context.meta.get(PASTED, {})
    from quire.server.signals import obey_as_first_process

    obey_as_first_process()
    server = ServerConfig(**taken(ServerConfig, options))
    set_up_logs(server.log_format)
    warn_of_unknown_variables(context)
    note = None if options["model"] is not None else no_model("quire serve")
    try:
        with uncollected():
            from quire.server.run import serve as run  # imported late, since its imports are slow

        tell = partial(_log if server.log_format == JSON else _print, note)
        status = run(options, server, began, tell, _join_fleet)
    except QuireError as error:
        fail_in(server.log_format, with_variables(error, context))
    raise typer.Exit(status)


def _join_fleet(*parts: Any) -> FleetMember:
    """Return the interface for gateways. It is imported only if `--fleet-secret` is set."""
    from quire.fleet.replica import Replica

    return Replica(*parts)


def _print(note: str | None, where: str, chosen: Mapping[str, str]) -> None:
    rows = [f"  {what:8s} {how}" for what, how in chosen.items()]
    print("\n".join([where, *([] if note is None else [note]), *rows]), file=sys.stderr, flush=True)


def _log(note: str | None, where: str, chosen: Mapping[str, str]) -> None:
    log.info(where, extra=fields(**chosen))
    if note is not None:
        log.info(note)
