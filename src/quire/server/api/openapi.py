"""The OpenAPI document: what the routes answer, and what only this server knows of what it takes.

Answers are written without these models, which is faster; the tests hold each of them against its model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import models_json_schema

from quire.server.api.service import LOWEST_LOGPROB, Service
from quire.server.http.guard import OPEN_PATHS

Logprob = Annotated[
    float,
    Field(
        ge=LOWEST_LOGPROB,
        description=f"A natural logarithm; {LOWEST_LOGPROB} stands for what is lower, or not a number",
    ),
]
FinishReason = Literal["stop", "length"]  # a request that fails is answered with an error
ChatFinishReason = Literal["stop", "length", "tool_calls"]
BODIES = ("CompletionRequest", "ChatRequest", "EmbeddingRequest", "TokenizeRequest", "DetokenizeRequest")


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
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(Answer):
    """A piece of it: of one choice, or at the end of none, if numbers were asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
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
    usage: Usage


class ItemPart(Answer):
    """A text in an item."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class OutputItem(Answer):
    """What the model says, calls or thinks."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"  # of a message
    content: list[ItemPart] = []  # of a message, and of thoughts
    summary: list[Any] = []  # of thoughts, like the next
    encrypted_content: None = None
    call_id: str = ""  # of a call, like the next two
    name: str = ""
    arguments: str = ""


class InputDetails(Answer):
    """Of the prompt's tokens, those that were found in the cache."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Answer):
    """Numbers of tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class IncompleteDetails(Answer):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseError(Answer):
    """Why a response failed."""

    code: str
    message: str


class ModelResponse(Answer):
    """The answer of /v1/responses, with what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: None


class ResponseEvent(Answer):
    """An event of such an answer's stream. Its type says which fields it has."""

    type: str
    sequence_number: int
    response: ModelResponse | None = None
    output_index: int = 0
    content_index: int = 0
    item_id: str = ""
    item: OutputItem | None = None
    part: ItemPart | None = None
    delta: str = ""
    text: str = ""
    name: str = ""
    arguments: str = ""
    logprobs: list[ChatLogprob] = []


class AnthropicUsage(Answer):
    """Numbers of tokens. Those found in the cache are not counted as input."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class AnthropicBlock(Answer):
    """A part of a message."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicMessage(Answer):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicDelta(Answer):
    """What an event adds to a block, or to the message."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] = "text_delta"
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class AnthropicEvent(Answer):
    """An event of such an answer's stream. Its type says which fields it has."""

    type: str
    message: AnthropicMessage | None = None
    index: int = 0
    content_block: AnthropicBlock | None = None
    delta: AnthropicDelta | None = None
    usage: AnthropicUsage | None = None


class InputTokens(Answer):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class AnthropicErrorDetail(Answer):
    """Why a request was not served: its kind, and in words."""

    type: str
    message: str


class AnthropicError(Answer):
    """What a request of Anthropic's protocol that was not served is answered."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class RankedText(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document, and how well it answers the query."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Reranked(Answer):
    """The answer of /v1/rerank."""

    id: str
    model: str
    usage: Usage
    results: list[Ranked]


class Score(Answer):
    """How well the texts of a pair go together."""

    index: int
    object: Literal["score"]
    score: float


class Scored(Answer):
    """The answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class OllamaFunction(Answer):
    """What is called."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Answer):
    """A call."""

    id: str
    function: OllamaFunction


class OllamaMessage(Answer):
    """What the model says, calls and thinks."""

    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaAnswer(Answer):
    """The answer of /api/chat, with a message, or of /api/generate, with a response; or a line of it."""

    model: str
    created_at: str
    message: OllamaMessage | None = None
    response: str = ""
    thinking: str = ""
    logprobs: list[ChatLogprob] = []
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int = 0  # nanoseconds
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaDetails(Answer):
    """What is not known of a model here."""

    parent_model: str
    format: str
    family: str
    families: list[str] | None
    parameter_size: str
    quantization_level: str


class OllamaModel(Answer):
    """A model that is served."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str = ""
    size_vram: int = 0
    context_length: int = 0


class OllamaModels(Answer):
    """The answer of /api/tags and /api/ps."""

    models: list[OllamaModel]


class OllamaShown(Answer):
    """The answer of /api/show."""

    modelfile: str
    parameters: str
    license: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "tools", "thinking"]]
    modified_at: str


class OllamaError(Answer):
    """What a request of Ollama's protocol that was not served is answered."""

    error: str


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


def answer(model: type[Answer], description: str) -> dict[int | str, dict[str, Any]]:
    """A route's responses: an answer of this form."""
    return {200: {"model": model, "description": description}}


TEXT = {"schema": {"type": "string"}}
SCRAPED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Prometheus's text format, or OpenMetrics where that is accepted",
        "content": {"text/plain": TEXT, "application/openmetrics-text": TEXT},
    }
}


CHUNKS: dict[str, type[Answer]] = {"/v1/completions": CompletionChunk, "/v1/chat/completions": ChatChunk}


def document_of(app: FastAPI, service: Service) -> dict[str, Any]:
    """What the routes say, and what they cannot say: streams, the models' names, and whether keys are wanted."""
    document = FastAPI.openapi(app)
    schemas, paths = document["components"]["schemas"], document["paths"]
    _, made = models_json_schema(
        [(chunk, "serialization") for chunk in CHUNKS.values()], ref_template="#/components/schemas/{model}"
    )
    schemas.update(made["$defs"])
    for path, chunk in CHUNKS.items():
        paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"] = _stream_of(chunk)
    named = {"type": "string", "enum": list(service.model.names)}
    for body in BODIES:
        schemas[body]["properties"]["model"] = {"anyOf": [named, {"type": "null"}, {"const": ""}]}
    [parameter] = paths["/v1/models/{name}"]["get"]["parameters"]
    parameter["schema"] = named
    if service.config.api_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, operations in paths.items():
            for operation in operations.values():
                operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
    return document


def _stream_of(chunk: type[Answer]) -> dict[str, Any]:
    """A media type: server-sent events, each a chunk or an error, and at the end a word. OpenAPI 3.2 has itemSchema."""
    forms = [{"$ref": f"#/components/schemas/{model.__name__}"} for model in (chunk, Error)]
    piece = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": forms}}
    event = {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [{"const": "[DONE]"}, piece]}}}
    return {"itemSchema": event}
