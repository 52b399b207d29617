"""A gateway's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire.config import option
from quire.errors import ConfigError
from quire.server.server_config import MAX_WAIT, HttpConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(HttpConfig):
    """Options of a gateway: those of its HTTP server, and its replicas."""

    GROUP: ClassVar[str] = "Fleet"

    replicas: str = option("", "Replicas: URLs with commas between them, or dns://NAME:PORT of a headless service.")
    resume: str = option(
        "exact",
        "How to handle an answer whose replica is lost. exact: another replica continues it, and it ends with an error "
        "if that replica's tokens differ. any: it continues even then. never: it ends with an error.",
        choices=("exact", "any", "never"),
    )
    patience: float = option(
        10.0, "Seconds that a request waits while no replica is available.", lower=0.0, upper=MAX_WAIT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fleet_secret is None:
            raise ConfigError(
                "there is no fleet_secret; make one, for example with `openssl rand -hex 32`, and give the same one to "
                "this gateway and to its replicas. A replica is a `quire serve --fleet-secret SECRET`, whose URL is "
                "one of replicas"
            )
