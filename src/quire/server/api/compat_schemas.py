"""The answers of the further protocols' routes, as models for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quire.server.api.openapi import (
    Answer,
    ChatLogprob,
    CompletionDetails,
    Error,
    StreamedBody,
    SystemFingerprint,
    Usage,
)


class ItemPart(Answer):
    """A part of an item, with its text."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[ChatLogprob] = Field(default_factory=list)


class OutputItem(Answer):
    """A message, a function call, or reasoning."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"  # of a message
    content: list[ItemPart] = Field(default_factory=list)  # of a message, and of reasoning
    summary: list[Any] = Field(default_factory=list)  # of reasoning, like the next
    encrypted_content: None = None
    call_id: str = ""  # of a call, like the next two
    name: str = ""
    arguments: str = ""


class InputDetails(Answer):
    """Prompt tokens that were found in the cache."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Answer):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int


class IncompleteDetails(Answer):
    """The reason why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseError(Answer):
    """The reason why a response failed."""

    code: str
    message: str


class ModelResponse(Answer):
    """The answer of /v1/responses, with the fields of the request."""

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
    system_fingerprint: SystemFingerprint
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
    """An event of a streamed response. Its type determines its fields."""

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
    logprobs: list[ChatLogprob] = Field(default_factory=list)


class AnthropicUsage(Answer):
    """Token counts. Tokens found in the cache are not counted as input."""

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
    input: dict[str, Any] = Field(default_factory=dict)


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
    """An addition to a block or to the message."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] = "text_delta"
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class AnthropicEvent(Answer):
    """An event of a streamed message. Its type determines its fields."""

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
    """The type and the message of an error."""

    type: str
    message: str


class AnthropicError(Answer):
    """An error answer of Anthropic's protocol."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class RankedText(Answer):
    """A document."""

    text: str


class Ranked(Answer):
    """A document and its score for the query."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Reranked(Answer):
    """The answer of /v1/rerank."""

    id: str
    model: str
    usage: Usage
    system_fingerprint: SystemFingerprint
    results: list[Ranked]


class Score(Answer):
    """The score of a pair of texts."""

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
    system_fingerprint: SystemFingerprint


class OllamaFunction(Answer):
    """The called function and its arguments."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Answer):
    """A tool call."""

    id: str
    function: OllamaFunction


class OllamaMessage(Answer):
    """A message of the model: its text, reasoning and calls."""

    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = Field(default_factory=list)


class OllamaAnswer(Answer):
    """The answer of /api/chat, with a message, or of /api/generate, with a response; or a line of a stream."""

    model: str
    created_at: str
    message: OllamaMessage | None = None
    response: str = ""
    thinking: str = ""
    logprobs: list[ChatLogprob] = Field(default_factory=list)
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int = 0  # nanoseconds
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaEmbeddings(Answer):
    """The answer of /api/embed."""

    model: str
    embeddings: list[list[float]]
    total_duration: int  # nanoseconds
    load_duration: int
    prompt_eval_count: int


class OllamaDetails(Answer):
    """Details of a model that are unknown here."""

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
    """An error answer of Ollama's protocol."""

    error: str


STREAMS = {
    "/v1/responses": StreamedBody(ResponseEvent, Error),
    "/v1/messages": StreamedBody(AnthropicEvent, AnthropicError),
    "/api/chat": StreamedBody(OllamaAnswer, OllamaError, "application/x-ndjson"),
    "/api/generate": StreamedBody(OllamaAnswer, OllamaError, "application/x-ndjson"),
}
