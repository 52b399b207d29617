"""Helpers shared by commands: options made from the fields of configs, and output."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import typer

from quire.cli.environment import default_url, variable_of
from quire.config import CacheConfig, EngineConfig, group_of, options_of
from quire.request import FILE, SERVED, SamplingParams
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


def with_sampling(
    *, without: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for each sampling parameter that has a help text.

    Their values are None unless they are given, see `sampling_of`. without: fields to exclude. defaults: values of the
    command for fields that neither the user nor the model sets, where they differ from those of SamplingParams.
    """

    def give(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        *own, rest = signature.parameters.values()
        made = []
        for one in fields(SamplingParams):
            if one.name in without or not (served := SERVED.get(one.name)) or not served.help:
                continue
            value = defaults.get(one.name, one.default)
            least = "all that fit" if one.name == "max_tokens" and value is None else value
            usual = f"Default: the model's, else {least}." if FILE in served.names else f"Default: {value}."
            text = served.help if least is None else f"{served.help} {usual}"
            kind: Any = get_type_hints(SamplingParams)[one.name]
            kind = list[str] if Sequence[str] in get_args(kind) else kind | None
            flag = f"-{'-' * (len(one.name) > 1)}{one.name.replace('_', '-')}"
            option = typer.Option(None, flag, help=text, rich_help_panel="Sampling")
            made.append(
                inspect.Parameter(
                    one.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=option, annotation=kind | None
                )
            )
        command.__signature__ = signature.replace(parameters=[*own, *made, rest])  # type: ignore[attr-defined]
        return command

    return give


def sampling_of(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the sampling parameters from a command's options, and return those that were given.

    Raises RequestError for an invalid one, before a model is loaded.
    """
    found = {name: options.pop(name) for name in SERVED if name in options}
    given = {name: value for name, value in found.items() if value not in (None, [], ())}
    SamplingParams(**given)
    return given


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
        rich_help_panel=group_of(config, name),
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


def _first_key(context: typer.Context, key: str | None) -> str | None:
    """Return the key to send. A server's variable may have several, separated by spaces."""
    return key.split()[0] if key and key.strip() and source_of(context, "api_key") == "ENVIRONMENT" else key


ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Key of that server. Better kept in the environment.",
        envvar=variable_of("api_key"),
        callback=_first_key,
    ),
]
ServerUrl = Annotated[
    str,
    typer.Option(
        default_factory=default_url,
        show_default="http://127.0.0.1:8000, or the port of QUIRE_PORT",
        help="URL of the server.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def row(name: str, value: str) -> None:
    """Print one line of a table."""
    print(f"{name:18s} {value}")


def source_of(context: typer.Context, name: str) -> str:
    """Return the source of an option's value, such as COMMANDLINE, ENVIRONMENT, DEFAULT_MAP (--config) or DEFAULT."""
    source = context.get_parameter_source(name)
    return "" if source is None else source.name


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of texts, with columns as wide as their longest text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for texts in rows:
        print("  ".join(f"{text:{width}}" for text, width in zip(texts, widths, strict=True)).rstrip())


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
        f"{command} MODEL takes a directory, a GGUF file, a name on the hub, or a short name: "
        "quire models --fits lists those that fit here."
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
