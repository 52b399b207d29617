"""The server's options. Frozen, like the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError, check_integer, check_number
from quire.server.http.hosts import check_allowed

MAX_WAIT = 86_400.0  # seconds


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where to listen, whom to serve and how much of it. Names are vLLM's where it has them."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    served_model_name: tuple[str, ...] = ()  # what clients may call the model, the first one in answers; (): its path
    api_key: tuple[str, ...] = ()  # clients must know one of them; (): everybody is served
    allowed_hosts: tuple[str, ...] = ()  # that a Host header may name besides localhost; "*": any; (): see hosts.py
    chat_template: Path | None = None  # instead of the model's own
    max_num_queued_reqs: int = 1024  # samples that wait for a seat; more are turned away with 429
    max_body_size: int = 4 * 2**20  # bytes of a request
    max_logprobs: int = 20  # most candidates that may be asked for at a position
    stuck_after: float | None = None  # seconds in one step after which /health says 503; None: by the step's size
    request_timeout: float | None = None  # seconds after which a request is ended; None: never
    shutdown_timeout: float = 30.0  # seconds that running requests have to end when the server is told to stop
    enable_log_requests: bool = False  # log each request, its prompt included
    vllm_metrics: bool = False  # give the metrics vLLM's names

    def __post_init__(self) -> None:
        check_integer(ConfigError, "port", self.port, 0, 65_535)
        check_integer(ConfigError, "max_num_queued_reqs", self.max_num_queued_reqs, 0, 2**31 - 1)
        check_integer(ConfigError, "max_body_size", self.max_body_size, 1024, 2**40)
        check_integer(ConfigError, "max_logprobs", self.max_logprobs, 0, 1024)
        check_number(ConfigError, "shutdown_timeout", self.shutdown_timeout, 0.0, MAX_WAIT)
        for name in ("request_timeout", "stuck_after"):
            if (seconds := getattr(self, name)) is not None:
                check_number(ConfigError, name, seconds, 0.001, MAX_WAIT)
        for name in ("served_model_name", "api_key", "allowed_hosts"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise ConfigError(f"{name} contains an empty text; leave it out instead")
        check_allowed(self.allowed_hosts)
        if any(not key.isascii() or not key.isprintable() for key in self.api_key):
            raise ConfigError("an api_key has characters that no HTTP header can carry; use printable ASCII")
