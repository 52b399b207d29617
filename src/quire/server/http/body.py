"""Bodies: how requests bring what they ask for, and how much of it is held until it is parsed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.server.http.api_error import ApiError
from quire.server.http.guard import client_of

MAX_HELD_BODIES = 16  # of the largest size: as many bytes of bodies that are not parsed yet are held at a time
ModelT = TypeVar("ModelT", bound=BaseModel)


class Bodies:
    """Reads bodies, and bounds what of them is held. It belongs to the event loop.

    A body counts while it comes. Then it is parsed at once, and its bytes are dropped. Where the bytes of all that come
    are too many, a body of the client that holds most of them gives way, of these the one that began first: bodies that
    never end keep out no others.
    """

    def __init__(self, max_body_size: int, settle: Callable[[HttpRequest, Any], None]) -> None:
        """settle: is given each body when it is parsed, and may raise ApiError for it."""
        self._settle = settle
        self._limit = MAX_HELD_BODIES * max_body_size
        self._held = 0  # bytes
        self._coming: list[_Coming] = []  # in the order in which they began

    async def parse(self, request: HttpRequest, model: type[ModelT]) -> ModelT:
        """A request's body as its route takes it.

        Raises RequestValidationError where it is something else, ApiError where it gave way or cannot be read.
        """
        coming = _Coming(client_of(request))
        self._coming.append(coming)
        try:
            body = model_of(_value(await self._read(request, coming), request), model)
        finally:
            self._drop(coming)
        self._settle(request, body)
        return body

    async def _read(self, request: HttpRequest, coming: _Coming) -> bytes:
        is_complete = False
        while not is_complete:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ApiError("the client has gone")
            if coming in self._coming:
                self._take(coming, message.get("body", b""))
            if coming not in self._coming:
                raise ApiError(
                    f"others needed the room of this body, whose client held most of it; {self._limit} bytes of bodies "
                    f"are held until they are complete; send it again, and faster",
                    HTTPStatus.REQUEST_TIMEOUT,
                    code="body_gave_way",
                )
            is_complete = not message.get("more_body", False)
        return b"".join(coming.pieces)

    def _take(self, coming: _Coming, piece: bytes) -> None:
        """Hold a piece of a body. Where there is no room others give way, or it does itself."""
        coming.pieces.append(piece)
        self._held += len(piece)
        while self._held > self._limit:
            held: Counter[str] = Counter()
            for each in self._coming:
                held[each.client] += sum(map(len, each.pieces))
            [(most, _)] = held.most_common(1)
            self._drop(next(each for each in self._coming if each.client == most and any(each.pieces)))

    def _drop(self, coming: _Coming) -> None:
        if coming in self._coming:
            self._coming.remove(coming)
            self._held -= sum(map(len, coming.pieces))
            coming.pieces.clear()


class _Coming:
    """A body of which something is missing."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.pieces: list[bytes] = []


class BodyRoute(APIRoute):
    """A route that reads its body itself, from the application's `bodies`.

    FastAPI's own would hold the bytes, and all that was parsed of them, until the answer ends. Its endpoint takes the
    body as `body`, the request as `request` if it wants that, and returns a Response.
    """

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        hints = get_type_hints(self.endpoint)
        if "body" not in hints:
            return super().get_route_handler()
        model, endpoint, takes_request = hints["body"], self.endpoint, "request" in hints

        async def answer(request: HttpRequest) -> Response:
            body = await request.app.state.bodies.parse(request, model)
            response: Response = await (endpoint(request=request, body=body) if takes_request else endpoint(body=body))
            return response

        return answer


def _value(read: bytes, request: HttpRequest) -> Any:
    """What a body says; None where there is none, or where it is not marked as JSON.

    A page that a browser shows may send any other kind to this server without asking it first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    if not read or not is_json:
        return None
    try:
        return json.loads(read)
    except json.JSONDecodeError as error:
        place = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise RequestValidationError([place | {"ctx": {"error": error.msg}}]) from error
    except (ValueError, RecursionError) as error:
        message = "the body cannot be read: it is no UTF-8, nests too deeply, or has a number of too many digits"
        raise ApiError(message) from error


def model_of(value: Any, model: type[ModelT]) -> ModelT:
    """The model of a parsed body. Raises RequestValidationError, which names places as FastAPI does."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in found]) from error
