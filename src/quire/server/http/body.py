"""Request bodies: reading, parsing, and the bound on the bytes that are held until then."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar, get_type_hints

from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.server.http.api_error import OLLAMA_PATHS, ApiError, cut
from quire.server.http.guard import client_of
from quire.server.http.hosts import ANY

MAX_HELD_BODIES = 16  # the bytes of this many bodies of the largest size are held unparsed at a time
REFERENCE = "#/components/schemas/{model}"  # in the OpenAPI document
ModelT = TypeVar("ModelT", bound=BaseModel)


class Bodies:
    """Reads bodies, and bounds the bytes that are held. It belongs to the event loop.

    A body counts while it arrives. When it is complete, it is parsed at once and its bytes are dropped. If all arriving
    bodies together have too many bytes, one of the client with the most bytes is dropped, the one that began first.
    So bodies that never end cannot block others.
    """

    def __init__(
        self, max_body_size: int, settle: Callable[[HttpRequest, Any], None], origins: Collection[str] = ()
    ) -> None:
        """Create it. `settle` is called with each parsed body, and may raise ApiError for it. origins: allowed ones."""
        self._settle = settle
        self._origins = frozenset(origins)
        self._limit = MAX_HELD_BODIES * max_body_size
        self._held = 0  # bytes
        self._coming: list[_Coming] = []  # in the order in which they began

    async def parse(self, request: HttpRequest, model: type[ModelT]) -> ModelT:
        """Read a request's body and parse it as the route's model.

        Raises RequestValidationError if it is invalid, ApiError if it was dropped for others or cannot be read.
        """
        coming = _Coming(client_of(request))
        self._coming.append(coming)
        try:
            read = await self._read(request, coming)
            if read:
                self._check_type(request)
            body = model_of(_value(read), model)
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
                    f"this body was dropped to make room for others, since its client held most of it; {self._limit} "
                    f"bytes of incomplete bodies are held at most; send it again, and faster",
                    HTTPStatus.REQUEST_TIMEOUT,
                    code="body_gave_way",
                )
            is_complete = not message.get("more_body", False)
        return b"".join(coming.pieces)

    def _check_type(self, request: HttpRequest) -> None:
        """Raise ApiError for a content type that is not JSON. On Ollama's routes any type will do, as in Ollama.

        Web pages may send bodies of some other types to this server without asking it first (CORS). Browsers name the
        page in the header Origin, so a page that may not use this server needs the type on every route.
        """
        given = request.headers.get("content-type", "")
        kind = given.partition(";")[0].strip().lower()
        if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
            return
        if request.url.path.startswith(OLLAMA_PATHS) and not self._is_of_a_page(request):
            return
        found = f"Content-Type is {cut(given)}" if given else "there is no Content-Type"
        raise ApiError(f"{found}; it must be application/json")

    def check_page(self, request: HttpRequest) -> None:
        """Raise ApiError for a request of a page that may not use this server, on a route that takes other types."""
        if self._is_of_a_page(request):
            origin = cut(request.headers["origin"])
            message = f"the page {origin} may not use this server; start it with --allowed-origins {origin} to let it"
            raise ApiError(message, HTTPStatus.FORBIDDEN, code="origin_not_allowed")

    def _is_of_a_page(self, request: HttpRequest) -> bool:
        origin = request.headers.get("origin")
        return origin is not None and self._origins.isdisjoint((origin, ANY))

    def _take(self, coming: _Coming, piece: bytes) -> None:
        """Store a piece of a body. If there is no room, drop other bodies, or this one."""
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
    """A body that is not complete yet."""

    def __init__(self, client: str) -> None:
        self.client = client
        self.pieces: list[bytes] = []


class BodyRoute(APIRoute):
    """A route that reads its body itself, with the application's `bodies`.

    FastAPI's own route would keep the bytes, and everything parsed from them, until the answer ends. The endpoint takes
    the body as `body`, optionally the request as `request`, and returns a Response. Nor are the classes of answers read
    before the OpenAPI document is asked for, which takes longer than the rest of an application's start.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        given = options.get("responses") or {}
        self.answers: list[Any] = [one["model"] for one in given.values() if "model" in one]
        options["responses"] = {status: _referring(one) for status, one in given.items()}
        super().__init__(path, endpoint, **options)

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """Return the function that answers a request."""
        hints = get_type_hints(self.endpoint)
        if "body" not in hints:
            return super().get_route_handler()
        model, endpoint, takes_request = hints["body"], self.endpoint, "request" in hints

        async def answer(request: HttpRequest) -> Response:
            body = await request.app.state.bodies.parse(request, model)
            response: Response = await (endpoint(request=request, body=body) if takes_request else endpoint(body=body))
            return response

        return answer


def _referring(response: dict[str, Any]) -> dict[str, Any]:
    """Return the documentation of a response with a reference in place of its class."""
    if "model" not in response:
        return response
    content = {"application/json": {"schema": {"$ref": REFERENCE.format(model=response["model"].__name__)}}}
    return {"description": response["description"], "content": content}


def _value(read: bytes) -> Any:
    """Return a body's JSON value, or None if it is empty."""
    if not read:
        return None
    try:
        return json.loads(read)
    except json.JSONDecodeError as error:
        place = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "JSON decode error", "input": {}}
        raise RequestValidationError([place | {"ctx": {"error": error.msg}}]) from error
    except (ValueError, RecursionError) as error:
        message = "the body cannot be read: it is not UTF-8, nests too deeply, or has a number with too many digits"
        raise ApiError(message) from error


def model_of(value: Any, model: type[ModelT]) -> ModelT:
    """Validate a parsed body as a model. Raises RequestValidationError, with FastAPI's form of locations."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in found]) from error
