"""The server's options. Frozen, like the engine's."""

from __future__ import annotations

import json
import re
import ssl
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from quire.config import LOGS, SCHEDULING, check_options, option, parse_loras
from quire.errors import ConfigError
from quire.server.http.hosts import check_allowed, media_domains
from quire.server.http.tls import server_context
from quire.server.logs import FORMATS

ACCESS, ANSWERS = "Access", "Chats and answers"  # headings in --help
MAX_WAIT = 86_400.0  # seconds
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
ENDPOINT = re.compile(r"tcp://[^:/]\S*:([0-9]{1,5}|\*)|ipc://.+")  # a ZeroMQ address that another process can use


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """The HTTP options shared by a server and a fleet's gateway."""

    GROUP: ClassVar[str] = "Server"

    host: str = option("127.0.0.1", "Address to listen at. 0.0.0.0 means all addresses.")
    port: int = option(8000, "Port to listen at. 0 takes any free one.", lower=0, upper=65_535)
    api_key: tuple[str, ...] = option(
        (),
        "Key that clients must send. May be repeated. Better kept in a file, or in the environment.",
        group=ACCESS,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Answer requests whose Host header names this, in addition to localhost; may be repeated; '*' is any. "
        "Default: localhost only if the host is 127.0.0.1 and there is no key, else any.",
        group=ACCESS,
    )
    api_key_file: Path | None = option(
        None, "File of such keys, one per line; lines that begin with # are comments.", group=ACCESS
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Let pages of this origin, such as https://chat.example.org, use the server from a browser (CORS); may be "
        "repeated; '*' is any. Default: none.",
        group=ACCESS,
    )
    ssl_certfile: Path | None = option(
        None, "PEM file of a certificate, its chain included: serve HTTPS, by TLS 1.2 or later.", group=ACCESS
    )
    ssl_keyfile: Path | None = option(
        None, "PEM file of the certificate's private key. Default: it is in the same file.", group=ACCESS
    )
    ssl_keyfile_password: str | None = option(
        None, "Password of an encrypted private key. Better kept in the environment.", group=ACCESS
    )
    fleet_secret: str | None = option(
        None,
        "Secret that a fleet's gateways and replicas share (docs/fleet.md). Better kept in the environment.",
        group=ACCESS,
    )
    max_body_size: int = option(4 * 2**20, "Most bytes of a request's body.", lower=1024, upper=2**40)
    data_dir: Path | None = option(
        None,
        "Directory for files, batches and created models: serve /v1/files and /v1/batches, and with ollama "
        "/api/create. One server at a time can use it. "
        "Default: these are not served.",
    )
    max_logprobs: int = option(20, "Most candidates per position that a request may ask for.", lower=0, upper=1024)
    request_timeout: float | None = option(
        None, "Most seconds that a request may take. Default: no limit.", lower=0.001, upper=MAX_WAIT
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get when the server is stopped.", lower=0.0, upper=MAX_WAIT
    )
    drain_grace: float = option(
        5.0,
        "Seconds after SIGTERM in which requests are still accepted while /ready answers 503, so that a balancer stops "
        "sending them. Not waited if /ready was not requested for a minute.",
        lower=0.0,
        upper=MAX_WAIT,
    )
    tool_call_parser: str | None = option(
        None,
        "Syntax of the model's tool calls, such as hermes, or none. Default: that of its chat template.",
        group=ANSWERS,
    )
    reasoning_parser: str | None = option(
        None,
        "Syntax of the model's reasoning, such as qwen3, or none. Default: that of its chat template.",
        group=ANSWERS,
    )
    default_chat_template_kwargs: str | None = option(
        None,
        'JSON object of variables of the chat template in every request, such as {"enable_thinking": false}.',
        group=ANSWERS,
    )
    enable_auto_tool_choice: bool = option(
        False,
        "Accepted from vLLM's command lines. The model may always choose among the tools of a request.",
        group=ANSWERS,
    )
    reranker: str = option(
        "auto",
        "How /v1/rerank and /v1/score compare texts: by the similarity of embeddings, or by the model's answer, as "
        "Qwen3-Reranker's (yes-no). auto: by its answer if its name has the word reranker.",
        choices=("auto", "similarity", "yes-no"),
        group=ANSWERS,
    )
    ollama: bool = option(False, "Serve Ollama's routes, such as /api/chat, as well.")
    otlp_traces_endpoint: str | None = option(
        None,
        "Send traces to this OTLP/HTTP endpoint, such as http://localhost:4318/v1/traces. Default: no traces.",
        group=LOGS,
    )
    unknown_fields: str = option(
        "report",
        "Unknown fields of a body: accept the request and name them in a header (report), or answer "
        "with an error (refuse). Misspelt ones, and those known to change the text elsewhere, are always errors.",
        choices=("report", "refuse"),
    )
    sse_keep_alive: float = option(
        15.0,
        "Seconds without an event after which a stream sends a comment, so that no proxy closes it; 0 sends none.",
        lower=0.0,
        upper=MAX_WAIT,
    )
    log_format: str = option(
        "text", "Lines of the log: text, or json, one object per line.", choices=FORMATS, group=LOGS
    )
    access_log: bool = option(True, "Log a line for each request: its id, status, seconds and tokens.", group=LOGS)
    enable_log_requests: bool = option(False, "Log each request, its prompt included.", group=LOGS)

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("api_key", "allowed_hosts", "allowed_origins"):
            check_texts(name, getattr(self, name))
        check_allowed(self.allowed_hosts)
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins has {origin!r}; give origins without a path, such as 'https://chat.example.org', "
                    f"or '*' for any"
                )
        if self.data_dir is not None and self.data_dir.exists() and not self.data_dir.is_dir():
            raise ConfigError(f"data_dir is {str(self.data_dir)!r}, which is a file; give a directory")
        self.template_kwargs()
        self.tls  # noqa: B018 - a wrong file must not cost the time to load a model
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_traces_endpoint is {endpoint!r}; it must be a URL, as http://HOST:4318/v1/traces")
        secret = () if self.fleet_secret is None else (self.fleet_secret,)
        check_texts("fleet_secret", secret)
        for name, keys in (("an api_key", self.keys), ("the fleet_secret", secret)):
            if any(not key.isascii() or not key.isprintable() for key in keys):
                raise ConfigError(f"{name} has characters that no HTTP header can carry; use printable ASCII")

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """All API keys, including those of the file. Raises ConfigError for a file without any."""
        path = self.api_key_file
        if path is None:
            return self.api_key
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {path} cannot be read: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:  # an error, because the server would then accept every client
            raise ConfigError(f"api_key_file {path} holds no key; write one key per line")
        return (*self.api_key, *found)

    @cached_property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS settings; None for plain HTTP. Raises ConfigError for files that cannot be used."""
        return server_context(self.ssl_certfile, self.ssl_keyfile, self.ssl_keyfile_password)

    def template_kwargs(self) -> dict[str, Any]:
        """Return default_chat_template_kwargs as an object. Raises ConfigError if it is not a JSON object."""
        given = self.default_chat_template_kwargs
        try:
            found = {} if given is None else json.loads(given)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"default_chat_template_kwargs is {given!r}; it must be a JSON object")
        return found


@dataclass(frozen=True, kw_only=True)
class ServerConfig(HttpConfig):
    """The options of a server of one model. Names are vLLM's where it has them."""

    # Answers contain the first one; (): the model's path.
    served_model_name: tuple[str, ...] = option((), "Name of the model for clients. May be repeated.")
    lora: tuple[str, ...] = option(
        (),
        "NAME=PATH of a LoRA adapter, served as a model of that name. May be repeated.",
        aliases=("--lora-modules",),
        group="LoRA",
    )
    allow_lora_loading: bool = option(
        False, "Let clients load adapters from any local directory, and unload them.", group="LoRA"
    )
    admin_api_key: str | None = option(
        None,
        "Key of the routes that replace the weights and put the model to sleep. Default: there are no such routes. "
        "Better kept in the environment.",
        group=ACCESS,
    )
    allow_pull: bool = option(
        False,
        "Let clients download models from the hub into its cache, by Ollama's /api/pull.",
        group=ACCESS,
    )
    allowed_media_domains: tuple[str, ...] = option(
        (),
        "Host from which images at http and https addresses are fetched, or several with commas; may be repeated. "
        "Default: none, and an image is given as a data URL.",
        group=ACCESS,
    )
    chat_template: Path | None = option(
        None, "Jinja file of a chat template, instead of the model's own.", group=ANSWERS
    )
    max_num_queued_reqs: int = option(
        1024, "Most samples that wait. Further ones get 429.", lower=0, upper=2**31 - 1, group=SCHEDULING
    )
    stuck_after: float | None = option(
        None,
        "Seconds after which a step counts as stuck: /ready then answers 503, and /health after ten times as long. "
        "Default: 16 times the seconds that the cost model predicts for the step, and at least 4.",
        lower=0.001,
        upper=MAX_WAIT,
    )
    log_stats: bool = option(True, "Log a line of statistics every ten seconds while there is work.", group=LOGS)
    vllm_metrics: bool = option(False, "Name the metrics as vLLM does.", group=LOGS)
    kv_events: str | None = option(
        None,
        "Publish block events, with token ids, in vLLM's form at this ZeroMQ endpoint, such as tcp://*:5557.",
        group=LOGS,
    )
    kv_events_replay: str | None = option(
        None, "ZeroMQ endpoint that replays the last 10,000 batches of events.", group=LOGS
    )
    kv_events_topic: str = option("", "Topic of the block events.", group=LOGS)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_texts("served_model_name", self.served_model_name)
        if taken := parse_loras(self.lora).keys() & {*self.served_model_name}:
            raise ConfigError(f"lora has the name {min(taken)!r}, which is the model's own; choose another")
        media_domains(self.allowed_media_domains)
        if self.allow_pull and not self.ollama:
            raise ConfigError("allow_pull is for /api/pull, one of Ollama's routes; it goes with ollama, so give both")
        if self.allow_lora_loading and self.fleet_secret is not None:
            raise ConfigError(
                "allow_lora_loading does not go with fleet_secret; all replicas of a fleet have the same adapters, so "
                "give them at the start (--lora)"
            )
        check_texts("admin_api_key", () if self.admin_api_key is None else (self.admin_api_key,))
        if self.admin_api_key is not None and not (self.admin_api_key.isascii() and self.admin_api_key.isprintable()):
            raise ConfigError("the admin_api_key has characters that no HTTP header can carry; use printable ASCII")
        if self.ssl_certfile is not None and self.fleet_secret is not None:
            raise ConfigError(
                "ssl_certfile does not go with fleet_secret; gateways reach replicas by HTTP, so give the certificate "
                "to the gateway"
            )
        for name in ("kv_events", "kv_events_replay"):
            endpoint = getattr(self, name)
            if endpoint is not None and not is_endpoint(endpoint):
                raise ConfigError(
                    f"{name} is {endpoint!r}; it must be tcp://HOST:PORT, with a port in 1..65535 or '*', or ipc://PATH"
                )
        for name in ("kv_events_replay", "kv_events_topic"):
            if getattr(self, name) and self.kv_events is None:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it goes with kv_events, so give both")


def check_texts(name: str, texts: tuple[str, ...]) -> None:
    """Raise ConfigError for an option that contains an empty string."""
    if any(not isinstance(text, str) or not text for text in texts):
        raise ConfigError(f"{name} contains an empty text; leave it out instead")


def is_endpoint(text: str) -> bool:
    """Return whether a text is a ZeroMQ address that other processes can use. ZeroMQ reads port 70000 as 4464."""
    match = ENDPOINT.fullmatch(text)
    return match is not None and (match[1] in (None, "*") or 1 <= int(match[1]) <= 65_535)
