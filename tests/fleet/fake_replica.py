"""A replica that says what a test wants it to say."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from quire.fingerprint.fingerprint import Fingerprint
from tests.fleet.gateways import SECRET
from tests.server.serving import Serving

# So much faster than any other one that whatever comes goes to it.
STATE = {
    "waiting_tokens": 0, "num_waiting": 0, "num_running": 0, "max_running": 1000, "free_blocks": 1000,
    "cached_blocks": 0, "num_blocks": 1000, "block_size": 16, "seconds_a_step": 1e-12, "seconds_a_prompt_token": 1e-12,
    "seconds_a_sequence": 1e-12, "draining": False,
}  # fmt: skip
BEAT = 0.2  # s
END = object()  # among lines: the session ends there
Calls = Callable[[dict[str, Any]], "list[Any] | tuple[int, Any] | None"]


class FakeReplica:
    """Its sessions and calls.

    What a call brings is a list of lines for the session, or a status and a body, or None: the session ends without it.
    """

    def __init__(self, model: dict[str, Any], called: Calls, parts: dict[str, str]) -> None:
        self.url = ""
        self.calls: list[dict[str, Any]] = []
        self.num_sessions = 0
        self.matched: Any = {"cached": 0, "stored": 0}  # what it says that it has of a prompt
        self.is_down = False  # it takes no session
        self.first_lines: list[Any] = [{"event": 0, "snapshot": [], "state": STATE}]
        self.hello = dict(model["hello"])
        fingerprint = Fingerprint(self.hello["fingerprint"]["parts"] | parts)
        self.hello["fingerprint"] = fingerprint.to_json()
        self._files = model["files"]
        self._called = called
        self._queues: dict[str, asyncio.Queue[Any]] = {}

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/fleet/model", self._model),
                Route("/fleet/session", self._session, methods=["POST"]),
                Route("/fleet/generate", self._generate, methods=["POST"]),
                Route("/fleet/search", self._generate, methods=["POST"]),
                Route("/fleet/match", self._match, methods=["POST"]),
                Route("/fleet/abort", self._abort, methods=["POST"]),
            ]
        )

    async def _model(self, _: Request) -> Response:
        return JSONResponse({"hello": self.hello, "files": self._files})

    async def _session(self, _: Request) -> Response:
        if self.is_down:
            return JSONResponse({}, 503)
        self.num_sessions += 1
        name = secrets.token_hex(4)
        queue = self._queues[name] = asyncio.Queue()
        for line in self.first_lines:
            queue.put_nowait(line)
        return StreamingResponse(self._lines(name, queue))

    async def _lines(self, name: str, queue: asyncio.Queue[Any]) -> AsyncIterator[bytes]:
        yield encoded(self.hello | {"session": name})
        while True:
            try:
                line = await asyncio.wait_for(queue.get(), BEAT)
            except asyncio.TimeoutError:
                line = {}
            if line is END:
                return
            yield line if isinstance(line, bytes) else encoded(line)

    async def _generate(self, request: Request) -> Response:
        call = json.loads(await request.body())
        queue = self._queues[call["session"]]
        self.calls.append(call)
        found = self._called(call)
        if found is None:  # the session ends, and there is no answer
            queue.put_nowait(END)
            await request.receive()
            return Response()
        if isinstance(found, tuple):
            return JSONResponse(found[1], found[0])
        for line in found:
            queue.put_nowait(line)
        return Response()

    async def _match(self, _: Request) -> Response:
        return JSONResponse(self.matched)

    async def _abort(self, _: Request) -> Response:
        return Response()


def encoded(line: Any) -> bytes:
    return json.dumps(line).encode() + b"\n"


def frame(call: dict[str, Any], *fields: Any) -> dict[str, Any]:
    """A line with one frame of a call: sample, at, tokens, characters, text, logprobs, end, more."""
    return {"frames": [[call["flow"], *fields, *[None] * (8 - len(fields))]]}


@contextmanager
def faking(like: Serving, called: Calls, **parts: str) -> Iterator[FakeReplica]:
    """A fake replica of the model of another one. parts: of its fingerprint, where they differ."""
    model = like.ask("GET", "/fleet/model", None, {"Authorization": f"Bearer {SECRET}"}).json()
    fake = FakeReplica(model, called, parts)
    listening = socket.create_server(("127.0.0.1", 0))
    fake.url = (
        f"http://localhost:{listening.getsockname()[1]}"  # which comes after 127.0.0.1: it is not asked for the model
    )
    server = uvicorn.Server(uvicorn.Config(fake.app(), log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(20)
