"""The body of /v1/responses, its conversion to a chat request, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Union

from pydantic import Discriminator, Field, Tag
from typing_extensions import NotRequired

from quire.request import RESPONSES, served_in
from quire.server.http.api_error import Answer, ApiError, shown
from quire.server.http.body import model_of
from quire.server.protocol.answers import ChatLogprob, CompletionDetails, SystemFingerprint
from quire.server.protocol.body import (
    IGNORED,
    MAX_MESSAGES,
    Body,
    FunctionName,
    GivenName,
    HistoryItem,
    Ignored,
    ImageData,
    MaxTokens,
    Name,
    OrText,
    Priority,
    Refused,
    Text,
    tag_of,
)
from quire.server.protocol.chat import MAX_TOOLS, NO_MODERATION, CacheOptions, ChatRequest, image_part
from quire.server.protocol.retention import CacheRetention
from quire.server.protocol.sampling import ServiceTier, StreamOptions, numbers_of

MAX_INCLUDED = 64
LOGPROBS = "message.output_text.logprobs"
# Additional output. All but the logprobs belong to features that are not supported, or are always included.
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
COPIED = ("model", "priority", "cache_salt", "chat_template_kwargs", "thinking_token_budget", "parallel_tool_calls",
          "prompt_cache_key", "prompt_cache_retention", "stream", "top_logprobs", *served_in(RESPONSES))  # fmt: skip


class InputText(HistoryItem):
    """A part of text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: Text


class InputImage(HistoryItem):
    """An image, in a data URL or at an address of an allowed host."""

    type: Literal["input_image"]
    image_url: ImageData


class Refusal(HistoryItem):
    """A refusal by a model of another server."""

    type: Literal["refusal"]
    refusal: Text


Part = Annotated[
    Union[  # noqa: UP007
        Annotated[InputText, Tag("<input_text>")],
        Annotated[InputText, Tag("<output_text>")],
        Annotated[InputText, Tag("<text>")],
        Annotated[InputText, Tag("<summary_text>")],
        Annotated[InputText, Tag("<reasoning_text>")],
        Annotated[Refusal, Tag("<refusal>")],
    ],
    Discriminator(tag_of),
]
MessageParts = Annotated[
    list[
        Annotated[
            Union[  # noqa: UP007
                Annotated[InputImage, Tag("<input_image>")],
                Annotated[InputText, Tag("<input_text>")],
                Annotated[InputText, Tag("<output_text>")],
                Annotated[InputText, Tag("<text>")],
                Annotated[Refusal, Tag("<refusal>")],
            ],
            Discriminator(tag_of),
        ]
    ],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    OrText(lambda text: {"type": "input_text", "text": text}),
]
Parts = Annotated[
    list[Part],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
    OrText(lambda text: {"type": "input_text", "text": text}),
]


class MessageItem(HistoryItem):
    """A message."""

    type: NotRequired[Literal["message"] | None]
    role: Literal["user", "assistant", "system", "developer"]
    content: MessageParts


class CallItem(HistoryItem):
    """A tool call of the assistant."""

    type: Literal["function_call"]
    call_id: GivenName
    name: GivenName
    arguments: Text


class CallOutputItem(HistoryItem):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: GivenName
    output: Parts


class ReasoningItem(HistoryItem):
    """The assistant's reasoning."""

    type: Literal["reasoning"]
    summary: NotRequired[Parts | None]
    content: NotRequired[Parts | None]


def _item_tag(value: Any) -> str | None:
    """Return the kind of an item, as tag_of does. An item with a role and no type is a message."""
    is_bare = isinstance(value, dict) and value.get("type") is None and "role" in value
    return "<message>" if is_bare else tag_of(value)


Item = Annotated[
    Union[  # noqa: UP007
        Annotated[MessageItem, Tag("<message>")],
        Annotated[CallItem, Tag("<function_call>")],
        Annotated[CallOutputItem, Tag("<function_call_output>")],
        Annotated[ReasoningItem, Tag("<reasoning>")],
    ],
    Discriminator(_item_tag),
]


STATELESS = Refused("nothing is stored here; send the whole conversation as input")
NO_BACKGROUND = Refused("an answer is given while its client waits, and nothing is stored")


class ResponseTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Annotated[Any, IGNORED] = None
    defer_loading: Ignored[bool] = None
    output_schema: Ignored[dict[str, Any]] = None


class ChosenTools(Body):
    """The function that must be called, or the functions that may be."""

    type: Literal["function", "allowed_tools"]
    name: Name | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None


class TextFormat(Body):
    """The format of the generated text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: Ignored[Text] = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: Ignored[bool] = None  # a schema is always enforced


class TextConfig(Body):
    """Options of the generated text."""

    format: TextFormat | None = None
    verbosity: Annotated[
        Name | None, Refused("the length of an answer cannot be set here, except by max_output_tokens", "medium")
    ] = None


class Reasoning(Body):
    """Options of the model's reasoning."""

    effort: Name | None = None  # for the chat template; "none" turns reasoning off
    summary: Ignored[Name] = None  # reasoning is shown unchanged
    generate_summary: Ignored[Name] = None
    context: Ignored[Name] = None
    mode: Ignored[Name] = None


@numbers_of(RESPONSES)
class ResponsesRequest(Body):
    """The body of /v1/responses. The second group of fields is vLLM's."""

    model: Name | None = None
    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        OrText(lambda text: {"role": "user", "content": text}),
    ]
    instructions: Text | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: MaxTokens | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # auto: keep the end of a prompt that is too long
    include: Annotated[list[Included], Field(max_length=MAX_INCLUDED)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None  # notes of the client, returned in the answer
    store: Ignored[bool] = None  # nothing is stored, as the answer reports
    max_tool_calls: int | None = None  # ignored: it bounds the calls of built-in tools, which are not supported
    user: Ignored[Text] = None
    safety_identifier: Ignored[Text] = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: CacheRetention = None

    seed: int | None = None
    stop: Text | list[Text] | None = None
    priority: Priority | None = None
    cache_salt: GivenName | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None

    access_programs: Annotated[dict[str, Any] | None, Refused("there are no access programs here")] = None
    background: Annotated[bool | None, NO_BACKGROUND] = None
    background_options: Annotated[dict[str, Any] | None, NO_BACKGROUND] = None
    context_management: Annotated[
        list[Any] | None, Refused("conversations are not shortened here; send only the items that the model is to see")
    ] = None
    conversation: Annotated[str | dict[str, Any] | None, STATELESS] = None
    image: Annotated[dict[str, Any] | None, Refused("an image is a part of the input, of type 'input_image'")] = None
    moderation: Annotated[dict[str, Any] | None, NO_MODERATION] = None
    previous_response_id: Annotated[str | None, STATELESS] = None
    prompt: Annotated[dict[str, Any] | None, Refused("no prompts are stored here; give instructions and input")] = None
    prompt_cache_options: CacheOptions = None
    service_tier: ServiceTier = None

    ALSO_CALLED: ClassVar[dict[str, str]] = {
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
    }

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises RequestValidationError, with a chat's names, if it is invalid."""
        asked: dict[str, Any] = {name: getattr(self, name) for name in COPIED} | self._tools()
        asked["messages"] = _messages(self.instructions, self.input)
        asked["max_completion_tokens"] = self.max_output_tokens
        asked["logprobs"] = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        if self.truncation == "auto":
            asked["truncate_prompt_tokens"] = -1
        if self.reasoning is not None:
            asked["reasoning_effort"] = self.reasoning.effort
        form = None if self.text is None else self.text.format
        if form is not None and form.type == "json_schema":
            if form.schema_ is None:
                raise ApiError("text.format.schema is missing; it must hold the schema", param="text")
            schema = {"name": form.name, "schema": form.schema_}
            asked["response_format"] = {"type": form.type, "json_schema": schema}
        elif form is not None:
            asked["response_format"] = {"type": form.type}
        return model_of({name: one for name, one in asked.items() if one is not None}, ChatRequest)

    def _tools(self) -> dict[str, Any]:
        tools, choice = self.tools or [], self.tool_choice
        chosen: Any = choice
        if isinstance(choice, ChosenTools):
            chosen = {"type": "function", "function": {"name": choice.name or ""}}
            if choice.type == "allowed_tools":
                names = [tool.get("name") for tool in choice.tools or ()]
                if unknown := [name for name in names if name not in {tool.name for tool in tools}]:
                    message = f"tool_choice allows {shown(unknown[0])}, which is not a function of tools"
                    raise ApiError(message, param="tool_choice")
                tools, chosen = [tool for tool in tools if tool.name in names], choice.mode
        functions = [tool.model_dump(include={"name", "description", "parameters", "strict"}) for tool in tools]
        return {"tools": [{"type": "function", "function": one} for one in functions] or None, "tool_choice": chosen}


def _messages(instructions: str | None, items: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert items to messages. Reasoning, text and tool calls of one turn of the assistant become one message."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        kind = item.get("type") or "message"
        if kind == "function_call_output":
            content = _texts(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            continue
        if kind == "message" and item["role"] != "assistant":
            _add(messages, item["role"], _texts(item["content"]))
            continue
        last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        if last is None or (kind == "reasoning" and last.keys() != {"role", "reasoning_content"}):
            last = {"role": "assistant"}
            messages.append(last)
        if kind == "reasoning":
            reasoning = "\n".join(part["text"] for part in _texts(item.get("content") or item.get("summary") or ()))
            last["reasoning_content"] = "\n".join(filter(None, (last.get("reasoning_content"), reasoning)))
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            called = {"id": item["call_id"], "type": "function", "function": function}
            last.setdefault("tool_calls", []).append(called)
        else:
            last.setdefault("content", []).extend(_texts(item["content"]))
    return messages


def _add(messages: list[dict[str, Any]], role: str, content: list[dict[str, Any]]) -> None:
    """Add a message. Merge a leading developer message into the instructions: most templates accept one of a system."""
    if role in ("system", "developer"):
        role = "system"
        if (
            len(messages) == 1
            and messages[0]["role"] == role
            and isinstance(messages[0]["content"], str)
            and all("text" in part for part in content)
        ):
            messages[0]["content"] = "\n\n".join([messages[0]["content"], *(part["text"] for part in content)])
            return
    messages.append({"role": role, "content": content})


def _texts(parts: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert parts to those of a chat's message."""
    return [
        image_part(part["image_url"])
        if part["type"] == "input_image"
        else {"type": "text", "text": part["refusal"] if "refusal" in part else part["text"]}
        for part in parts
    ]


class ItemPart(Answer):
    """A part of an item, with its text."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[ChatLogprob]]


Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(Answer):
    """A message, a function call, or reasoning."""

    id: str
    type: Literal["message", "function_call", "reasoning"]
    status: Status
    role: NotRequired[Literal["assistant"]]  # of a message
    content: NotRequired[list[ItemPart]]  # of a message, and of reasoning
    summary: NotRequired[list[Any]]  # of reasoning, like the next
    encrypted_content: NotRequired[None]
    call_id: NotRequired[str]  # of a call, like the next two
    name: NotRequired[str]
    arguments: NotRequired[str]


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
    status: Literal[Status, "failed"]
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


class EventFields(Answer, total=False):
    """The fields of an event, which its type determines."""

    response: ModelResponse
    output_index: int
    content_index: int
    item_id: str
    item: OutputItem
    part: ItemPart
    delta: str
    text: str
    name: str
    arguments: str
    logprobs: list[ChatLogprob]


class ResponseEvent(EventFields):
    """An event of a streamed response. Its type determines its fields."""

    type: str
    sequence_number: int
