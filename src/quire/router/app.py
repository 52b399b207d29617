"""The router's application: it forwards each request to the server of the model that the request names."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.fleet.process import ServerProcess
from quire.router.config import RouterConfig
from quire.router.pool import Entry, ModelPool, State
from quire.server.http.access import CLIENT_GONE, ID_HEADER, Access, Tally, note_refusal
from quire.server.http.api_error import ApiError, cut
from quire.server.http.guard import Guard, client_of, identity_of
from quire.server.http.hosts import hosts_to_check
from quire.server.http.sse import JsonBody, noticing_disconnect
from quire.server.run import Listening, address_of, allow_connections, listen, run_until_stopped, settings

log = logging.getLogger("quire.router")

LOOK_EVERY = 1.0  # seconds between two looks for idle models
# Headers of one connection, or that the other side's library makes itself.
OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
NOT_SENT = OF_CONNECTION | {"authorization", "x-api-key", ID_HEADER.lower()}  # keys are the router's
PROBED = ("/health", "/ready", "/metrics")
METRICS: tuple[tuple[str, str, str, Callable[[Entry], int]], ...] = (
    ("model_loaded", "Whether a model is in memory.", "gauge", lambda one: int(one.state is State.LOADED)),
    ("model_requests_open", "Requests of a model without a complete answer.", "gauge", lambda one: one.num_open),
    ("model_loads_total", "Times that a model was loaded.", "counter", lambda one: one.num_loads),
)


class Router:
    """A server of several models. Create one, then call `run`."""

    def __init__(self, models: Mapping[str, Mapping[str, Any]], config: RouterConfig, num_threads: int) -> None:
        """models: options of `quire serve` by the model's name. num_threads: compute threads of each model."""
        self._config = config
        self.draining = False
        self.ready_asked = -float("inf")
        self._models = models
        self._num_threads = num_threads
        self._secret = secrets.token_bytes(16)  # other users of this machine must not reach a model past the router
        self._created = int(time.time())
        self.pool = ModelPool(
            models,
            self._start,
            max_loaded=config.max_loaded,
            idle_timeout=config.idle_timeout,
            stop_timeout=config.shutdown_timeout,
        )

    @property
    def config(self) -> RouterConfig:
        """The options."""
        return self._config

    def run(self, tell: Callable[[str], None]) -> None:
        """Serve until a signal. `tell` is called with a line when the router listens."""
        listening = listen(self.config.host, self.config.port)
        allow_connections()
        try:
            address = address_of(listening, self.config)
            line = f"Quire routes to {', '.join(self._models)} at {address}"
            run_until_stopped(Listening(settings(self.app(), self.config), partial(tell, line), self), listening)
        finally:
            listening.close()

    def _start(self, name: str, on_end: Callable[[int], None]) -> ServerProcess:
        options = self.config.shared() | dict(self._models[name])
        keys = [self._key_of(identity_of(key.encode())) for key in self.config.keys] or [self._key_of("")]
        options |= {"host": "127.0.0.1", "port": 0, "api_key": keys, "served_model_name": [name]}
        return ServerProcess(options, self._num_threads, on_end)

    def _key_of(self, client: str) -> str:
        """Return the key with which a client's requests reach the models, which keep clients apart by it."""
        return hmac.new(self._secret, client.encode(), "sha256").hexdigest()

    def app(self) -> Starlette:
        """Return the ASGI application."""
        config = self.config

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            looking = asyncio.create_task(self._unload_idle())
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False) as http:
                app.state.http = http
                yield
                looking.cancel()
                await self.pool.close()

        guard = Middleware(
            Guard,
            keys=config.keys,
            hosts=hosts_to_check(config.allowed_hosts, config.host, bool(config.keys)),
            max_body_size=config.max_body_size,
            realm_paths=(),
        )
        layers = [Middleware(Access, tally=Tally(), logs=config.access_log, quiet=PROBED), guard]
        if config.allowed_origins:
            allowed = config.allowed_origins
            cors = Middleware(CORSMiddleware, allow_origins=allowed, allow_methods=["*"], allow_headers=["*"])
            layers.insert(0, cors)
        routes = [
            Route("/v1/models", self._list),
            Route("/v1/models/{name:path}", self._show),
            Route("/models/load", self._load, methods=["POST"]),
            Route("/models/unload", self._unload, methods=["POST"]),
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            *([Route("/api/tags", self._tags), Route("/api/ps", self._tags)] if config.ollama else ()),
            *(Route(f"/api/{one}", self._derive, methods=["POST", "DELETE"]) for one in ("create", "copy", "delete")),
            Route("/{path:path}", self._forward, methods=["GET", "POST", "DELETE"]),
        ]
        handlers: Any = {ApiError: _failed, HTTPException: _refused}
        return Starlette(routes=routes, middleware=layers, lifespan=lifespan, exception_handlers=handlers)

    async def _unload_idle(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY)
            self.pool.unload_idle()

    # ------------------------------------------------------------------------------------------- its own routes

    def _model(self, entry: Entry) -> dict[str, Any]:
        about = {"id": entry.name, "object": "model", "created": self._created, "owned_by": "quire"}
        return about | {"root": self._models[entry.name]["model"], "status": {"value": entry.state.value}}

    async def _list(self, _: Request) -> Response:
        return JsonBody({"object": "list", "data": [self._model(one) for one in self.pool.entries.values()]})

    async def _show(self, request: Request) -> Response:
        return JsonBody(self._model(self.pool.entry(request.path_params["name"])))

    async def _tags(self, request: Request) -> Response:
        """Answer Ollama's /api/tags, all models, or /api/ps, the loaded ones."""
        listed = list(self.pool.entries.values())
        if request.url.path == "/api/ps":
            listed = [one for one in listed if one.state is State.LOADED]
        return JsonBody({"models": [{"name": f"{one.name}:latest", "model": f"{one.name}:latest"} for one in listed]})

    async def _derive(self, _: Request) -> Response:
        """Refuse to create, copy or delete a model: the names of a router's models are in its file."""
        message = "the router's models are those of its file; a server of one model creates others, with --data-dir"
        raise ApiError(message, HTTPStatus.FORBIDDEN, code="not_allowed")

    async def _load(self, request: Request) -> Response:
        """Load a model before its first request."""
        self._check_page(request)
        entry = self._named(request, await request.body())
        await self.pool.acquire(entry)
        self.pool.release(entry)
        return JsonBody(self._model(entry))

    async def _unload(self, request: Request) -> Response:
        """Unload a model when its open requests have ended."""
        self._check_page(request)
        entry = self._named(request, await request.body())
        self.pool.unload(entry)
        return JsonBody(self._model(entry))

    async def _health(self, _: Request) -> Response:
        return JsonBody({"status": "ok"})

    async def _ready(self, _: Request) -> Response:
        self.ready_asked = time.monotonic()
        if self.draining:
            raise ApiError("the router is stopping", HTTPStatus.SERVICE_UNAVAILABLE, code="stopping")
        return JsonBody({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        """Answer with the router's metrics; with ?model=NAME, with those of that model's server."""
        if "model" in request.query_params:
            return await self._forward(request)
        lines = []
        for name, about, kind, value in METRICS:
            lines += [f"# HELP quire:router_{name} {about}", f"# TYPE quire:router_{name} {kind}"]
            for one in self.pool.entries.values():
                lines.append(f"quire:router_{name}{{model={json.dumps(one.name)}}} {value(one)}")
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    # ----------------------------------------------------------------------------------------------- forwarding

    def _named(self, request: Request, body: bytes) -> Entry:
        """Return the model that a request names, in its body or its query. Raises ApiError."""
        name = request.query_params.get("model")
        if name is None and body:
            try:
                found = json.loads(body)
            except (ValueError, RecursionError) as error:
                raise ApiError(f"the body is no JSON: {error}") from error
            name = found.get("model") if isinstance(found, dict) else None
        if name is None and len(self._models) == 1:
            [name] = self._models
        if not isinstance(name, str):
            names = ", ".join(self._models)
            where = "the body's field model" if request.method == "POST" else "the query, as in ?model=NAME"
            raise ApiError(f"name one of the models {names} in {where}", param="model")
        return self.pool.entry(name)

    def _check_page(self, request: Request) -> None:
        """Raise ApiError for a request of another site's page, which must not load or unload models."""
        origin, allowed = request.headers.get("origin"), self.config.allowed_origins
        if "*" in allowed or origin in allowed:
            return
        own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
        if not own or (origin is None and request.headers.get("sec-fetch-site") == "cross-site"):
            who = "a page of another site" if origin is None else f"the page {cut(origin)}"
            message = f"{who} may not use this router; start it with --allowed-origins ORIGIN to let it"
            raise ApiError(message, HTTPStatus.FORBIDDEN, code="origin_not_allowed")

    async def _forward(self, request: Request) -> Response:
        """Send a request to its model's server, and return the answer as it arrives."""
        self._check_page(request)
        body = await request.body()
        entry = self._named(request, body)
        answering = asyncio.ensure_future(self._ask(request, body, entry))

        def leave() -> None:
            answering.cancel()

        try:
            async with noticing_disconnect(request.receive, leave):
                return await answering
        except asyncio.CancelledError:
            if not answering.cancelled():
                raise
            raise ApiError("the client has gone", CLIENT_GONE) from None

    async def _ask(self, request: Request, body: bytes, entry: Entry) -> Response:
        await self.pool.acquire(entry)
        try:
            headers = [(name, value) for name, value in request.headers.items() if name not in NOT_SENT]
            headers += [("authorization", f"Bearer {self._key_of(client_of(request))}")]
            headers += [(ID_HEADER, request.state.request_id)]
            path = request.scope["raw_path"].decode("ascii", "replace")
            query = request.scope["query_string"].decode("ascii", "replace")
            url = f"{entry.url}{path}{'?' * bool(query)}{query}"
            http: aiohttp.ClientSession = request.app.state.http
            answer = await http.request(request.method, url, data=body or None, headers=headers, allow_redirects=False)
        except BaseException as error:
            self.pool.release(entry)
            if isinstance(error, aiohttp.ClientError | OSError):
                message = f"the server of model {entry.name} ended before it answered"
                raise ApiError(message, HTTPStatus.BAD_GATEWAY, code="model_failed") from error
            raise
        return _Forwarded(answer, partial(self.pool.release, entry))


class _Forwarded(StreamingResponse):
    """The answer of a model's server. `release` is called at its end, also if the client disconnects."""

    def __init__(self, answer: aiohttp.ClientResponse, release: Callable[[], None]) -> None:
        super().__init__(answer.content.iter_any(), answer.status)
        left_out = OF_CONNECTION - {"content-length"} | {ID_HEADER.lower()}
        own = [(name.lower(), value) for name, value in answer.headers.items() if name.lower() not in left_out]
        self.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in own]
        self._answer, self._release = answer, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()  # an unfinished one is cancelled there
            self._release()


async def _failed(request: Request, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    note_refusal(request.scope, error)
    return JsonBody(error.body_for(request.url.path), error.status, error.headers)


async def _refused(request: Request, error: Exception) -> Response:
    """Answer an HTTPException: of the framework, for an unknown method, or of the guard."""
    if not isinstance(error, HTTPException):
        raise error
    message = f"{cut(request.url.path)}: {error.detail}"
    return await _failed(request, ApiError(message, error.status_code, headers=error.headers))
