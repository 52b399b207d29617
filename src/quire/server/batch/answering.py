"""Answering: a line of a batch is answered by the function of its route, in this process, without HTTP."""

from __future__ import annotations

import asyncio
import json
import secrets
from hashlib import blake2b
from http import HTTPStatus
from types import MappingProxyType
from typing import get_type_hints

from starlette.requests import Request as HttpRequest
from starlette.types import Message

from quire.server.api.app import answer_error
from quire.server.api.routes import ROUTES
from quire.server.api.service import LINE, Service
from quire.server.batch.lines import Line, LineParser, Result
from quire.server.batch.results import NotThisBatch
from quire.server.http.access import ID
from quire.server.http.api_error import ApiError
from quire.server.http.body import model_of
from quire.server.http.guard import CLIENT
from quire.server.http.sse import dumps
from quire.server.protocol.unknown import UnknownFields

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/score")
URLS = MappingProxyType(
    {path: route for route in ROUTES if route.path in ENDPOINTS for path in (route.path, *route.other_paths)}
)
# Statuses of an answer that another try may not get.
PASSING = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
FULL = frozenset({"asleep", "queue_full", "busy", "no_replica", "draining", "engine_stuck", "engine_stopped"})
ANSWERS = (  # options that change answers, but are no part of the fingerprint
    "default_chat_template_kwargs",
    "tool_call_parser",
    "reasoning_parser",
    "reranker",
    "max_logprobs",
    "max_body_size",
    "unknown_fields",
)
PROCESS = secrets.token_hex(16)  # the system of models without a fingerprint: another process may have another one
PAUSES = (0.05, 2.0)  # seconds before a line is tried again while the engine has no room: the first one, the longest
MOST_TRIES = 5  # of a line that the server cannot answer now for another reason, such as its time limit


class Answerer:
    """Answers the lines of batches. Belongs to the event loop."""

    def __init__(self, service: Service, client: str = "") -> None:
        """Create it. client: the identity of the batch's owner, which separates its blocks from those of others."""
        self.service = service
        self._client = client
        self._num_updates = 0  # of the weights, when its results began
        self._settle = UnknownFields(service.config.unknown_fields).settle
        self._kinds = {path: get_type_hints(route.function)["body"] for path, route in URLS.items()}

    async def parser(self, endpoint: str | None = None) -> LineParser:
        """Return a parser of a batch's lines. endpoint: the only route that they may use; None: any."""
        service = self.service
        self._num_updates = service.engine_client.num_updates
        fingerprint = await service.engine_client.fingerprint()
        outside = (
            fingerprint or (PROCESS, self._num_updates),
            service.model.names[0],
            *(getattr(service.config, name) for name in ANSWERS),
            sorted(service.model.default_sampling.items()),
        )
        system = blake2b(dumps(outside), digest_size=16).hexdigest()
        parser = LineParser(system, URLS, endpoint, service.config.max_body_size)
        if fingerprint is None:
            parser.others = "the model has no fingerprint (see the log), so only the process that began can continue"
        return parser

    def check_weights(self) -> None:
        """Raise NotThisBatch if the weights were replaced since the parser was made."""
        if self.service.engine_client.num_updates != self._num_updates:
            raise NotThisBatch("the weights were replaced, and all results of a batch are to be of one system")

    async def result(self, line: Line) -> Result:
        """Return the result of a line. While the engine has no room, the line waits.

        Raises ApiError (503) if the engine cannot serve any more.
        """
        if line.error is not None:
            return line.failed(line.error)
        pause, longest = PAUSES
        tries = 0
        while True:
            status, body = await self._answer(line)
            tries += 1
            if status not in PASSING:
                return line.answered(status, body)
            if json.loads(body)["error"]["code"] not in FULL and tries == MOST_TRIES:
                return line.answered(status, body)
            self.service.engine_client.check_alive()
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _answer(self, line: Line) -> tuple[int, bytes]:
        """Return the status and the body of a route's answer."""
        route = URLS[line.url]
        state = {ID: line.id, LINE: line.digest, CLIENT: self._client}
        scope = {
            "type": "http",
            "method": "POST",
            "path": line.url,
            "query_string": b"",
            "headers": [],
            "endpoint": route.function,
            "state": state,
        }
        request = HttpRequest(scope, _never)
        try:
            body = model_of(line.body, self._kinds[line.url])
            if getattr(body, "stream", False):
                raise ApiError("stream is true; answers of a batch are whole, so leave it out", param="stream")
            self._settle(request, body)
            self.service.take_in(request, body)
            response = await route.function(self.service, request, body)
        except Exception as error:
            response = await answer_error(request, error)
        return response.status_code, bytes(response.body)


async def _never() -> Message:
    """Wait for the client to disconnect, which a batch does not."""
    found: Message = await asyncio.get_running_loop().create_future()
    return found
