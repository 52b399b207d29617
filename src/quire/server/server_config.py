"""The server's options. Frozen, like the engine's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from quire.config import check_options, option
from quire.errors import ConfigError
from quire.server.http.hosts import check_allowed

MAX_WAIT = 86_400.0  # seconds
ENDPOINT = re.compile(r"tcp://[^:/]\S*:([0-9]{1,5}|\*)|ipc://.+")  # a ZeroMQ address that another process can use


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where to listen, whom to serve and how much of it. Names are vLLM's where it has them."""

    host: str = option("127.0.0.1", "Address to listen at. 0.0.0.0 stands for all.")
    port: int = option(8000, "Port to listen at. 0 takes any free one.", lower=0, upper=65_535)
    # The first one stands in answers; (): the model's path.
    served_model_name: tuple[str, ...] = option((), "Name of the model for clients. May be repeated.")
    api_key: tuple[str, ...] = option((), "Key that clients must send. May be repeated. Better kept in --config.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Answer requests whose Host header names this, besides localhost; may be repeated; '*' is any. "
        "Default: localhost only where the host is 127.0.0.1 and there is no key, else any.",
    )
    chat_template: Path | None = option(None, "Jinja file of a chat template, instead of the model's own.")
    max_num_queued_reqs: int = option(1024, "Most samples that wait. More get 429.", lower=0, upper=2**31 - 1)
    max_body_size: int = option(4 * 2**20, "Most bytes of a request's body.", lower=1024, upper=2**40)
    max_logprobs: int = option(20, "Most candidates per position that a request may ask for.", lower=0, upper=1024)
    stuck_after: float | None = option(
        None,
        "Seconds in one step after which /health says 503. Default: 16 times what a step of its size takes by its "
        "cost model, and at least 4.",
        lower=0.001,
        upper=MAX_WAIT,
    )
    request_timeout: float | None = option(
        None, "Most seconds that a request may take. Default: no limit.", lower=0.001, upper=MAX_WAIT
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get when the server is stopped.", lower=0.0, upper=MAX_WAIT
    )
    enable_log_requests: bool = option(False, "Log each request, its prompt included.")
    vllm_metrics: bool = option(False, "Name the metrics as vLLM does.")
    kv_events: str | None = option(
        None, "Publish block events, with token ids, in vLLM's form at this ZeroMQ endpoint, such as tcp://*:5557."
    )
    kv_events_replay: str | None = option(None, "ZeroMQ endpoint that gives the last 10,000 batches of events again.")
    kv_events_topic: str = option("", "Topic of the block events.")

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("served_model_name", "api_key", "allowed_hosts"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise ConfigError(f"{name} contains an empty text; leave it out instead")
        check_allowed(self.allowed_hosts)
        if any(not key.isascii() or not key.isprintable() for key in self.api_key):
            raise ConfigError("an api_key has characters that no HTTP header can carry; use printable ASCII")
        for name in ("kv_events", "kv_events_replay"):
            endpoint = getattr(self, name)
            if endpoint is not None and not is_endpoint(endpoint):
                raise ConfigError(
                    f"{name} is {endpoint!r}; it must be tcp://HOST:PORT, with a port in 1..65535 or '*', or ipc://PATH"
                )
        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(self, name) and self.kv_events is None:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it goes with kv_events, so give both")


def is_endpoint(text: str) -> bool:
    """Whether a text is a ZeroMQ address that other processes can use. ZeroMQ itself takes port 70000 for 4464."""
    match = ENDPOINT.fullmatch(text)
    return match is not None and (match[1] in (None, "*") or 1 <= int(match[1]) <= 65_535)
