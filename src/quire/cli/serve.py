"""quire serve: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.config_file import read_config_file
from quire.cli.options import ENGINE, complete_model, fail, taken, taken_model, with_options
from quire.errors import QuireError
from quire.importing import uncollected
from quire.server.server_config import ServerConfig


@with_options(ServerConfig, *ENGINE)
def serve(
    context: typer.Context,
    model_name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", autocompletion=complete_model)
    ] = None,
    _config: Annotated[
        Path | None,
        typer.Option("--config", help="YAML: these options by name.", is_eager=True, callback=read_config_file),
    ] = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP as OpenAI does, with a window into its KV cache at /inspector."""
    began = time.monotonic()
    options["model"] = taken_model(context, model_name, options["model"])
    try:
        from quire.server.signals import obey_as_first_process

        obey_as_first_process()
        server = ServerConfig(**taken(ServerConfig, options))
        with uncollected():
            from quire.server.run import serve as run  # all that is heavy

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        status = run(options, server, began, lambda line: print(line, file=sys.stderr, flush=True))
    except QuireError as error:
        fail(error)
    raise typer.Exit(status)
