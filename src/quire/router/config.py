"""A router's options, and the file of its models."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from quire.config import option
from quire.errors import ConfigError
from quire.server.server_config import MAX_WAIT, HttpConfig

# Options of the router alone. The others of HttpConfig are passed to each model's server.
OWN = {"host", "port", "allowed_hosts", "allowed_origins"}
OWN |= {"api_key", "api_key_file", "ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "fleet_secret"}
# Options that the router sets, and those of other ways to serve.
SET = {"host", "port", "api_key", "api_key_file", "served_model_name", "fleet_secret", "ssl_certfile"}


@dataclass(frozen=True, kw_only=True)
class RouterConfig(HttpConfig):
    """Options of a router: those of its HTTP server, and how long models stay in memory."""

    GROUP: ClassVar[str] = "Router"

    max_loaded: int = option(
        0,
        "Most models in memory at a time; 0: no limit. For another one, the model whose last request is longest ago is "
        "unloaded when its answers have ended.",
        lower=0,
    )
    idle_timeout: float = option(
        300.0, "Seconds without a request after which a model is unloaded; 0: never.", lower=0.0, upper=MAX_WAIT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fleet_secret is not None:
            raise ConfigError("fleet_secret is of a fleet, whose replicas have the same model; a router has none")
        if self.data_dir is not None:
            raise ConfigError("data_dir is a directory of one server; give each model its own in the file of models")

    def shared(self) -> dict[str, Any]:
        """Return the options that are passed to each model's server, where they are not the default."""
        names = [one.name for one in fields(HttpConfig) if one.name not in OWN]
        found = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(HttpConfig, name)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def read_models(path: Path, known: Collection[str]) -> dict[str, dict[str, Any]]:
    """Return the options of `quire serve` for each model of a YAML file, by the model's name.

    known: names of all options of `quire serve`. Raises ConfigError, with the file and the model.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(f"{path} must name models with their options, as in 'search: {{model: ./all-MiniLM-L6-v2}}'")
    return {str(name): _options(path, str(name), options, known) for name, options in found.items()}


def _options(path: Path, model: str, given: object, known: Collection[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("model"), str):
        raise ConfigError(
            f"{path}: {model} is {given!r}; it must have the options of quire serve, with model: as in "
            f"'{model}: {{model: ./directory, quantization: int8}}'"
        )
    options = {str(name).replace("-", "_"): value for name, value in given.items()}
    for name in options:
        if name in SET:
            raise ConfigError(f"{path}: {model} has the option {name.replace('_', '-')!r}, which the router sets")
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0].replace('_', '-')!r}?" if close else "see quire serve --help"
            raise ConfigError(f"{path}: {model}: there is no option {name.replace('_', '-')!r}; {hint}")
    return options
