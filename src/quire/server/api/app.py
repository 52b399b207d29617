"""The application: its routes, and the answers for errors."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from http import HTTPStatus
from typing import Any, Protocol, get_type_hints

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from quire import __version__
from quire.errors import EngineAsleep, EngineStopped, RequestError
from quire.sandbox.process import SandboxFailed
from quire.server.api import openapi
from quire.server.api.conversation import conversation
from quire.server.api.llama import tokenized
from quire.server.api.routes import add_llama_routes, add_ollama_routes, add_routes
from quire.server.api.service import FINGERPRINT_HEADER, Service
from quire.server.api.start_page import start_page
from quire.server.http.access import ID, ID_HEADER, IGNORED_HEADER, Access, Tally, note_refusal
from quire.server.http.api_error import OLLAMA_PATHS, ApiError, api_error, cut, internal_error, sandbox_failed, shown
from quire.server.http.body import Bodies, BodyRoute
from quire.server.http.guard import MAX_FORM_SIZE, Guard
from quire.server.http.hosts import hosts_to_check
from quire.server.http.sse import JsonBody
from quire.server.protocol.answers import Model, Models, Version
from quire.server.protocol.body import Body
from quire.server.protocol.tokens import DetokenizedText, DetokenizeRequest, TokenizeRequest, TokenizerInfo, Tokens
from quire.server.protocol.unknown import UnknownField, UnknownFields, model_in, near_miss, sentence
from quire.server.server_config import ServerConfig

log = logging.getLogger("quire.server")

INTERNAL_NAME = re.compile(r"^request [^ :]+(:?) ")  # the beginning of the engine's messages
PROBED = ("/health", "/ready", "/metrics")  # requested again and again by monitoring
MAX_PATH = 256  # characters of an unknown path that are compared with the routes

# Messages for fields of several types: one message instead of one for each type.
WANTED = {
    "prompt": "it must be a text, a list of token ids, or a list of these",
    "input": "it must be a text, a list of token ids, or a list of these",
    "text_1": "it must be a text, or a list of texts with at least one",
    "text_2": "it must be a text, or a list of texts with at least one",
    "queries": "it must be a text, or a list of texts with at least one",
    "stop": "it must be a text or a list of texts, none of them empty or very long",
    "content": "it must be a text, or a list of parts of type text and image_url",
    "tool_choice": "it must be 'none', 'auto', 'required', or an object that names one of the tools",
    "function_call": "functions are called as tools here, so it must be 'none' or 'auto'",
}
# Messages for values of a wrong type and for values out of bounds, by pydantic's error types.
KINDS_OF_VALUES = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
}
BOUNDS = {
    "greater_than": "be above {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be below {lt}",
    "less_than_equal": "be at most {le}",
    "string_too_long": "have {max_length} characters at most",
    "string_too_short": "have {min_length} characters or more",
    "too_long": "have {max_length} entries at most",
    "too_short": "have {min_length} entries or more",
}
# The engine's names of fields, and the names of these fields in each route.
ROUTES_NAMES = {
    "/v1/completions": {"beam_width": "n"},
    "/v1/chat/completions": {"beam_width": "n", "prompt": "messages"},
    "/v1/classify": {"prompt": "input"},
    "/v1/embeddings": {"prompt": "input"},
    "/v1/responses": {
        "messages": "input",
        "prompt": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text",
        "reasoning_effort": "reasoning",
        "logprobs": "top_logprobs",
    },
    "/detokenize": {"prompt": "tokens"},
    "/completion": {"max_tokens": "n_predict", "guided_json": "json_schema"},
    "/infill": {"max_tokens": "n_predict", "guided_json": "json_schema", "suffix": "input_suffix"},
}


class Scraped(Protocol):
    """The metrics of /metrics."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return a body and its content type."""

    def show_requests(self, tally: Tally) -> None:
        """Include the counters of answered and refused requests."""


def build_app(service: Service, metrics: Scraped, routers: Sequence[APIRouter]) -> FastAPI:
    """Return the application that serves a model. routers: further routes."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine_client.start()
        yield
        await service.engine_client.stop()
        service.close()

    config = service.config
    app = FastAPI(
        title="Quire",
        version=__version__,
        summary="An OpenAI-compatible API for language models, over a paged KV cache.",
        lifespan=lifespan,
        openapi_url=None,  # FastAPI would build the document on the event loop
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would go to any host that the Host header names
        responses=openapi.ERRORS,
    )
    settle = UnknownFields(config.unknown_fields).settle
    app.state.bodies = Bodies(config.max_body_size, settle, config.allowed_origins)
    if service.traces is not None:
        from quire.server.observability.traces import Traced

        app.add_middleware(Traced, traces=service.traces)
    app.router.route_class = BodyRoute
    app.add_middleware(
        Guard,
        keys=config.keys,
        hosts=hosts_to_check(config.allowed_hosts, config.host, bool(config.keys)),
        max_body_size=config.max_body_size,
        realm_paths=("/inspector",),
        fleet_secret=config.fleet_secret,
        admin_key=config.admin_api_key if isinstance(config, ServerConfig) else None,
        max_file_size=0 if config.data_dir is None else MAX_FORM_SIZE,
    )
    tally = Tally()
    metrics.show_requests(tally)
    app.add_middleware(Access, tally=tally, logs=config.access_log, quiet=PROBED)
    if config.allowed_origins:  # outermost, because a browser's preflight request has no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[ID_HEADER, IGNORED_HEADER, FINGERPRINT_HEADER],
        )
    for kind, handler in HANDLERS:
        app.add_exception_handler(kind, handler)
    _add_models(app, service)
    add_routes(app.router, service)
    add_llama_routes(app.router, service)
    if config.ollama:
        add_ollama_routes(app.router, service)
    _add_other_routes(app, service, metrics)
    for router in routers:
        app.include_router(router)
    _add_document(app, service)
    return app


def _add_document(app: FastAPI, service: Service) -> None:
    """Add /openapi.json. It is built at the first request, on a thread, because that takes a tenth of a second."""
    app.openapi = cache(partial(openapi.document_of, app, service))  # type: ignore[method-assign]

    def document(_: HttpRequest) -> JSONResponse:
        return JSONResponse(app.openapi())

    app.add_route("/openapi.json", document, include_in_schema=False)


def _add_models(app: FastAPI, service: Service) -> None:
    def model(name: str) -> Model:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "quire",
            "root": service.model.loras.get(name, service.model.root),
            "parent": None if service.lora_of(name) is None else service.model.names[0],
            "max_model_len": service.model.max_model_len,
        }

    @app.get("/v1/models", response_model=None, responses=openapi.answer(Models, "The models' names"))
    async def models() -> Models:
        return {"object": "list", "data": [model(name) for name in (*service.model.names, *service.model.loras)]}

    @app.get("/v1/models/{name:path}", response_model=None, responses=openapi.answer(Model, "The model"))
    async def one_model(name: str) -> Model:
        if not name:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        service.check_model(name)
        return model(name)


def _add_other_routes(app: FastAPI, service: Service, metrics: Scraped) -> None:
    @app.post("/tokenize", response_model=None, responses=openapi.answer(Tokens, "The token ids"))
    async def tokenize(request: HttpRequest, body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        if [body.prompt, body.messages, body.content].count(None) != 2:
            message = "there must be one text to tokenize; give either prompt, messages or content"
            raise ApiError(message, param="prompt")
        if body.content is not None:
            return JsonBody(await tokenized(service, request, body, body.content))
        if body.messages is not None:
            prompt = await conversation(service, request, body.messages, body)
            if body.add_special_tokens:
                prompt = await service.encode(request, prompt.text or "", add_special_tokens=True)
        else:
            prompt = await service.encode(request, body.prompt or "", body.add_special_tokens is not False)
        tokens, tokenizer = prompt.tokens, service.tokenizer
        answer: Tokens = {"count": len(tokens), "max_model_len": service.model.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            answer["token_strs"] = await service.run_tokenization(
                request, len(tokens), lambda: [tokenizer.token_bytes(one).decode(errors="replace") for one in tokens]
            )
        return JsonBody(answer)

    @app.post("/detokenize", response_model=None, responses=openapi.answer(DetokenizedText, "The text"))
    async def detokenize(request: HttpRequest, body: DetokenizeRequest) -> Response:
        service.check_model(body.model)
        # Above the offset are ids of second texts of pairs, for the engine alone.
        vocab_size = service.model.pooling.second_offset or service.model.vocab_size
        if (largest := max(body.tokens, default=0)) >= vocab_size:
            place = body.tokens.index(largest)
            message = f"tokens[{place}] is {largest}; token ids of this model lie in 0..{vocab_size - 1}"
            raise ApiError(message, param="tokens")
        decode = partial(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        text = await service.run_tokenization(request, len(body.tokens), decode)
        return JsonBody(DetokenizedText(prompt=text, content=text))

    @app.get(
        "/tokenizer_info",
        response_model=None,
        responses=openapi.answer(TokenizerInfo, "Special tokens, the chat template, and the longest sequence"),
    )
    async def tokenizer_info() -> Response:
        return JsonBody(service.tokenizer_info())

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """Answer 200 while the engine can serve; 503 with the reason if it has stopped or needs a restart."""
        service.engine_client.check_alive()
        return Response()

    @app.get("/ready", response_class=Response)
    async def ready() -> Response:
        """Answer 200 while requests are accepted; 503 with the reason if the server drains or the engine is stuck."""
        service.check_ready()
        return Response()

    # HEAD is how the command `ollama` looks for its server.
    @app.api_route("/", methods=["GET", "HEAD"], response_class=Response, include_in_schema=False)
    async def start(request: HttpRequest) -> Response:
        return start_page(request, service.model, bool(service.config.keys), service.why_no_images() is None)

    @app.get("/version", response_model=None, responses=openapi.answer(Version, "Quire's version"))
    async def version() -> Version:
        return {"version": __version__}

    @app.get("/metrics", response_class=Response, responses=openapi.SCRAPED)
    async def scrape(request: HttpRequest) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


# ------------------------------------------------------------------------------------------------- errors


def _answer(request: HttpRequest, error: ApiError) -> Response:
    note_refusal(request.scope, error)
    return JsonBody(error.body_for(request.url.path), error.status, error.headers)


async def _failed(request: HttpRequest, error: Exception) -> Response:
    if isinstance(error, RequestError):
        error = ApiError(INTERNAL_NAME.sub(_without_name, str(error)), param=error.field)
    if isinstance(error, SandboxFailed):
        error = sandbox_failed(str(error))
    if isinstance(error, (EngineAsleep, EngineStopped)):
        error = api_error(error)
    if not isinstance(error, ApiError):
        raise error
    if error.param is not None and not isinstance(error, UnknownField):
        error.param = ROUTES_NAMES.get(request.url.path, {}).get(error.param, error.param)
    return _answer(request, error)


def _without_name(found: re.Match[str]) -> str:
    return "" if found[1] else "the request "


async def _refused(request: HttpRequest, error: Exception) -> Response:
    """Answer an HTTPException: of the framework, for an unknown route or method, or of the guard."""
    if not isinstance(error, HTTPException):
        raise error
    message, headers, path = str(error.detail), error.headers or {}, cut(request.url.path)
    if error.status_code == HTTPStatus.NOT_FOUND:
        close = _route_like(request)
        hint = "" if close is None else f"; did you mean {close!r}?"
        message = f"there is no route {path!r} here{hint or '; the routes of this server are in /openapi.json'}"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{path} takes {headers.get('Allow', 'other methods')}, not {request.method}"
    return _answer(request, ApiError(message, error.status_code, headers=headers))


def _route_like(request: HttpRequest) -> str | None:
    """Return the route that an unknown path may mean: it lacks /v1, has an extra slash, or is misspelt. Else None."""
    app = request.scope["app"]
    routes = [path for route in app.routes if "{" not in (path := getattr(route, "path", "{")) and path != "/"]
    path = "/" + "/".join(filter(None, request.url.path[:MAX_PATH].split("/")))
    if path.startswith(OLLAMA_PATHS):  # a route of another protocol takes no such body
        routes = [one for one in routes if one.startswith(OLLAMA_PATHS)]
    for plain in (path, f"/v1{path}"):
        if plain in routes:
            return plain
    return next(iter(difflib.get_close_matches(path, routes, n=1, cutoff=0.75)), None)


async def _broken(request: HttpRequest, error: Exception) -> Response:
    log.error("%s %r failed", request.method, request.url.path, exc_info=error)
    answer = _answer(request, internal_error(error))
    answer.headers[ID_HEADER] = getattr(request.state, ID, "")  # this answer bypasses Access
    return answer


async def _invalid(request: HttpRequest, error: Exception) -> Response:
    """Answer a request whose body is invalid."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    place = list(first["loc"][1:])  # without "body", "query" or "path"
    path = [part for part in place if not str(part).startswith("<")]  # see tag_of
    if first["type"] == "extra_forbidden":
        body = get_type_hints(request.scope["endpoint"])["body"]
        return _answer(request, ApiError(_unknown(body, path), param=_field_of(path)))
    message = _sentence(path, first, is_of_a_kind=path != place)
    return _answer(request, ApiError(message, param=_field_of(path)))


HANDLERS: tuple[tuple[type[Exception], Callable[[HttpRequest, Exception], Awaitable[Response]]], ...] = (
    (RequestValidationError, _invalid),
    (HTTPException, _refused),
    (ApiError, _failed),
    (RequestError, _failed),
    (SandboxFailed, _failed),
    (EngineAsleep, _failed),
    (EngineStopped, _failed),
    (Exception, _broken),
)


async def answer_error(request: HttpRequest, error: Exception) -> Response:
    """Return the answer for an error of a route."""
    handler = next(handler for kind, handler in HANDLERS if isinstance(error, kind))
    return await handler(request, error)


def _field_of(path: Sequence[str | int]) -> str | None:
    return cut(path[0]) if path and isinstance(path[0], str) else None


def _sentence(path: Sequence[str | int], found: dict[str, Any], *, is_of_a_kind: bool) -> str:
    """Return a message with the location, the wrong value, and the valid alternatives.

    is_of_a_kind: the value's type is known, for a field of several types.
    """
    kind, message = found["type"], found["msg"]
    name, value = _dotted(path), shown(found.get("input"))
    if kind == "json_invalid":
        return f"the body is not JSON: {found.get('ctx', {}).get('error', message)} at character {path[-1]}"
    if kind == "value_error":
        return f"{name or 'the body'} is {value}; {message.removeprefix('Value error, ')}"
    if kind == "union_tag_invalid":
        own = first.get("type") if isinstance(first := found.get("input"), dict) else None
        known = found["ctx"]["expected_tags"].replace("<", "").replace(">", "")
        return f"{name} is of type {shown(own)}, which is not served; it may be of type {known}"
    if kind == "union_tag_not_found":
        return f"{name} is {value}; it must be an object with a type"
    if kind == "tool_message":
        return f"{name}.{message}"
    if kind == "no_token":
        return f"{name} has the key {shown(message)}; it must be a token id, as in '123'"
    if kind == "no_text":
        part = _dotted([*path, found["ctx"]["index"]])
        return f"{part} is of type {shown(message)}; parts of type 'text' and 'image_url' are served"
    if not path:
        return "the body is missing or not a JSON object; send one with Content-Type: application/json"
    if kind == "missing":
        return f"{name} is missing"
    field = None if is_of_a_kind else next((part for part in reversed(path[:-1]) if part in WANTED), None)
    if field is not None:
        return f"{_dotted(path[: list(path).index(field) + 1])} cannot be read; {WANTED[str(field)]}"
    return f"{name} is {value}; {_wanted(found)}"


def _wanted(found: dict[str, Any]) -> str:
    """Return the requirement that a value does not meet, from pydantic's error."""
    kind, bound = found["type"], found.get("ctx", {})
    if kind in KINDS_OF_VALUES:
        return f"it must be {KINDS_OF_VALUES[kind]}"
    if kind in BOUNDS:
        return f"it must {BOUNDS[kind].format(**bound)}"
    if kind == "literal_error":
        return f"it must be {bound['expected']}"
    message: str = found["msg"]
    return message[:1].lower() + message[1:]


def _unknown(body: type[Body], path: Sequence[str | int]) -> str:
    """Return the message for an unknown field of an object whose fields all change the text, with a suggestion."""
    model: type[Body] | None = body
    for part in path[:-1]:
        if isinstance(part, str) and model is not None:
            model = model_in(next((f.annotation for n, f in model.model_fields.items() if part in (n, f.alias)), None))
    return sentence(_dotted(path), None if model is None else near_miss(model, str(path[-1])))


def _dotted(path: Sequence[str | int]) -> str:
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name
