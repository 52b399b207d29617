"""A gateway's options."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import option
from quire.errors import ConfigError
from quire.server.server_config import MAX_WAIT, HttpConfig


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(HttpConfig):
    """Whom a gateway serves with which replicas."""

    replicas: str = option("", "Replicas: URLs with commas between them, or dns://NAME:PORT of a headless service.")
    resume: str = option(
        "exact",
        "What happens to an answer whose replica is lost: it goes on elsewhere, and ends with an error if the other "
        "replica computes other bits (exact) or goes on nevertheless (any), or it ends with an error (never).",
        choices=("exact", "any", "never"),
    )
    patience: float = option(
        10.0, "Seconds that a request waits for a replica while there is none.", lower=0.0, upper=MAX_WAIT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fleet_secret is None:
            raise ConfigError("there is no fleet_secret; a gateway and its replicas need the same one")
