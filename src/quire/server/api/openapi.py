"""The OpenAPI document: what the routes answer, and what only this server knows of what it takes.

Answers are written without these models, which is faster; the tests hold each of them against its model.
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
        description=f"A natural logarithm; {LOWEST_LOGPROB} stands for what is lower, or not a number",
    ),
]
SystemFingerprint = Annotated[
    str | None,
    Field(
        pattern=f"^fp_[0-9a-f]{{{FINGERPRINT_SIZE}}}$",
        description="What the answer was computed with: weights, configuration, tokenizer, template, versions and "
        "arithmetic. The same from all replicas that give the same bits; null where it is not known",
    ),
]
FinishReason = Literal["stop", "length"]  # a request that fails is answered with an error
ChatFinishReason = Literal["stop", "length", "tool_calls"]
# Those that name a model.
BODIES = frozenset(
    "ChatRequest CompletionRequest CountTokensRequest DetokenizeRequest EmbedRequest EmbeddingRequest GenerateRequest "
    "MessagesRequest OllamaChatRequest RerankRequest ResponsesRequest ScoreRequest ShowRequest TokenizeRequest".split()
)


class Answer(BaseModel):
    """All of its fields are here."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(Answer):
    """Why a request was not served: in words, its kind, the field that is wrong, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """What a request that was not served is answered."""

    error: ErrorDetail


class PromptDetails(Answer):
    """Of the prompt's tokens, those that were found in the cache."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Of the generated tokens, those that are thoughts."""

    reasoning_tokens: int


class Usage(Answer):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails = CompletionDetails(reasoning_tokens=0)  # of models that think


class PromptLogprob(Answer):
    """A candidate at a position of the prompt."""

    logprob: Logprob
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None  # by token id


class CompletionLogprobs(Answer):
    """A choice's tokens, each with its place in the text and its candidates."""

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
    """A piece of it: of one choice, or at the end of none, if numbers were asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: SystemFingerprint
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Answer):
    """A candidate."""

    token: str
    logprob: Logprob
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token, with its most probable rivals."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """A message's tokens."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(Answer):
    """A function, and the JSON of its arguments."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """What the model says, calls and thinks."""

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
    """What a piece adds to a called function: its name, then parts of the arguments."""

    name: str = ""
    arguments: str


class ToolCallDelta(Answer):
    """What a piece adds to a call. The first one of each has an id."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(Answer):
    """What a piece adds to a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    tool_calls: list[ToolCallDelta] = []
    reasoning_content: str = ""
    reasoning: str = ""


class ChatChunkChoice(Answer):
    """A piece of a choice; the last one has a finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] = []  # of a choice's first piece
    token_ids: list[int] = []


class ChatChunk(Answer):
    """A piece of it: of one choice, or at the end of none, if numbers were asked for."""

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
    "4XX": {"model": Error, "description": "The request cannot be served; `error` says why"},
    "5XX": {"model": Error, "description": "The server cannot serve it now; `error` says why"},
}


def answer(model: type[Answer], description: str, error: type[Answer] | None = None) -> dict[int | str, dict[str, Any]]:
    """A route's responses: an answer of this form. error: of another protocol than OpenAI's."""
    own = {} if error is None else {status: {**one, "model": error} for status, one in ERRORS.items()}
    return {200: {"model": model, "description": description}, **own}


TEXT = {"schema": {"type": "string"}}
SCRAPED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus's text format, or OpenMetrics where that is accepted",
        "content": {"text/plain": TEXT, "application/openmetrics-text": TEXT},
    }
}


class Stream(NamedTuple):
    """What a route streams."""

    piece: type[Answer]
    error: type[Answer]
    media_type: str = "text/event-stream"
    has_done: bool = False  # a word at its end


STREAMS = {
    "/v1/completions": Stream(CompletionChunk, Error, has_done=True),
    "/v1/chat/completions": Stream(ChatChunk, Error, has_done=True),
}


def document_of(app: FastAPI, service: Service, streams: Mapping[str, Stream]) -> dict[str, Any]:
    """What the routes say, and what they cannot say: streams, the models' names, and whether keys are wanted."""
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


def _content_of(stream: Stream) -> dict[str, Any]:
    """A media type: lines, or server-sent events, each a piece or an error. OpenAPI 3.2 has itemSchema."""
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
