"""A server in this process, on a thread of its own, for tests."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn.server

from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.replica import Replica
from quire.frontend.metrics import Metrics
from quire.server.api.service import Service
from quire.server.observability.inspector import Inspector
from quire.server.run import Server, build_parts, settings
from quire.server.server_config import ServerConfig
from tests import warm

if TYPE_CHECKING:
    from quire.server.observability.kv_events import KVEventPublisher


class Eager:
    """asyncio for uvicorn, which looks ten times a second whether to end: hundreds of tests would wait for that."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = Eager()  # type: ignore[attr-defined]
warm.install()

# Tokens are chosen as LLM does by `SamplingParams`: without the defaults that the embedded model has.
SMALL = {"num_blocks": 512, "max_num_seqs": 16, "max_num_batched_tokens": 256, "generation_config": "none"}


@dataclass
class Answer:
    """What a server answered."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The error, whose shape is OpenAI's."""
        body = self.json()
        assert set(body) == {"error"}, body
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        assert isinstance(body["error"]["message"], str)
        assert body["error"]["message"]
        return body["error"]

    def events(self) -> list[Any]:
        """The events of a stream, whose last one is [DONE]."""
        assert self.headers["content-type"].startswith("text/event-stream")
        parts = self.body.decode().split("\n\n")
        assert parts[-1] == ""
        assert all(part.startswith("data: ") for part in parts[:-1]), parts
        assert parts[-2] == "data: [DONE]"
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@dataclass
class Serving:
    """A running server."""

    service: Service
    metrics: Metrics
    inspector: Inspector
    publisher: KVEventPublisher | None = None
    host: str = "127.0.0.1"
    port: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # sent with every request
    server: Server | None = None
    loop: asyncio.AbstractEventLoop | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """One request; a body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            given = self.headers | (headers or {})
            if body is not None and not isinstance(body, bytes):
                body = json.dumps(body).encode()
                given.setdefault("Content-Type", "application/json")
            connection.request(method, path, body, given)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Answer:
        return self.ask("POST", path, body)

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def on_engine(self, function: Callable[[], Any]) -> Any:
        """What a function returns on the engine's thread."""
        assert self.loop is not None
        return asyncio.run_coroutine_threadsafe(self.service.engine_client.llm.call(function), self.loop).result(60)

    def is_idle(self) -> bool:
        """Whether every request has ended, every block is back, and the books are right."""

        def look() -> bool:
            scheduler = self.service.engine_client.engine.scheduler
            scheduler.audit()
            return not scheduler.has_work and all(pool.num_used == 0 for pool in scheduler.manager.pools)

        return bool(self.on_engine(look)) and self.service.engine_client.num_samples == 0


_fingerprints: dict[str, Fingerprint | None] = {}


def _identified(options: str, identify: Callable[[], Fingerprint | None]) -> Fingerprint | None:
    """That of a server with these options, found once: hundreds of servers are started."""
    if options not in _fingerprints:
        _fingerprints[options] = identify()
    return _fingerprints[options]


@contextmanager
def serving(
    options: dict[str, Any] | None = None,
    prepare: Callable[[Service], None] = lambda service: None,
    **config: Any,
) -> Iterator[Serving]:
    """A server of the embedded model; `prepare` may change its parts before it starts."""
    own = ServerConfig(port=0, **{"shutdown_timeout": 2.0} | config)
    parts = build_parts(SMALL | (options or {}), own, Replica)
    service, inspector = parts.service, parts.inspector
    service.engine_client.identify = partial(_identified, repr((options, own)), service.engine_client.identify)
    prepare(service)
    app = parts.app()
    here = Serving(service, parts.metrics, inspector, parts.publisher)
    ready = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    here.port = listening.getsockname()[1]

    def told() -> None:
        here.loop = asyncio.get_running_loop()
        ready.set()

    server = here.server = Server(settings(app, own), parts, told)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        assert ready.wait(60)
        yield here
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
