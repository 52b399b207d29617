"""The OpenAPI document: of the routes' answers, of streams, and of this server's configuration."""

from __future__ import annotations

from typing import Any, NamedTuple

from fastapi import FastAPI
from pydantic import TypeAdapter

from quire.server.api.service import Service
from quire.server.http.api_error import AnthropicError, Error, OllamaError
from quire.server.http.body import REFERENCE
from quire.server.http.guard import OPEN_PATHS
from quire.server.protocol.chat import ChatChunk
from quire.server.protocol.completions import CompletionChunk
from quire.server.protocol.llama import LlamaCompletion
from quire.server.protocol.messages import AnthropicEvent
from quire.server.protocol.ollama import OllamaAnswer, PullLine
from quire.server.protocol.responses import ResponseEvent

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "The request cannot be served; `error` has the reason"},
    "5XX": {"model": Error, "description": "The server cannot serve it now; `error` has the reason"},
}
TEXT = {"schema": {"type": "string"}}
SCRAPED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus's text format, or OpenMetrics where that is accepted",
        "content": {"text/plain": TEXT, "application/openmetrics-text": TEXT},
    }
}


class StreamedBody(NamedTuple):
    """The format of a route's stream."""

    piece: type[Any]
    error: type[Any]
    media_type: str = "text/event-stream"
    has_done: bool = False  # the stream ends with [DONE]


STREAMS = {
    "/v1/completions": StreamedBody(CompletionChunk, Error, has_done=True),
    "/v1/chat/completions": StreamedBody(ChatChunk, Error, has_done=True),
    "/v1/responses": StreamedBody(ResponseEvent, Error),
    "/v1/messages": StreamedBody(AnthropicEvent, AnthropicError),
    "/api/chat": StreamedBody(OllamaAnswer, OllamaError, "application/x-ndjson"),
    "/api/generate": StreamedBody(OllamaAnswer, OllamaError, "application/x-ndjson"),
    "/api/pull": StreamedBody(PullLine, OllamaError, "application/x-ndjson"),
    "/api/create": StreamedBody(PullLine, OllamaError, "application/x-ndjson"),
    "/completion": StreamedBody(LlamaCompletion, Error),
    "/infill": StreamedBody(LlamaCompletion, Error),
}


def answer(model: type[Any], description: str, error: type[Any] | None = None) -> dict[int | str, dict[str, Any]]:
    """Return a route's responses with this answer. error: the error's class, if it is not OpenAI's."""
    return {200: {"model": model, "description": description}, **({} if error is None else failure(error))}


def failure(error: type[Any]) -> dict[int | str, dict[str, Any]]:
    """Return a route's responses with this class of errors, instead of OpenAI's."""
    return {status: {**one, "model": error} for status, one in ERRORS.items()}


def document_of(app: FastAPI, service: Service) -> dict[str, Any]:
    """Return FastAPI's document, completed by streams, the models' names, and the security scheme if keys are set."""
    document = FastAPI.openapi(app)
    schemas, paths = document["components"]["schemas"], document["paths"]
    answers = {one for route in app.routes for one in getattr(route, "answers", ())}
    answers |= {stream.piece for path, stream in STREAMS.items() if path in paths}
    adapters = [(one, "serialization", TypeAdapter(one)) for one in sorted(answers, key=lambda one: one.__name__)]
    _, made = TypeAdapter.json_schemas(adapters, ref_template=REFERENCE)  # type: ignore[arg-type]
    schemas.update(made["$defs"])
    for path, stream in STREAMS.items():
        if path in paths:
            paths[path]["post"]["responses"]["200"]["content"][stream.media_type] = _content_of(stream)
    named = {"type": "string", "enum": list(service.model.names)}
    for operation in (one for operations in paths.values() for one in operations.values() if "requestBody" in one):
        if "application/json" not in operation["requestBody"]["content"]:  # a form
            continue
        body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        if "model" in schemas[body]["properties"]:
            schemas[body]["properties"]["model"] = {"anyOf": [named, {"type": "null"}, {"const": ""}]}
    [parameter] = paths["/v1/models/{name}"]["get"]["parameters"]
    parameter["schema"] = named
    if service.config.api_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in paths.items():
            for operation in operations.values():
                operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
    return document


def _content_of(stream: StreamedBody) -> dict[str, Any]:
    """Return a media type: lines or server-sent events, each a chunk or an error. itemSchema is of OpenAPI 3.2."""
    forms = [{"$ref": REFERENCE.format(model=one.__name__)} for one in (stream.piece, stream.error)]
    if stream.media_type != "text/event-stream":
        return {"itemSchema": {"anyOf": forms}}
    found: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": forms},
    }
    data = {"anyOf": [{"const": "[DONE]"}, found]} if stream.has_done else found
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": data}}}
