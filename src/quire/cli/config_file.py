"""Sources of options: the command line, else the environment, else the YAML file of --config."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.command import Command
from quire.cli.environment import variable_of, warn_of_unknown_variables
from quire.cli.options import fail, source_of
from quire.errors import ConfigError

FILE = "quire.config_file"  # key of the file's path in a context's meta
VARIABLES = "quire.variables"  # key of the options' variables that were used, by the options' names
SERVICE_LINK = re.compile(r"(tcp|udp)://")  # value of a variable that Kubernetes derives from a Service


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


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML: these options by name.",
        is_eager=True,
        callback=read_config_file,
        envvar=variable_of("config"),
    ),
]


class Sourced(Command):
    """A command whose errors name the variable or the file that an invalid value comes from."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = str(getattr(error.param, "name", ""))
            source = source_of(ctx, name)
            if source == "ENVIRONMENT":
                variable, value = error.param.envvar, str(error.param.resolve_envvar_value(ctx))  # type: ignore[union-attr]
                hint = "; Kubernetes sets it for a Service of that name, unless the pod has enableServiceLinks: false"
                fail(f"{variable} is {value!r}; {error.message}{hint if SERVICE_LINK.match(value) else ''}")
            if source != "DEFAULT_MAP" or FILE not in ctx.meta:
                raise
            value = ctx.default_map[name]
            fail(f"{ctx.meta[FILE]}: {name.replace('_', '-')} is {value!r}; {error.message}")
        ctx.meta[VARIABLES] = {
            one.name: one.envvar for one in self.params if one.name and source_of(ctx, one.name) == "ENVIRONMENT"
        }
        if all(one.name != "log_format" for one in self.params):  # the others warn once their log has its format
            warn_of_unknown_variables(ctx)
        return rest


def with_variables(reason: object, context: typer.Context) -> str:
    """Return an error message, with the variables that the options in it come from."""
    used: dict[str, str] = context.meta.get(VARIABLES, {})
    found = [variable for name, variable in used.items() if re.search(rf"\b{name}\b", str(reason))]
    return f"{reason} (from the environment: {', '.join(found)})" if found else str(reason)


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
