"""An open-loop load on any OpenAI-compatible server: a client that sends on schedule and notes when what came.

Open loop: a request is sent when it is due, whether or not earlier ones were answered, so a slow server cannot slow
down what is asked of it. The client shares the machine with the server, so what it does for each chunk is little:
bytes are searched, no JSON is read but that of errors.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError, QuireError, check_integer, check_number
from quire_bench.server.stream import MAX_LINE, MAX_MESSAGE, Answer, StreamError, error_message

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_ERROR_BODY = 2**16  # bytes of a refusal that are read
CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 2.0  # less than servers keep idle connections, or a request meets one that is being closed


@dataclass(frozen=True)
class Server:
    """The address of a server, and the time to wait for it. Raises ConfigError for invalid values."""

    url: str  # with or without /v1 at its end
    endpoint: str = "completions"  # or chat
    api_key: str | None = None
    timeout: float = 600.0  # seconds that a request may take

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/\s]+", self.url):
            raise ConfigError(f"url is {self.url!r}; it must be one such as http://127.0.0.1:8000")
        if self.endpoint not in ROUTES:
            raise ConfigError(f"endpoint is {self.endpoint!r}; it must be {' or '.join(ROUTES)}")
        check_number(ConfigError, "timeout", self.timeout, 1e-3)

    def route(self, path: str) -> str:
        """The URL of a path that begins with /v1."""
        return self.url.rstrip("/").removesuffix("/v1") + path


@dataclass(slots=True)
class Record:
    """One request: its moments by one clock, in seconds, and what became of it."""

    due: float
    sent: float | None = None
    queued: float = 0.0  # seconds that it waited for others, where their number is limited
    ended: float | None = None  # None: the run was interrupted before
    answer: Answer = field(default_factory=Answer)
    error: tuple[str, str] | None = None  # kind ("HTTP 429", "timeout", ...) and message

    @property
    def completed(self) -> bool:
        """Return whether the whole answer came."""
        return self.ended is not None and self.error is None

    @property
    def late(self) -> float | None:
        """Seconds by which the client sent it too late: its own fault, not that of the server."""
        return None if self.sent is None else max(0.0, self.sent - self.due - self.queued)


@dataclass
class Run:
    """A load, sent, or as much of it as was until somebody interrupted it."""

    records: list[Record]
    started: float = 0.0
    seconds: float = 0.0  # until the last answer
    cpu_seconds: float = 0.0  # that the client took meanwhile, its start offload_if_large
    interrupted: bool = False


def send(
    server: Server,
    bodies: Sequence[bytes],
    arrivals: Sequence[float],
    max_concurrency: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> Run:
    """Send each body when it is due, and read all answers. `advance` is called at the end of each request.

    max_concurrency: requests that are due wait until fewer than so many are under way. None: the load is open.
    A keyboard interrupt ends it; what was under way is then without an end.
    Raises ConfigError where aiohttp is missing.
    """
    if max_concurrency is not None:
        check_integer(ConfigError, "max_concurrency", max_concurrency, 1)
    client = _Client(server, max_concurrency, advance)
    run = Run([], started=time.perf_counter(), cpu_seconds=time.process_time())
    try:
        _loop()(client.send_all(bodies, arrivals, run))
    except KeyboardInterrupt:
        run.interrupted = True
    ends = [record.ended for record in run.records if record.ended is not None]
    run.seconds = (time.perf_counter() if run.interrupted else max(ends, default=run.started)) - run.started
    run.cpu_seconds = time.process_time() - run.cpu_seconds
    return run


def completed(
    server: Server, bodies: Sequence[bytes], arrivals: Sequence[float], max_concurrency: int | None = None
) -> Run:
    """Send as `send` does. Raises QuireError where a request fails."""
    run = send(server, bodies, arrivals, max_concurrency)
    for record in run.records:
        if not record.completed:
            raise QuireError(f"a request to {server.url} failed: {record.error}")
    return run


def first_model(server: Server) -> str:
    """The model that the server names first. Raises ConfigError where it does not answer, or aiohttp is missing."""
    return asyncio.run(_Client(server).first_model())


def check_installed() -> None:
    """Raise ConfigError where aiohttp is missing."""
    if find_spec("aiohttp") is None:
        raise ConfigError("an HTTP client needs aiohttp: pip install aiohttp")


def _loop() -> Callable[[Coroutine[Any, Any, None]], None]:
    """Return a function that runs a coroutine. uvloop's, if installed, takes half of asyncio's CPU time for a chunk."""
    try:
        import uvloop
    except ImportError:  # on Windows
        return asyncio.run
    return uvloop.run


class _Client:
    """The part that knows aiohttp."""

    def __init__(
        self, server: Server, max_concurrency: int | None = None, advance: Callable[[], None] = lambda: None
    ) -> None:
        check_installed()
        import aiohttp

        self._http = aiohttp
        self._server = server
        self._slots = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._advance = advance

    def _session(self) -> ClientSession:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._server.api_key is not None:
            headers["Authorization"] = f"Bearer {self._server.api_key}"
        patience = self._server.timeout
        return self._http.ClientSession(
            connector=self._http.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            timeout=self._http.ClientTimeout(total=patience, sock_connect=min(CONNECT_SECONDS, patience)),
            cookie_jar=self._http.DummyCookieJar(),
            headers=headers,
        )

    async def first_model(self) -> str:
        url = self._server.route("/v1/models")
        try:
            async with self._session() as session, session.get(url) as response:
                body = await _read(response, MAX_LINE)
        except (OSError, asyncio.TimeoutError, self._http.ClientError) as error:
            raise ConfigError(f"{url} does not answer: {str(error) or type(error).__name__}") from error
        if response.status != 200:
            raise ConfigError(f"{url} answers with status {response.status}: {error_message(body)}")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{url} names no model; say which with --model") from error

    async def send_all(self, bodies: Sequence[bytes], arrivals: Sequence[float], run: Run) -> None:
        async with self._session() as session:
            tasks = []
            run.started, run.cpu_seconds = time.perf_counter(), time.process_time()
            for body, arrival in zip(bodies, arrivals, strict=True):
                record = Record(run.started + arrival)
                # Also where it is due already: those before it must have their chance to be sent.
                await asyncio.sleep(max(0.0, record.due - time.perf_counter()))
                run.records.append(record)
                tasks.append(asyncio.create_task(self._send_in_turn(session, body, record)))
            await asyncio.gather(*tasks)

    async def _send_in_turn(self, session: ClientSession, body: bytes, record: Record) -> None:
        waiting = time.perf_counter()
        async with self._slots:
            record.queued = time.perf_counter() - waiting
            await self._send(session, body, record)
        self._advance()

    async def _send(self, session: ClientSession, body: bytes, record: Record) -> None:
        answer, clock = record.answer, time.perf_counter
        record.sent = clock()
        try:
            async with session.post(self._server.route(ROUTES[self._server.endpoint]), data=body) as response:
                if response.status != 200:
                    message = error_message(await _read(response, MAX_ERROR_BODY)) or str(response.reason)
                    record.error = (f"HTTP {response.status}", message)
                elif response.content_type != "text/event-stream":
                    record.error = ("no stream", f"the answer is {response.content_type}, not text/event-stream")
                else:
                    async for data in response.content.iter_any():
                        answer.feed(data, clock())
                    answer.close(clock())
        except StreamError as error:
            record.error = (error.kind, str(error))
        except asyncio.TimeoutError:
            limits = f"{self._server.timeout:g} s, or no connection within {CONNECT_SECONDS:g} s"
            record.error = ("timeout", f"no end within {limits}")
        except (OSError, self._http.ClientError) as error:
            record.error = (type(error).__name__, " ".join(str(error).split())[:MAX_MESSAGE])
        record.ended = clock()


async def _read(response: ClientResponse, limit: int) -> bytes:
    """The body, or its beginning."""
    body = b""
    async for data in response.content.iter_any():
        body += data
        if len(body) >= limit:
            break
    return body[:limit]
