"""Gateway: OpenAI's API in front of a fleet. It makes prompts and answers; replicas compute the tokens."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import aiohttp
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest

from quire import __version__
from quire.errors import ConfigError
from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.config import GatewayConfig
from quire.fleet.dispatch import Dispatcher
from quire.fleet.inspector import FleetWatch
from quire.fleet.link import read_body
from quire.fleet.membership import Member, Membership
from quire.fleet.metrics import FleetMetrics
from quire.fleet.stream import NumberedStream, last_event
from quire.fleet.wire import Hello, Images, loads, read
from quire.fleet.work import FarGuide
from quire.frontend.images import check_count, image_rows
from quire.frontend.request_factory import TokenizedPrompt
from quire.frontend.requests import Made
from quire.frontend.tokenizer import find_tokenizer
from quire.models.files import Directory
from quire.models.pooling_config import PoolingConfig
from quire.request import Guide
from quire.sandbox.chat_template import ChatTemplate
from quire.sandbox.grammar import Spec
from quire.server.api.app import build_app
from quire.server.api.jobs import Stream
from quire.server.api.service import Identity, ServedModel, Service
from quire.server.batch.routes import routers as batch_routers
from quire.server.http.api_error import ApiError
from quire.server.http.guard import client_of
from quire.server.run import (
    Listening,
    address_of,
    allow_connections,
    find_dialect,
    listen,
    open_traces,
    run_until_stopped,
    settings,
)

log = logging.getLogger("quire.fleet")

# Statuses of a server that is not a replica of this fleet and never will be.
NEVER = MappingProxyType(
    {
        HTTPStatus.UNAUTHORIZED: "it has another secret",
        HTTPStatus.FORBIDDEN: "it does not answer by this name (--allowed-hosts)",
        HTTPStatus.NOT_FOUND: "it was started without --fleet-secret",
    }
)
ASK_AGAIN = 0.2  # s, while no replica has answered yet
MAX_KEY = 256  # characters of an Idempotency-Key


class FleetService(Service):
    """A service whose requests have names that outlive the gateway, so that another gateway can continue a stream."""

    fleet: Dispatcher
    no_images: str | None  # see Hello

    def why_no_images(self) -> str | None:
        """Return the reason why the replicas read no images; None: they do."""
        return self.no_images

    async def encode_images(self, request: HttpRequest, text: str, urls: Sequence[str]) -> TokenizedPrompt:
        """Tokenize a rendered text with a mark for each image, at a replica. Raises ApiError."""
        check_count(len(urls))
        images = Images(text, list(urls))
        found = await self.fleet.encode(images)
        rows = image_rows(found.tokens, found.placeholder, found.starts)
        return TokenizedPrompt(text, found.tokens, images=rows._replace(values=images))

    def identity(self, request: HttpRequest, kind: str) -> Identity:
        """Return the name that the client's headers give the request, or a new one.

        Last-Event-ID: the last event of a stream that the client received. Idempotency-Key: the same key gives the same
        name, and so the same seed. Raises ApiError for an invalid header.
        """
        last, key = last_event(request.headers.get("last-event-id")), request.headers.get("idempotency-key")
        if last is not None:
            if not last.name.startswith(f"{kind}-"):
                raise ApiError(f"the header Last-Event-ID names {last.name}, which is an answer of another route")
            return Identity(last.name, last.created)
        if key is None:
            return super().identity(request, kind)
        if not 0 < len(key) <= MAX_KEY:
            raise ApiError(f"the header Idempotency-Key has {len(key)} characters; it must have 1 to {MAX_KEY}")
        digest = blake2b(f"{client_of(request)}\0{key}".encode(errors="surrogatepass"), digest_size=16).hexdigest()
        return Identity(f"{kind}-{digest}", int(time.time()))

    def stream(self, request: HttpRequest, identity: Identity, prompts: Sequence[Made]) -> Stream:
        """Return a stream that continues after the client's last event."""
        return NumberedStream(identity, prompts, last_event(request.headers.get("last-event-id")))

    async def compiled(self, client: str, spec: Spec, field: str) -> Guide:
        """Return the grammar uncompiled: the replica compiles it."""
        return FarGuide(spec, field)


# --------------------------------------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Found:
    """The model as the first replica describes it."""

    hello: Hello
    files: dict[str, str]  # contents by name: tokenizer, its settings and the chat template


class FleetServer:
    """Serves a fleet under one address: waits for a replica, starts the gateway, and runs it until it is stopped."""

    def __init__(self, membership: Membership, config: GatewayConfig, tell: Callable[[str], None]) -> None:
        """`tell`: called with each status line, such as the address."""
        self._membership = membership
        self._config = config
        self._tell = tell
        self._server: GatewayServer | None = None
        self._is_stopped = False

    def run(self) -> None:
        """Serve until `stop`, or until a signal, which ends the process.

        Raises QuireError, before anything is served, if an option cannot be honoured.
        """
        listening = listen(self._config.host, self._config.port)
        allow_connections()
        try:
            self._tell("waiting for a replica")
            found = asyncio.run(self._find())
            if found is None:
                return
            with TemporaryDirectory(prefix="quire-gateway-") as directory:  # removed before a signal ends the process
                gateway = build_gateway(self._membership, self._config, found, Path(directory))
            gc.collect()
            gc.freeze()  # loaded objects stay, so the collector need not scan them while tokens wait

            def ready() -> None:
                name, address = gateway.service.model.names[0], address_of(listening, self._config)
                self._tell(f"Quire {__version__} serves {name} at {address} with a fleet")

            self._server = GatewayServer(settings(gateway.app(), self._config), gateway, ready)
            if not self._is_stopped:
                run_until_stopped(self._server, listening)
        finally:
            listening.close()

    def stop(self) -> None:
        """Accept no further connections. `run` returns when open answers have ended or the shutdown timeout is over.

        Thread-safe; may be called at any time.
        """
        self._is_stopped = True
        if self._server is not None:
            self._server.should_exit = True

    async def _find(self) -> Found | None:
        """Return the model of the first replica that answers; None if the server is stopped meanwhile."""
        finding = asyncio.create_task(find_model(self._membership, self._config))
        while not self._is_stopped:
            await asyncio.wait([finding], timeout=ASK_AGAIN)
            if finding.done():
                return finding.result()
        return None


@dataclass
class Gateway:
    """The components of a gateway."""

    service: FleetService
    fleet: Dispatcher
    metrics: FleetMetrics
    watch: FleetWatch

    def app(self) -> FastAPI:
        """Return the ASGI application."""
        return build_app(self.service, self.metrics, [self.watch.router(), *batch_routers(self.service)])


class GatewayServer(Listening):
    """Waits for open answers before it stops. Inspector streams, which never end by themselves, are closed first."""

    def __init__(self, settings: uvicorn.Config, gateway: Gateway, ready: Callable[[], None]) -> None:
        super().__init__(settings, ready, gateway.service)
        self._gateway = gateway

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the running answers, then stop."""
        gateway = self._gateway
        gateway.watch.close()
        end_all = partial(gateway.fleet.end_all, "the gateway is stopping")
        timer = asyncio.get_running_loop().call_later(gateway.service.config.shutdown_timeout, end_all)
        await super().shutdown(sockets)
        timer.cancel()


def build_gateway(membership: Membership, config: GatewayConfig, found: Found, directory: Path) -> Gateway:
    """Return a gateway whose fleet is not started. directory: an empty one for the model's files."""
    hello = found.hello
    for name, text in found.files.items():
        (directory / name).write_text(text, "utf-8")
    files = Directory(directory)
    model = ServedModel(
        names=tuple(hello.names),
        tokenizer=find_tokenizer(files),
        tokenizer_settings=files.tokenizer_settings(),
        template=(template := ChatTemplate.find(files)),
        dialect=find_dialect(template, config),
        max_model_len=hello.max_model_len,
        vocab_size=hello.vocab_size,
        eos_token_ids=frozenset(hello.eos_token_ids),
        hidden_size=hello.hidden_size,
        root=hello.root,
        default_sampling=hello.default_sampling,
        pooling=PoolingConfig.of_json(hello.pooling),
        loras=dict.fromkeys(hello.loras, hello.names[0]),
    )
    metrics = FleetMetrics()
    secret = config.fleet_secret or ""
    traces = open_traces(config, "quire-fleet", model.names[0])
    fleet = Dispatcher(membership, secret, Fingerprint.from_json(hello.fingerprint), hello, config, metrics, traces)
    watch = FleetWatch(fleet, {"model": model.names[0], "version": __version__})
    metrics.show(watch.replicas)
    service = FleetService(model, fleet, config, traces)
    service.fleet, service.no_images = fleet, hello.no_images
    return Gateway(service, fleet, metrics, watch)


async def find_model(membership: Membership, config: GatewayConfig) -> Found:
    """Wait for a replica that answers and return its model.

    Raises ConfigError if one refuses the fleet's secret or is not a replica.
    """
    headers = {"Authorization": f"Bearer {config.fleet_secret}"}
    timeout = aiohttp.ClientTimeout(total=10, sock_connect=2)
    known: set[Member] = set()
    changed = asyncio.Event()

    async def follow() -> None:
        async for members in membership.changes():
            known.clear()
            known.update(members)
            changed.set()

    following = asyncio.create_task(follow())
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
            while True:
                for member in sorted(known):
                    found = await _asked(http, member)
                    if found is not None:
                        return found
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), ASK_AGAIN)
                changed.clear()
    finally:
        following.cancel()


async def _asked(http: aiohttp.ClientSession, member: Member) -> Found | None:
    """Return the model of a member; None if it is not ready. Raises ConfigError if it can never answer."""
    try:
        async with http.get(f"{member.url}/fleet/model") as answer:
            if (why := NEVER.get(HTTPStatus(answer.status))) is not None:
                raise ConfigError(f"{member.url} does not serve this fleet: HTTP status {answer.status}, {why}")
            if answer.status != HTTPStatus.OK:
                return None
            body = loads(await read_body(answer))
            return Found(read(Hello, body["hello"]), dict(body["files"]))
    except ConfigError:
        raise
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
        log.debug("%s is not ready: %s", member.url, error)
        return None
