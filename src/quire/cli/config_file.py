"""--config: options from a YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from quire.cli.options import fail
from quire.errors import ConfigError

FILE = "quire.config_file"  # key of the file's path in a context's meta


def read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Use a YAML file's entries as defaults of the options."""
    if path is None:
        return None
    options: dict[str, Any] = {
        option.name: option for option in context.command.params if option.name and option.name != "_config"
    }
    found = _options_of(path, options.keys(), f"quire {context.info_name}")
    context.default_map = {
        name: [value] if options[name].multiple and not isinstance(value, list | None) else value
        for name, value in found.items()
    }
    context.meta[FILE] = path
    return path


class TakesFile(TyperCommand):
    """A command with --config, whose errors name the file if an invalid value comes from it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = str(getattr(error.param, "name", ""))
            source = ctx.get_parameter_source(name)
            if source is None or source.name != "DEFAULT_MAP" or FILE not in ctx.meta:
                raise
            value = ctx.default_map[name]
            fail(f"{ctx.meta[FILE]}: {name.replace('_', '-')} is {value!r}; {error.message}")


def _options_of(path: Path, known: Collection[str], command: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}; it must hold options, as in 'max-num-seqs: 64'")
    options = {str(key).replace("-", "_"): value for key, value in found.items()}
    for name, value in options.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0].replace('_', '-')!r}?" if close else f"see {command} --help"
            raise ConfigError(f"{path}: there is no option {name.replace('_', '-')!r}; {hint}")
        if isinstance(value, dict):
            raise ConfigError(f"{path}: {name.replace('_', '-')} is {value!r}; it must be a plain value or a list")
    return options
