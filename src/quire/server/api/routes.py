"""The routes that answer a body, each with the class of its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, get_type_hints

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.server.api import llama, ollama
from quire.server.api.chat import chat
from quire.server.api.classify import classify
from quire.server.api.completions import complete
from quire.server.api.embeddings import embed
from quire.server.api.messages import count_tokens, messages
from quire.server.api.openapi import answer, failure
from quire.server.api.rerank import rerank, score
from quire.server.api.responses import respond
from quire.server.api.service import Service
from quire.server.http.api_error import AnthropicError, OllamaError
from quire.server.http.sse import JsonBody
from quire.server.protocol.answers import Version
from quire.server.protocol.chat import ChatCompletion
from quire.server.protocol.classify import Classified
from quire.server.protocol.completions import Completion
from quire.server.protocol.embeddings import Embeddings
from quire.server.protocol.llama import LlamaCompletion, Prompt, Properties, Slot, Slots
from quire.server.protocol.messages import AnthropicMessage, InputTokens
from quire.server.protocol.ollama import (
    CopyRequest,
    DeleteRequest,
    OllamaAnswer,
    OllamaEmbeddings,
    OllamaModels,
    OllamaShown,
    PullLine,
    ShowRequest,
)
from quire.server.protocol.rerank import Reranked, Scored
from quire.server.protocol.responses import ModelResponse


class Route(NamedTuple):
    """A route that answers a body."""

    path: str
    name: str  # in the OpenAPI document
    function: Callable[[Service, HttpRequest, Any], Awaitable[Response]]  # the annotation of `body` has its class
    answer: type[Any]
    description: str
    error: type[Any] | None = None  # if it is not OpenAI's
    other_paths: tuple[str, ...] = ()  # left out of the document


ROUTES = (
    Route("/v1/completions", "completions", complete, Completion, "The prompts, continued"),
    Route("/v1/chat/completions", "chat_completions", chat, ChatCompletion, "The next message"),
    Route("/v1/embeddings", "embeddings", embed, Embeddings, "A vector for each input"),
    Route("/v1/responses", "responses", respond, ModelResponse, "The next turn, in items"),
    Route(
        "/v1/messages", "anthropic_messages", messages, AnthropicMessage, "The next message, in blocks", AnthropicError
    ),
    Route(
        "/v1/messages/count_tokens",
        "anthropic_tokens",
        count_tokens,
        InputTokens,
        "The tokens of the prompt",
        AnthropicError,
    ),
    Route(
        "/v1/rerank",
        "reranked",
        rerank,
        Reranked,
        "The documents, best first",
        other_paths=("/v2/rerank", "/rerank"),
    ),
    Route("/v1/score", "scored", score, Scored, "A score for each pair", other_paths=("/score",)),
    Route("/v1/classify", "classified", classify, Classified, "The scores of labels", other_paths=("/classify",)),
    Route("/completion", "llama_completion", llama.complete, LlamaCompletion, "The prompt, continued"),
    Route("/infill", "llama_infill", llama.fill_in, LlamaCompletion, "The text between prefix and suffix"),
    Route("/apply-template", "llama_prompt", llama.apply_template, Prompt, "The prompt of a chat"),
)
OLLAMA_ROUTES = (
    Route("/api/chat", "chat_lines", ollama.chat, OllamaAnswer, "The next message", OllamaError),
    Route("/api/generate", "generated_lines", ollama.generate, OllamaAnswer, "The answer to a prompt", OllamaError),
    Route("/api/pull", "pulled_lines", ollama.pull, PullLine, "The state of a download", OllamaError),
    Route("/api/create", "created_model", ollama.create, PullLine, "The state of the creation", OllamaError),
    Route("/api/embed", "embedded_texts", ollama.embed, OllamaEmbeddings, "A vector for each text", OllamaError),
)


def add_routes(router: APIRouter, service: Service, routes: Sequence[Route] = ROUTES) -> None:
    """Add the routes that answer bodies."""
    for route in routes:
        responses = answer(route.answer, route.description, route.error)
        for path in (route.path, *route.other_paths):
            router.add_api_route(
                path,
                _endpoint(service, route),
                methods=["POST"],
                name=route.name,
                responses=responses,
                include_in_schema=path == route.path,
            )


def _endpoint(service: Service, route: Route) -> Callable[..., Awaitable[Response]]:
    async def endpoint(request: HttpRequest, body: Any) -> Response:
        service.take_in(request, body)
        return await route.function(service, request, body)

    kind = get_type_hints(route.function)["body"]
    endpoint.__annotations__ = {"request": HttpRequest, "body": kind, "return": Response}
    return endpoint


def add_llama_routes(router: APIRouter, service: Service) -> None:
    """Add llama-server's routes that take no body."""

    @router.get("/props", response_model=None, responses=answer(Properties, "The model and the default settings"))
    async def llama_properties() -> Properties:
        return llama.properties(service)

    @router.get("/slots", response_model=None, responses=answer(Slots, "The slots"))
    async def llama_slots(fail_on_no_slot: bool = False) -> list[Slot]:
        return llama.slots(service, fails_if_full=fail_on_no_slot)


def add_ollama_routes(router: APIRouter, service: Service) -> None:
    """Add Ollama's routes."""
    add_routes(router, service, OLLAMA_ROUTES)

    @router.post("/api/show", response_model=None, responses=answer(OllamaShown, "The model", OllamaError))
    async def shown_model(request: HttpRequest, body: ShowRequest) -> Response:
        return JsonBody(ollama.show(service, request, body))

    @router.post("/api/copy", response_class=Response, responses=failure(OllamaError))
    async def copied_model(request: HttpRequest, body: CopyRequest) -> Response:
        return ollama.copy(service, request, body)

    @router.delete("/api/delete", response_class=Response, responses=failure(OllamaError))
    async def deleted_model(request: HttpRequest, body: DeleteRequest) -> Response:
        return ollama.delete(service, request, body)

    @router.get("/api/tags", response_model=None, responses=answer(OllamaModels, "The models", OllamaError))
    async def tags(request: HttpRequest) -> OllamaModels:
        return ollama.tags(service, request)

    @router.get("/api/ps", response_model=None, responses=answer(OllamaModels, "The loaded models", OllamaError))
    async def running_models() -> OllamaModels:
        return ollama.running(service)

    @router.get("/api/version", response_model=None, responses=answer(Version, "The API's version", OllamaError))
    async def ollama_version() -> Version:
        return {"version": ollama.VERSION}
