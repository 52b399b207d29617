"""The OpenAPI document: the models of answers, and the parts that depend on this server's configuration.

Answers are written without these models, which is faster; tests compare each answer with its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from quire.server.api.service import FINGERPRINT_SIZE, LOWEST_LOGPROB, Service
from quire.server.http.guard import OPEN_PATHS

Logprob = Annotated[
    float,
    Field(
        ge=LOWEST_LOGPROB,
        description=f"A natural logarithm; {LOWEST_LOGPROB} replaces lower values and NaN",
    ),
]
SystemFingerprint = Annotated[
    str | None,
    Field(
        pattern=f"^fp_[0-9a-f]{{{FINGERPRINT_SIZE}}}$",
        description="Identifies the system that computed the answer: weights, configuration, tokenizer, template, "
        "versions and arithmetic. The same for all replicas that return the same bits; null if unknown",
    ),
]
FinishReason = Literal["stop", "length"]  # a request that fails is answered with an error
ChatFinishReason = Literal["stop", "length", "tool_calls"]
# The bodies that name a model.
BODIES = frozenset(
    "ChatRequest CompletionRequest CountTokensRequest DetokenizeRequest EmbedRequest EmbeddingRequest GenerateRequest "
    "MessagesRequest OllamaChatRequest RerankRequest ResponsesRequest ScoreRequest ShowRequest TokenizeRequest".split()
)


class Answer(BaseModel):
    """An answer, or an object in it. It has no other fields than its model."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    """The message of an error, its type, the wrong field, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """An error answer."""

    error: ErrorDetail


class PromptDetails(Answer):
    """Prompt tokens that were found in the cache."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Generated tokens that are reasoning."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = CompletionDetails(reasoning_tokens=0)  # of reasoning models


class PromptLogprob(Answer):
    """A candidate at a position of the prompt."""

    logprob: Logprob
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None  # by token id


class CompletionLogprobs(Answer):
    """A choice's tokens, each with its offset in the text and its candidates."""

    text_offset: list[int]
    token_logprobs: list[Logprob | None]
    tokens: list[str]
    top_logprobs: list[dict[str, Logprob] | None]


class CompletionChoice(Answer):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] = []
    token_ids: list[int] = []


class Completion(Answer):
    """The answer of /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: SystemFingerprint
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Answer):
    """A chunk of a streamed completion. It has one choice, or none in a last chunk with the usage."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: SystemFingerprint
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Answer):
    """A candidate token."""

    token: str
    logprob: Logprob
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token, with the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """The logprobs of a message's tokens."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(Answer):
    """A function, and the JSON of its arguments."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """A message of the model: its text, reasoning and calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] = []
    reasoning_content: str = ""
    reasoning: str = ""


class ChatChoice(Answer):
    """One continuation of a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] = []


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: SystemFingerprint
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] = []


class FunctionDelta(Answer):
    """An addition to a called function: first its name, then parts of the arguments."""

    name: str = ""
    arguments: str


class ToolCallDelta(Answer):
    """An addition to a tool call. The first one of each call has an id."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Answer):
    """An addition to a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallDelta] = []
    reasoning_content: str = ""
    reasoning: str = ""


class ChatChunkChoice(Answer):
    """A part of a choice; the last one has a finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] = []  # in a choice's first part
    token_ids: list[int] = []


class ChatChunk(Answer):
    """A chunk of a streamed chat completion. It has one choice, or none in a last chunk with the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: SystemFingerprint
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class Embedding(Answer):
    """One input's vector, as numbers or as base64 of their bytes: little-endian, in fp32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    system_fingerprint: SystemFingerprint
    usage: Usage


class Model(Answer):
    """A model that is served, by one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class Models(Answer):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class DetokenizedText(Answer):
    """The answer of /detokenize."""

    prompt: str


class TokenizerInfo(Answer):
    """The answer of /tokenizer_info."""

    tokenizer_class: str
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    sep_token: str | None
    pad_token: str | None
    cls_token: str | None
    mask_token: str | None
    chat_template: str | None


class Version(Answer):
    """The answer of /version."""

    version: str


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": Error, "description": "The request cannot be served; `error` has the reason"},
    "5XX": {"model": Error, "description": "The server cannot serve it now; `error` has the reason"},
}


def answer(model: type[Answer], description: str, error: type[Answer] | None = None) -> dict[int | str, dict[str, Any]]:
    """Return a route's responses with this model. error: the error's model, if it is not OpenAI's."""
    own = {} if error is None else {status: {**one, "model": error} for status, one in ERRORS.items()}
    return {200: {"model": model, "description": description}, **own}


TEXT = {"schema": {"type": "string"}}
SCRAPED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus's text format, or OpenMetrics where that is accepted",
        "content": {"text/plain": TEXT, "application/openmetrics-text": TEXT},
    }
}


class StreamedBody(NamedTuple):
    """The format of a route's stream."""

    piece: type[Answer]
    error: type[Answer]
    media_type: str = "text/event-stream"
    has_done: bool = False  # the stream ends with [DONE]


STREAMS = {
    "/v1/completions": StreamedBody(CompletionChunk, Error, has_done=True),
    "/v1/chat/completions": StreamedBody(ChatChunk, Error, has_done=True),
}


def document_of(app: FastAPI, service: Service, streams: Mapping[str, StreamedBody]) -> dict[str, Any]:
    """Return FastAPI's document, completed by streams, the models' names, and the security scheme if keys are set."""
    document = FastAPI.openapi(app)
    schemas, paths = document["components"]["schemas"], document["paths"]
    _, made = models_json_schema(
        [(stream.piece, "serialization") for stream in streams.values()], ref_template="#/components/schemas/{model}"
    )
    schemas.update(made["$defs"])
    for path, stream in streams.items():
        if path in paths:
            paths[path]["post"]["responses"]["200"]["content"][stream.media_type] = _content_of(stream)
    named = {"type": "string", "enum": list(service.model.names)}
    for body in BODIES & schemas.keys():
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
    forms = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in (stream.piece, stream.error)]
    if stream.media_type != "text/event-stream":
        return {"itemSchema": {"anyOf": forms}}
    found: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": forms},
    }
    data = {"anyOf": [{"const": "[DONE]"}, found]} if stream.has_done else found
    return {"itemSchema": {"type": "object", "required": ["data"], "properties": {"data": data}}}
