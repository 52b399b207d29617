"""The application: routes, and what is answered when one of them fails."""

from __future__ import annotations

import difflib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire import __version__
from quire.errors import QuireError
from quire.server import inspector
from quire.server.chat import chat, conversation
from quire.server.completions import complete
from quire.server.errors import ApiError
from quire.server.guard import Guard
from quire.server.inspector import Inspector
from quire.server.metrics import Metrics
from quire.server.protocol import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from quire.server.service import Service
from quire.server.sse import JsonBody

log = logging.getLogger("quire.server")

MAX_SHOWN = 80  # characters of a value that an error shows
# Of fields that may be of several kinds: one sentence instead of one for each kind.
WANTED = {
    "prompt": "it must be a text, a list of token ids, or a list of these",
    "stop": "it must be a text or a list of texts, none of them empty or very long",
    "content": "it must be a text, or a list of parts of type text",
}
# What other servers call a field.
ALSO_CALLED = {
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_json": "response_format",
    "structured_outputs": "response_format, regex or grammar",
    "json_schema": "response_format",
    "ebnf": "grammar",
    "beam_width": "n, with use_beam_search",
}


def build_app(service: Service, metrics: Metrics, watched: Inspector) -> FastAPI:
    """The application that serves a model."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await service.worker.stop()

    app = FastAPI(
        title="Quire",
        version=__version__,
        summary="Language models behind OpenAI's API, over a paged KV cache.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"description": "The request cannot be served; `error` says why"}},
    )
    app.add_middleware(
        Guard,
        keys=service.config.api_key,
        max_body_size=service.config.max_body_size,
        realm_paths=("/inspector",),
    )
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(QuireError, _failed)
    app.add_exception_handler(Exception, _broken)
    _add_openai_routes(app, service)
    _add_other_routes(app, service, metrics)
    app.include_router(inspector.router(watched, service.worker))
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    def model(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "quire",
            "root": service.names[0],
            "parent": None,
            "max_model_len": service.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model(name) for name in service.names]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return model(name)

    @app.post("/v1/completions")
    async def completions(request: HttpRequest, body: CompletionRequest) -> Response:
        _log(service, request, body)
        return await complete(service, request, body)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: HttpRequest, body: ChatRequest) -> Response:
        _log(service, request, body)
        return await chat(service, request, body)


def _add_other_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("there must be something to tokenize; give either prompt or messages", param="prompt")
        if body.messages is not None:
            prompt = await conversation(service, body.messages, body.add_generation_prompt)
            if body.add_special_tokens:
                prompt = await service.encode(prompt.text or "", add_special_tokens=True)
        else:
            prompt = await service.encode(body.prompt or "", body.add_special_tokens is not False)
        answer = {"count": len(prompt.tokens), "max_model_len": service.max_model_len, "tokens": prompt.tokens}
        if body.return_token_strs:
            tokenizer = service.tokenizer
            answer["token_strs"] = [tokenizer.token_bytes(token).decode(errors="replace") for token in prompt.tokens]
        return answer

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service.check_model(body.model)
        vocab_size = service.worker.engine.vocab_size
        for i, token in enumerate(body.tokens):
            if token >= vocab_size:
                message = f"tokens[{i}] is {token}; token ids of this model lie in 0..{vocab_size - 1}"
                raise ApiError(message, param="tokens")
        return {"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine serves, 503 with the reason while it does not."""
        service.worker.check_health()
        return Response()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/metrics")
    async def scrape(request: HttpRequest) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": content_type})


def _log(service: Service, request: HttpRequest, body: Body) -> None:
    if service.config.enable_log_requests:
        log.info("%s %s", request.url.path, body.model_dump_json(exclude_unset=True))


# ------------------------------------------------------------------------------------------------- errors


def _answer(error: ApiError) -> Response:
    return JsonBody(error.body(), error.status, error.headers)


async def _failed(_: HttpRequest, error: Exception) -> Response:
    return _answer(error if isinstance(error, ApiError) else ApiError(str(error)))


async def _refused(_: HttpRequest, error: Exception) -> Response:
    """What the framework refuses: an unknown route, a method that a route has not, a body that is no JSON."""
    if not isinstance(error, HTTPException):
        raise error
    message = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = "there is no such route; those of this server stand in /openapi.json"
    return _answer(ApiError(message, error.status_code, headers=error.headers))


async def _broken(request: HttpRequest, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    told = f"an error of the server's own: {type(error).__name__}"
    return _answer(ApiError(told, HTTPStatus.INTERNAL_SERVER_ERROR, code="internal_error"))


async def _invalid(_: HttpRequest, error: Exception) -> Response:
    """A body that is not what the route takes."""
    if not isinstance(error, RequestValidationError):
        raise error
    first = error.errors()[0]
    path = [part for part in first["loc"] if part != "body"]
    return _answer(ApiError(_sentence(path, first), param=_field_of(path)))


def _field_of(path: Sequence[str | int]) -> str | None:
    return str(path[0]) if path and isinstance(path[0], str) else None


def _sentence(path: Sequence[str | int], found: dict[str, Any]) -> str:
    """What is wrong, where, with the value, and what would be right."""
    kind, message = found["type"], found["msg"]
    if kind == "json_invalid":
        return f"the body is not JSON: {found.get('ctx', {}).get('error', message)} at character {path[-1]}"
    if not path:
        return "the body is missing or no JSON object; send one with Content-Type: application/json"
    name, value = _dotted(path), _shown(found.get("input"))
    if kind == "missing":
        return f"{name} is missing"
    if kind == "extra_forbidden":
        word = str(path[-1])
        if word in ALSO_CALLED:
            return f"there is no field {name!r} here; use {ALSO_CALLED[word]}"
        known = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
        close = difflib.get_close_matches(word[:MAX_SHOWN], known, n=1)
        return f"there is no field {name[:MAX_SHOWN]!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    if kind == "value_error":
        return f"{name} is {value}; {message.removeprefix('Value error, ')}"
    if (field := next((part for part in reversed(path) if part in WANTED), None)) is not None:
        return f"{_dotted(path[: list(path).index(field) + 1])} cannot be read; {WANTED[str(field)]}"
    return f"{name} is {value}; {message[:1].lower()}{message[1:]}"


def _dotted(path: Sequence[str | int]) -> str:
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else str(part)
    return name


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
