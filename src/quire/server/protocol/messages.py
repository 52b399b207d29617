"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens, as chat requests, and their answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Union, cast

from pydantic import Discriminator, Field, Tag
from typing_extensions import NotRequired

from quire.request import MESSAGES, served_in
from quire.server.http.api_error import Answer
from quire.server.http.body import model_of
from quire.server.protocol.body import (
    IGNORED,
    MAX_MESSAGES,
    MAX_TOKEN,
    Body,
    FunctionName,
    GivenName,
    HistoryItem,
    Ignored,
    ImageData,
    MaxTokens,
    Name,
    OrText,
    Refused,
    Stop,
    Text,
    tag_of,
)
from quire.server.protocol.chat import MAX_TOOLS, ChatRequest, image_part
from quire.server.protocol.retention import CacheControl, longest
from quire.server.protocol.sampling import numbers_of


class TextBlock(HistoryItem):
    """A block of text."""

    type: Literal["text"]
    text: Text
    cache_control: NotRequired[CacheControl | None]


Texts = Annotated[
    list[Annotated[Union[Annotated[TextBlock, Tag("<text>")]], Discriminator(tag_of)]],  # noqa: UP007
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    OrText(lambda text: {"type": "text", "text": text}),
]


class ToolUseBlock(HistoryItem):
    """A tool call, in a message of the assistant."""

    type: Literal["tool_use"]
    id: Name
    name: GivenName
    input: dict[str, Any]
    cache_control: NotRequired[CacheControl | None]


class ToolResultBlock(HistoryItem):
    """The result of a tool call, in a message of the user."""

    type: Literal["tool_result"]
    tool_use_id: GivenName
    content: NotRequired[Texts | None]
    cache_control: NotRequired[CacheControl | None]


class ImageSource(HistoryItem):
    """The bytes of an image."""

    type: Literal["base64"]
    media_type: NotRequired[Name | None]  # the bytes decide the format
    data: ImageData


class ImageAddress(HistoryItem):
    """The address of an image, on an allowed host."""

    type: Literal["url"]
    url: ImageData


class ImageBlock(HistoryItem):
    """An image."""

    type: Literal["image"]
    source: Annotated[
        Union[Annotated[ImageSource, Tag("<base64>")], Annotated[ImageAddress, Tag("<url>")]],  # noqa: UP007
        Discriminator(tag_of),
    ]
    cache_control: NotRequired[CacheControl | None]


class ThinkingBlock(HistoryItem):
    """The assistant's reasoning."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(HistoryItem):
    """Encrypted reasoning from another server. Only that server can read it, so it is dropped."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Union[  # noqa: UP007
        Annotated[TextBlock, Tag("<text>")],
        Annotated[ImageBlock, Tag("<image>")],
        Annotated[ToolUseBlock, Tag("<tool_use>")],
        Annotated[ToolResultBlock, Tag("<tool_result>")],
        Annotated[ThinkingBlock, Tag("<thinking>")],
        Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    ],
    Discriminator(tag_of),
]


class InputMessage(Body):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        Field(max_length=MAX_MESSAGES, fail_fast=True),
        OrText(lambda text: {"type": "text", "text": text}),
    ]


class InputTool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    allowed_callers: Annotated[Any, IGNORED] = None
    defer_loading: Ignored[bool] = None
    eager_input_streaming: Ignored[bool] = None
    input_examples: Annotated[Any, IGNORED] = None


class ToolChoice(Body):
    """The choice of tools: whether the model must, may or must not call one, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None  # of the tool
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """The switch for reasoning before the answer, and its token budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    display: Ignored[Name] = None  # reasoning is shown unchanged


class OutputFormat(Body):
    """The schema that the text must follow."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """Reasoning effort and format of the answer."""

    effort: Name | None = None  # the chat template's reasoning_effort
    format: OutputFormat | None = None


class CountTokensRequest(Body):
    """The body of /v1/messages/count_tokens: the fields that make the prompt."""

    model: Name | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[InputTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None  # the mark of the whole prompt, in addition to those of its parts
    speed: Annotated[Name | None, Refused("there is one speed here, the highest", "standard")] = None
    mcp_servers: Annotated[
        list[Any] | None, Refused("no other server is asked here; give tools, and call them yourself")
    ] = None

    ALSO_CALLED: ClassVar[dict[str, str]] = {
        "output_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "stop": "stop_sequences",
    }

    def chat(self, *, can_think: bool) -> ChatRequest:
        """Return the equivalent chat request. Raises RequestValidationError, with a chat's names, if it is invalid.

        can_think: whether the model is known to reason. One that does not stays within every budget.
        """
        thinking, choice, output = self.thinking, self.tool_choice, self.output_config or OutputConfig()
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": [one for message in self._messages() for one in _said(message)],
            "continue_final_message": _is_begun(self.messages[-1]),
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
        }
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            asked["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            asked["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
        if thinking is not None:
            asked["chat_template_kwargs"] = {"enable_thinking": thinking.type != "disabled"}
            if can_think and thinking.type == "enabled":
                asked["thinking_token_budget"] = thinking.budget_tokens
        if output.effort:
            asked["reasoning_effort"] = output.effort
        if output.format is not None:
            schema = {"name": "answer", "schema": output.format.schema_}
            asked["response_format"] = {"type": "json_schema", "json_schema": schema}
        asked["cache_control"] = longest(self._marks())
        return model_of({name: one for name, one in (asked | self._drawn()).items() if one is not None}, ChatRequest)

    def _drawn(self) -> dict[str, Any]:
        """Return the sampling fields, by their names in a chat request."""
        return {}

    def _marks(self) -> Iterator[CacheControl | None]:
        """Yield the cache_control of the whole, of each tool, and of each block."""
        yield self.cache_control
        yield from (tool.cache_control for tool in self.tools or ())
        for message in self._messages():
            for block in message.content:
                yield cast("CacheControl | None", block.get("cache_control"))
                if block["type"] == "tool_result":
                    yield from (part.get("cache_control") for part in block.get("content") or ())

    def _messages(self) -> list[InputMessage]:
        if not self.system:
            return self.messages
        return [InputMessage.model_construct(role="system", content=list(self.system)), *self.messages]


@numbers_of(MESSAGES)
class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages."""

    max_tokens: MaxTokens
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True)] | None = None
    stream: bool | None = False
    metadata: dict[str, Any] | None = None  # user_id is the key of the blocks that cache_control keeps
    inference_geo: Ignored[Name] = None
    user_profile_id: Ignored[Name] = None
    workspace_id: Ignored[Name] = None
    diagnostics: Annotated[Any, IGNORED] = None
    service_tier: Ignored[Literal["auto", "standard_only"]] = None
    container: Annotated[str | dict[str, Any] | None, Refused("no code is run here")] = None
    context_management: Annotated[Any, IGNORED] = None  # nothing is dropped: the model sees the whole conversation

    def _drawn(self) -> dict[str, Any]:
        drawn = {ours: getattr(self, theirs) for theirs, ours in served_in(MESSAGES).items()}
        user = (self.metadata or {}).get("user_id")
        return drawn | {"stream": self.stream, "prompt_cache_key": user if longest(self._marks()) else None}


def _is_begun(last: InputMessage) -> bool:
    """Return whether the last message is the beginning of the answer."""
    return last.role == "assistant" and all(block["type"] != "tool_use" for block in last.content)


def _said(message: InputMessage) -> list[dict[str, Any]]:
    """Convert a message to the messages of a chat request, where each tool result is a separate message."""
    said: dict[str, Any] = {"role": message.role}
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in message.content:
        if block["type"] == "text":
            parts.append({"type": "text", "text": block["text"]})
        elif block["type"] == "image":
            source = block["source"]
            parts.append(image_part(source["url"] if source["type"] == "url" else f"data:;base64,{source['data']}"))
        elif block["type"] == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] == "tool_result":
            content = [{"type": "text", "text": one["text"]} for one in block.get("content") or ()]
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        elif block["type"] == "thinking":
            reasoning.append(block["thinking"])
    if reasoning:
        said["reasoning_content"] = "\n".join(reasoning)
    if calls:
        said["tool_calls"] = calls
    if parts or calls or reasoning or not results:
        results.append(said | {"content": parts})
    return results


def _tool(tool: InputTool) -> dict[str, Any]:
    given = {"name": tool.name, "description": tool.description, "strict": tool.strict}
    return {"type": "function", "function": given | {"parameters": tool.input_schema}}


class AnthropicUsage(Answer):
    """Token counts. Tokens found in the cache, and those written to it to be kept, are not counted as input."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int


class AnthropicBlock(Answer):
    """A part of a message."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class AnthropicEnd(Answer):
    """The reason why a message ended."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class AnthropicMessage(AnthropicEnd):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    usage: AnthropicUsage


class AnthropicDelta(Answer):
    """An addition to a block."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    partial_json: NotRequired[str]


class AnthropicEvent(Answer):
    """An event of a streamed message. Its type determines its fields."""

    type: str
    message: NotRequired[AnthropicMessage]
    index: NotRequired[int]
    content_block: NotRequired[AnthropicBlock]
    delta: NotRequired[AnthropicDelta | AnthropicEnd]
    usage: NotRequired[AnthropicUsage]


class InputTokens(Answer):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int
