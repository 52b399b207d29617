"""quire serve: an OpenAI-compatible server."""

from __future__ import annotations

import difflib
import logging
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import ENGINE, fail, taken, with_options
from quire.errors import ConfigError, QuireError
from quire.importing import uncollected
from quire.server.server_config import ServerConfig


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Let a YAML file's entries stand for the options that are not given."""
    if path is None:
        return None
    options = {option.name: option for option in context.command.params if option.name and option.name != "_config"}
    try:
        found = _options_of(path, options.keys())
    except ConfigError as error:
        fail(error)
    context.default_map = {
        name: [value] if options[name].multiple and not isinstance(value, list | None) else value
        for name, value in found.items()
    }
    return path


def _options_of(path: Path, known: Collection[str]) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; it must hold options, as in 'max-num-seqs: 64'")
    options = {str(key).replace("-", "_"): value for key, value in found.items()}
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0].replace('_', '-')!r}?" if close else "see quire serve --help"
            raise ConfigError(f"{path}: there is no option {name.replace('_', '-')!r}; {hint}")
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {name.replace('_', '-')} is {value!r}; it must be a plain value or a list")
    return options


@with_options(ServerConfig, *ENGINE)
def serve(
    _config: Annotated[
        Path | None,
        typer.Option("--config", help="YAML: these options by name.", is_eager=True, callback=read_config_file),
    ] = None,
    **options: Any,
) -> None:
    """Serve a model over HTTP as OpenAI does, with a window into its KV cache at /inspector."""
    began = time.monotonic()
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
