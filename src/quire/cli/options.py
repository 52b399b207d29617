"""Helpers shared by commands: options made from the fields of configs, and output."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from quire.cli.environment import variable_of
from quire.config import CacheConfig, EngineConfig, options_of
from quire.server.logs import JSON

Config = type[Any]  # a dataclass with options
ENGINE = (EngineConfig, CacheConfig)  # their fields are the arguments of `quire.LLM`
# Fields of these for many concurrent requests or several adapters. Commands for a few requests omit these options.
OF_MANY = ("max_num_seqs", "max_num_batched_tokens", "scheduling_policy", "enable_lora", "max_loras")
MEMORY = int | float | str  # bytes, or a share


def with_options(
    *configs: Config, only: Sequence[str] = (), without: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's parameter **options with an option for each field of the configs.

    only: fields to include; default: all. without: fields to exclude.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        made = [
            _parameter(config, name)
            for config in configs
            for name in options_of(config)
            if name not in without and (not only or name in only)
        ]
        command.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
        return command

    return give


def taken(config: Config, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a config from a command's options, and return them with the config's types."""
    given = {one.name: options.pop(one.name) for one in fields(config) if one.name in options}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _parameter(config: Config, name: str) -> inspect.Parameter:
    kind, default = get_type_hints(config)[name], getattr(config, name)
    if kind == tuple[str, ...]:
        kind, default = list[str], list(default)
    elif kind in (MEMORY, MEMORY | None):
        kind, default = str | None if default is None else str, f"{default:.0%}" if default else None
    about = options_of(config)[name]
    made = typer.Option(
        default,
        *_names(config, name),
        help=about.help,
        show_default=default != [],
        envvar=variable_of(name),
        autocompletion=complete_model if name == "model" else None,
    )
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=made, annotation=kind)


def _names(config: Config, name: str) -> tuple[str, ...]:
    flag = name.replace("_", "-")
    has_both = getattr(config, name) is True or get_type_hints(config)[name] == bool | None
    names = f"--{flag}/--no-{flag}" if has_both else f"--{flag}"
    return (names, *options_of(config)[name].aliases)


def field_option(config: Config, name: str) -> Any:
    """Return an option with a field's names and help, for a command with a different default."""
    completion = complete_model if name == "model" else None
    return typer.Option(
        *_names(config, name),
        help=options_of(config)[name].help,
        envvar=variable_of(name),
        autocompletion=completion,
    )


ApiKey = Annotated[
    str | None,
    typer.Option(help="Key of that server. Better kept in the environment.", envvar=variable_of("api_key")),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def row(name: str, value: str) -> None:
    """Print one line of a table."""
    print(f"{name:18s} {value}")


def source_of(context: typer.Context, name: str) -> str:
    """Return the source of an option's value, such as COMMANDLINE, ENVIRONMENT, DEFAULT_MAP (--config) or DEFAULT."""
    source = context.get_parameter_source(name)
    return "" if source is None else source.name


def taken_model(context: typer.Context, argument: str | None, option: str | None) -> str | None:
    """Return the model that was given as an argument or as --model. Fail if both are given."""
    if argument is None:
        return option
    if source_of(context, "model") == "COMMANDLINE":
        fail(f"the model is given twice, as {argument!r} and as --model {option!r}; give one of them")
    return argument


def complete_model(incomplete: str) -> list[str]:
    """Return the models of the hub's cache whose names begin with `incomplete`, for shell completion."""
    from quire.models.cached import cached_names

    return [name for name in cached_names() if name.startswith(incomplete)]


ModelName = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="The same as --model.", autocompletion=complete_model)
]


def no_model(command: str) -> str:
    """Return the notice of a command that was given no model."""
    return (
        "No model was named, so this is the small one that comes with Quire, which writes Python. "
        f"{command} MODEL takes a directory, a GGUF file or a name on the hub."
    )


def fail_in(log_format: str, reason: object) -> NoReturn:
    """Report an error in the log's format, and exit with status 1."""
    if log_format == JSON:
        logging.getLogger("quire").error("%s", reason)
        raise typer.Exit(1)
    fail(reason)


def fail(reason: object) -> NoReturn:
    """Print an error and exit with status 1."""
    print(f"error: {reason}", file=sys.stderr)
    raise typer.Exit(1)
