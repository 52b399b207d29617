"""Routes of further protocols for chats, completions and embeddings."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from quire.server.api import compat_schemas as forms
from quire.server.api import ollama
from quire.server.api.messages import count_tokens, messages
from quire.server.api.openapi import Version, answer
from quire.server.api.rerank import rerank, score
from quire.server.api.responses import respond
from quire.server.api.service import Service
from quire.server.http.body import BodyRoute
from quire.server.http.sse import JsonBody
from quire.server.protocol.messages import CountTokensRequest, MessagesRequest
from quire.server.protocol.ollama import EmbedRequest, GenerateRequest, OllamaChatRequest, ShowRequest
from quire.server.protocol.rerank import RerankRequest, ScoreRequest
from quire.server.protocol.responses import ResponsesRequest


def router(service: Service) -> APIRouter:
    """Return the routes of OpenAI's responses, Anthropic's messages, reranking and scoring."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/v1/responses", responses=answer(forms.ModelResponse, "The next turn, in items"))
    async def responses(request: HttpRequest, body: ResponsesRequest) -> Response:
        service.take_in(request, body)
        return await respond(service, request, body)

    @routes.post(
        "/v1/messages",
        responses=answer(forms.AnthropicMessage, "The next message, in blocks", forms.AnthropicError),
    )
    async def anthropic_messages(request: HttpRequest, body: MessagesRequest) -> Response:
        service.take_in(request, body)
        return await messages(service, request, body)

    @routes.post(
        "/v1/messages/count_tokens",
        responses=answer(forms.InputTokens, "The tokens of the prompt", forms.AnthropicError),
    )
    async def anthropic_tokens(request: HttpRequest, body: CountTokensRequest) -> Response:
        service.take_in(request, body)
        return await count_tokens(service, request, body)

    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):  # only the first is in the OpenAPI document

        @routes.post(
            path, responses=answer(forms.Reranked, "The documents, best first"), include_in_schema=path[:3] == "/v1"
        )
        async def reranked(request: HttpRequest, body: RerankRequest) -> Response:
            service.take_in(request, body)
            return await rerank(service, request, body)

    for path in ("/v1/score", "/score"):  # the same here

        @routes.post(path, responses=answer(forms.Scored, "A score for each pair"), include_in_schema=path[:3] == "/v1")
        async def scored(request: HttpRequest, body: ScoreRequest) -> Response:
            service.take_in(request, body)
            return await score(service, request, body)

    return routes


def ollama_router(service: Service) -> APIRouter:
    """Return Ollama's routes."""
    routes = APIRouter(route_class=BodyRoute)

    @routes.post("/api/chat", responses=answer(forms.OllamaAnswer, "The next message", forms.OllamaError))
    async def chat_lines(request: HttpRequest, body: OllamaChatRequest) -> Response:
        service.take_in(request, body)
        return await ollama.ollama_chat(service, request, body)

    @routes.post("/api/generate", responses=answer(forms.OllamaAnswer, "The answer to a prompt", forms.OllamaError))
    async def generated_lines(request: HttpRequest, body: GenerateRequest) -> Response:
        service.take_in(request, body)
        return await ollama.ollama_generate(service, request, body)

    @routes.post("/api/embed", responses=answer(forms.OllamaEmbeddings, "A vector for each text", forms.OllamaError))
    async def embedded_texts(request: HttpRequest, body: EmbedRequest) -> Response:
        service.take_in(request, body)
        return await ollama.ollama_embed(service, request, body)

    @routes.post("/api/show", response_model=None, responses=answer(forms.OllamaShown, "The model", forms.OllamaError))
    async def shown_model(body: ShowRequest) -> Response:
        return JsonBody(ollama.show(service, body))

    @routes.get("/api/tags", response_model=None, responses=answer(forms.OllamaModels, "The models", forms.OllamaError))
    async def tags() -> dict[str, Any]:
        return ollama.tags(service)

    @routes.get(
        "/api/ps",
        response_model=None,
        responses=answer(forms.OllamaModels, "The loaded models", forms.OllamaError),
    )
    async def running_models() -> dict[str, Any]:
        return ollama.running(service)

    @routes.get(
        "/api/version",
        response_model=None,
        responses=answer(Version, "The API's version", forms.OllamaError),
    )
    async def ollama_version() -> dict[str, str]:
        return {"version": ollama.VERSION}

    return routes
