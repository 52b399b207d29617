"""Start a server from its options, run it, and shut it down in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette

from quire import __version__
from quire.cache.storage import cache_dtype
from quire.config import EMBEDDED_NAME, parse_loras
from quire.engine.cost import DEVICES, CostModel, cost_of
from quire.engine.prefill_budget import LONGEST_STEP, PrefillBudget
from quire.errors import ConfigError
from quire.fingerprint.fingerprint import Fingerprint
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.clocks import Clocks
from quire.frontend.llm import LLM
from quire.frontend.metrics import Metrics
from quire.frontend.model_fingerprint import lora_digests, system_fingerprint, template_digest
from quire.frontend.startup_summary import chosen
from quire.models.files import GENERATION
from quire.parallel.launch import is_follower
from quire.sandbox.chat_template import ChatTemplate
from quire.sandbox.process import SandboxFailed
from quire.server.api import lora, weights
from quire.server.api.app import build_app
from quire.server.api.local_engine_client import LocalEngineClient
from quire.server.api.pull import Puller
from quire.server.api.service import ServedModel, Service
from quire.server.batch.routes import routers as batch_routers
from quire.server.http.connection import MAX_CONNECTIONS, Connection
from quire.server.http.hosts import media_domains
from quire.server.http.image_fetcher import ImageFetcher
from quire.server.observability import inspector
from quire.server.observability.inspector import Inspector
from quire.server.observability.statistics import Statistics
from quire.server.server_config import HttpConfig, ServerConfig
from quire.server.signals import end
from quire.server.tools.dialect import Dialect

if TYPE_CHECKING:  # imported only where the option is set
    from quire.server.observability.kv_events import KVEventPublisher
    from quire.server.observability.traces import Traces

log = logging.getLogger("quire.server")

REPORT_EVERY = 10.0  # seconds between two lines of statistics, while there is work
FAREWELL = 5  # seconds for sending an error to requests that did not end in time
KEEP_ALIVE = 30  # seconds that a connection stays open for the next request
WATCHED = 60.0  # seconds after a request of /ready in which a balancer is assumed to request it again


class FleetMember(Protocol):
    """The server's interface for the gateways of a fleet."""

    fingerprint: Fingerprint

    def router(self) -> APIRouter:
        """Return its routes."""

    def drain(self) -> None:
        """Accept no further calls, and let gateways move running ones."""

    def close(self) -> None:
        """Close its connections to gateways."""


JoinFleet: TypeAlias = Callable[
    [LLM, LocalEngineClient, Service, Metrics, str], FleetMember
]  # the last argument is the secret


def serve(
    options: Mapping[str, Any],
    config: ServerConfig,
    began: float,
    tell: Callable[[str, Mapping[str, str]], None],
    join_fleet: JoinFleet,
) -> int:
    """Serve a model until the engine fails. Return the process's exit status.

    A signal that stops the server ends the process.

    options: those of `LLM`. began: time.monotonic() at the start of the process. `tell` is called when the server
    listens, with a line that contains the address and with the startup summary, by name. join_fleet: makes the
    interface for gateways, if `fleet_secret` is set.
    Raises QuireError if an option cannot be honoured; nothing was served then.
    """
    if int(options.get("tensor_parallel_size", 1)) > 1 and is_follower():
        LLM(**options)  # follows rank 0, and ends this process with it
    listening = listen(config.host, config.port)  # first: a used port must not cost the time to load a model
    allow_connections()
    try:
        parts = build_parts(options, config, join_fleet)
        template = parts.service.model.template

        def ready() -> None:
            address = address_of(listening, config)
            tell(listening_sentence(parts, address, time.monotonic() - began), chosen_by(parts))
            if template is not None:
                with contextlib.suppress(SandboxFailed):  # the failure is logged, and the first chat tries again
                    template.start()

        gc.collect()
        gc.freeze()  # loaded objects stay alive, so the collector must not scan them whenever a large body is parsed
        server = Server(settings(parts.app(), config), parts, ready)
        run_until_stopped(server, listening)
    finally:
        listening.close()
    return 1 if server.engine_failed else 0


def run_until_stopped(server: Listening, listening: socket.socket) -> None:
    """Run a server on a listening socket. A signal that stops the server ends the process."""
    if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
        # From here on `Listening` handles interrupts, and uvicorn raises them again at its end.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # uvicorn raises an interrupt again after it has obeyed it
        if server.signal is None:
            raise
    if server.signal is not None:  # also SIGTERM, which has no effect on the first process of a container
        end(server.signal)


@dataclass
class ServerParts:
    """A loaded model and the parts of its server."""

    llm: LLM
    engine_client: LocalEngineClient
    service: Service
    metrics: Metrics
    inspector: Inspector
    member: FleetMember | None  # None: no fleet's gateways are served
    allows_lora_loading: bool = False
    statistics: Statistics | None = None  # None: no statistics are logged
    publisher: KVEventPublisher | None = None  # None: no block events are published

    def app(self) -> FastAPI:
        """Return the application that serves the model."""
        routers = [inspector.router(self.inspector, self.engine_client.llm), *batch_routers(self.service)]
        if self.member is not None:
            routers.append(self.member.router())
        if self.allows_lora_loading:
            routers.append(lora.router(self.engine_client, self.service.model))
        if isinstance(self.service.config, ServerConfig) and self.service.config.admin_api_key is not None:
            routers.append(weights.router(self.engine_client, self.service))
        return build_app(self.service, self.metrics, routers)


def build_parts(options: Mapping[str, Any], config: ServerConfig, join_fleet: JoinFleet | None = None) -> ServerParts:
    """Load a model and build the parts of its server. The engine client is not started."""
    if config.fleet_secret and join_fleet is None:
        raise ConfigError("fleet_secret is set, but this server was started without an interface for gateways")
    publisher = open_publisher(options, config)  # first: a wrong option must not cost the time to load a model
    if publisher is None:
        return _loaded(options, config, join_fleet)
    try:
        parts = _loaded(options, config, join_fleet)
        publisher.start(parts.llm.engine)
    except BaseException:
        publisher.close()
        raise
    parts.engine_client.llm.observers.append(publisher.observe)
    parts.publisher = publisher
    return parts


def open_publisher(options: Mapping[str, Any], config: ServerConfig) -> KVEventPublisher | None:
    """Return the publisher of block events, or None if `kv_events` is not set. Raises ConfigError if it cannot work.

    options: those of `LLM`.
    """
    if config.kv_events is None:
        return None
    if not options.get("enable_prefix_caching", True):
        raise ConfigError(
            f"kv_events is {config.kv_events!r} and enable_prefix_caching is False; without a prefix cache no block is "
            f"published, so leave one of them out"
        )
    try:
        from quire.server.observability.kv_events import KVEventPublisher
    except ImportError as error:
        raise ConfigError(
            f"kv_events is {config.kv_events!r}; it needs the package {error.name}: pip install 'quire[events]'"
        ) from error
    return KVEventPublisher(config.kv_events, config.kv_events_replay, config.kv_events_topic)


def _loaded(options: Mapping[str, Any], config: ServerConfig, join_fleet: JoinFleet | None) -> ServerParts:
    names = config.served_model_name or (options.get("model") or EMBEDDED_NAME,)
    traces = open_traces(config, "quire", names[0])  # first: a wrong option must not cost the time to load a model
    loras = parse_loras(config.lora)
    if config.allow_lora_loading:
        options = {**options, "enable_lora": True}
    llm = LLM(lora=loras, **options)
    if config.reranker == "yes-no" and (llm.engine.pooling.labels or llm.engine.pooling.encodes):
        raise ConfigError(
            "reranker is yes-no, which needs a model that writes, and this one is an encoder; leave it out"
        )
    template = ChatTemplate.find(llm.text_files, config.chat_template)
    if llm.receipts is not None and template is not None:
        parts = {**llm.receipts.fingerprint.parts, "template": template_digest(template.source)}
        llm.receipts.fingerprint = Fingerprint(parts)
    metrics = Metrics(llm.engine, names[0], config.vllm_metrics, _model_info(llm))
    watched = Inspector(llm.engine, {"model": names[0], "backend": llm.backend.name}, not config.keys)
    device = DEVICES["cpu" if llm.config.device == "cpu" else "h200"]
    cost = CostModel(cost_of(llm.decoder), device, llm.config.cache.block_size)
    if llm.config.device == "cpu" and llm.config.max_num_batched_tokens is None:
        llm.engine.scheduler.pace = PrefillBudget(cost.seconds_a_prompt_token)
    limits = (config.max_num_queued_reqs, config.request_timeout, config.stuck_after)
    engine_client = LocalEngineClient(AsyncLLM.of(llm), Clocks(metrics, traces), cost, *limits)
    engine_client.llm.observers.append(watched.observe_step)
    engine = llm.engine
    model = ServedModel(
        names=names,
        tokenizer=llm.tokenizer,
        tokenizer_settings=llm.text_files.tokenizer_settings(),
        template=template,
        dialect=find_dialect(template, config),
        max_model_len=engine.scheduler.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=engine.eos_token_ids,
        hidden_size=llm.hidden_size,
        root=options.get("model") or EMBEDDED_NAME,
        default_sampling=llm.default_sampling,
        pooling=engine.pooling,
        loras=loras,
    )
    service = Service(model, engine_client, config, traces, Puller() if config.allow_pull else None)
    service.factory.images = llm.factory.images
    if config.allowed_media_domains:
        service.fetcher = ImageFetcher(media_domains(config.allowed_media_domains))
    member = None
    if config.fleet_secret and join_fleet is not None:
        member = join_fleet(llm, engine_client, service, metrics, config.fleet_secret)
    engine_client.identify = _identify(llm, None if template is None else template.source, member)
    statistics = Statistics(llm.engine, metrics) if config.log_stats else None
    return ServerParts(llm, engine_client, service, metrics, watched, member, config.allow_lora_loading, statistics)


def _identify(llm: LLM, template: str | None, member: FleetMember | None) -> Callable[[], Fingerprint | None]:
    """Return a function that finds this system's fingerprint within a second. On a CPU another thread calls it."""
    # The adapters are digested now, before clients can load others.
    find = partial(system_fingerprint, llm, template, lora_digests(llm))
    if member is None and llm.config.device == "cpu":
        return find
    # While a graph is captured, no other thread may use the device.
    found = find() if member is None else member.fingerprint
    return lambda: found


def find_dialect(template: ChatTemplate | None, config: HttpConfig) -> Dialect:
    """Return the syntax of a model's tool calls and reasoning. Raises ConfigError for an unknown parser."""
    source = None if template is None else template.source
    return Dialect.find(source, config.tool_call_parser, config.reasoning_parser)


def open_traces(config: HttpConfig, service: str, model: str) -> Traces | None:
    """Return the exporter of traces, or None if no endpoint is set. Raises ConfigError if packages are missing.

    service: the service name in the traces. model: the model's name.
    """
    if config.otlp_traces_endpoint is None:
        return None
    try:
        from quire.server.observability.traces import Traces
    except ImportError as error:
        raise ConfigError(
            f"otlp_traces_endpoint is {config.otlp_traces_endpoint!r}; it needs OpenTelemetry's packages, and "
            f"{error.name} is missing: pip install 'quire[traces]'"
        ) from error
    return Traces.to(config.otlp_traces_endpoint, service, model)


def settings(app: Starlette, config: HttpConfig) -> uvicorn.Config:
    """Return uvicorn's settings for an application."""
    found = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        proxy_headers=False,  # nothing depends on a client's address
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=math.ceil(config.shutdown_timeout) + FAREWELL,
    )
    found.load()
    found.ssl = config.tls
    return found


class Draining(Protocol):
    """The part of a service that a server needs to drain."""

    draining: bool
    ready_asked: float

    @property
    def config(self) -> HttpConfig:
        """The options."""


class Listening(uvicorn.Server):
    """A server that calls `ready` when it listens, drains at SIGTERM, and keeps the signal that stopped it."""

    def __init__(self, settings: uvicorn.Config, ready: Callable[[], None], service: Draining) -> None:
        super().__init__(settings)
        self._service = service
        self.end_of_grace: float | None = None  # in seconds of time.monotonic(); None: it is not being stopped
        self.signal: int | None = None  # the last signal that stopped the server
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then call `ready`."""
        await super().startup(sockets)
        if self.started:
            self._ready()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop. After SIGTERM the server drains first: it serves, and /ready answers 503."""
        if not await super().on_tick(counter):
            return False
        if self.end_of_grace is None:
            self.drain()
            self.end_of_grace = time.monotonic() + self._grace()
        return time.monotonic() >= self.end_of_grace

    def drain(self) -> None:
        """Begin to drain: /ready answers 503."""
        self._service.draining = True

    def _grace(self) -> float:
        """Return the seconds in which the server still accepts connections. Without a balancer it is not waited."""
        grace = self._service.config.drain_grace
        if self.signal != signal.SIGTERM or not grace or time.monotonic() - self._service.ready_asked > WATCHED:
            return 0.0
        log.warning("stopping: requests are accepted for another %g s, in which /ready answers 503", grace)
        return grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the running requests, then stop."""
        if self.signal is not None:
            count = len(self.server_state.tasks)
            again = "Ctrl-C again ends them now" if self.signal == signal.SIGINT else "a SIGINT ends them now"
            timeout = self._service.config.shutdown_timeout
            if count:
                log.warning("stopping: %d open requests have %g s to end; %s", count, timeout, again)
            else:
                log.info("stopping: no request is open")
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down in order; after a second interrupt, end at once."""
        self.signal = sig
        super().handle_exit(sig, frame)
        if self.force_exit:
            end(sig)


class Server(Listening):
    """The server of a model. It closes streams without an end at shutdown, and stops when the engine has failed."""

    def __init__(self, settings: uvicorn.Config, parts: ServerParts, ready: Callable[[], None]) -> None:
        super().__init__(settings, ready, parts.service)
        self.engine_failed = False
        self._reports: asyncio.Task[None] | None = None
        self._parts = parts
        parts.engine_client.llm.on_failure = self._fail

    def drain(self) -> None:
        """Begin to drain: /ready answers 503, and a fleet's gateways move their requests to other replicas."""
        super().drain()
        if self._parts.member is not None:
            self._parts.member.drain()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen and to log statistics."""
        await super().startup(sockets)
        if self._parts.statistics is not None:
            self._reports = asyncio.create_task(self._report(self._parts.statistics))

    async def _report(self, statistics: Statistics) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY)
            if (line := statistics.line()) is not None:
                log.info(line)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the running requests, then stop. Requests that take too long end with an error."""
        parts = self._parts
        parts.inspector.close()
        end_all = partial(parts.engine_client.llm.end_all, "the server is stopping")
        timer = asyncio.get_running_loop().call_later(parts.service.config.shutdown_timeout, end_all)
        if parts.member is not None:
            parts.member.close()
        await super().shutdown(sockets)
        timer.cancel()
        if parts.llm.group is not None:
            await asyncio.to_thread(parts.llm.group.close)
        if self._reports is not None:
            self._reports.cancel()
        await asyncio.to_thread(parts.llm.engine.close)  # a signal ends the process without its finalizers
        if parts.publisher is not None:  # last, since steps produce events
            await asyncio.to_thread(parts.publisher.close)

    def _fail(self) -> None:
        self.engine_failed = True
        self.should_exit = True


def allow_connections() -> None:
    """Raise the limit of open files towards one for each connection. The system's default is often 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 256
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to the host and port. Raises ConfigError if that is not possible."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        hint = "; --port 0 takes a free one" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen at {host} port {port}: {error.strerror}{hint}") from error
    return listening


# ----------------------------------------------------------------------------------- the startup summary


def address_of(listening: socket.socket, config: HttpConfig) -> str:
    """Return the URL of a server."""
    host, port = listening.getsockname()[:2]
    scheme = "http" if config.tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def listening_sentence(parts: ServerParts, address: str, seconds: float) -> str:
    """Return the line that names the model and the address."""
    name = parts.service.model.names[0]
    return f"Quire {__version__} serves {name} at {address} (ready in {seconds:.1f} s)"


def chosen_by(parts: ServerParts) -> dict[str, str]:
    """Return the startup summary: the choices and their reasons, by name."""
    said = {
        "model": parts.service.model.names[0],
        **chosen(parts.llm),
        **({"sampling": _sampling(parts)} if parts.service.model.pooling.writes else {}),
        "limits": _limits(parts),
    }
    if parts.llm.engine.loras is not None:
        said["adapters"] = _adapters(parts)
    if parts.publisher is not None:
        said["events"] = str(parts.publisher)
    return said


def _model_info(llm: LLM) -> dict[str, str]:
    """Return the formats of the weights and the cache, for the metrics."""
    decoder = llm.decoder
    return {
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "quantization": decoder.quantisation or "none",
        "weight_bytes": str(decoder.weight_bytes.total),
        "cache_bits": str(8 * cache_dtype(llm.config.cache, decoder.dtype).itemsize),
    }


def _adapters(parts: ServerParts) -> str:
    limits, loaded = parts.llm.engine.known_loras().limits, parts.service.model.loras
    names = ", ".join(loaded) or "none"
    return f"{names}; up to {limits.max_loras} of rank {limits.max_rank} at most"


def _sampling(parts: ServerParts) -> str:
    defaults = parts.service.model.default_sampling
    source = parts.llm.config.generation_config
    if not defaults:
        return "OpenAI's defaults" + (f" (--generation-config {source})" if source != "auto" else "")
    where = GENERATION if source == "auto" else f"{source}/{GENERATION}"
    values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
    return f"{values}, unless a request sets them ({where}; --generation-config none leaves it out)"


def _limits(parts: ServerParts) -> str:
    scheduler, keys = parts.engine_client.engine.scheduler, parts.service.config.keys
    who = f"{len(keys)} API key{'' if len(keys) == 1 else 's'}" if keys else "no API key required"
    pace, most = scheduler.pace, scheduler.max_num_batched_tokens
    shorter = "" if pace is None else f" (while others decode {min(most, pace.most(1)):,}, or at most {LONGEST_STEP} s)"
    return (
        f"{scheduler.max_num_seqs} sequences at a time, {most:,} tokens a step{shorter}, "
        f"{parts.engine_client.max_samples - scheduler.max_num_seqs:,} queued; {who}"
    )
