"""The body of /v1/chat/completions, the messages of a conversation, and the answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired

from quire.request import Retention
from quire.sandbox.grammar import check_depth
from quire.server.http.api_error import Answer, ApiError
from quire.server.protocol.answers import ChatLogprob, Head, PromptLogprobs, Usage
from quire.server.protocol.body import (
    MAX_MESSAGES,
    MAX_TOKEN,
    Body,
    FunctionName,
    GivenName,
    Ignored,
    ImageData,
    MaxTokens,
    Name,
    Off,
    On,
    Refused,
    Role,
    StrictItem,
    Text,
    bound_fields,
    tag_of,
)
from quire.server.protocol.retention import DEFAULT, RETENTION, CacheControl, CacheRetention, longest, seconds_of
from quire.server.protocol.sampling import Sampling

MAX_TOOLS = 1024  # of a request
MAX_CALLS = 1024  # of a message


def _nothing(value: Any) -> Any:
    """Replace an empty object, which requests nothing, by None."""
    return None if value == {} else value


TEXT_ONLY = Refused("only text is served here")
NO_TEMPLATE = Refused("a template in a request would be a program from a stranger; start the server with one")
NO_MODERATION = Refused("texts are not moderated here")
CacheOptions = Annotated[
    dict[str, Any] | None,
    Refused(
        "the prefix cache needs no breakpoints, and prompt_cache_retention sets how long a prompt stays",
        {"mode": "implicit"},
    ),
]


class TextPart(StrictItem):
    """A part of a message."""

    type: Literal["text"]
    text: Text
    cache_control: NotRequired[CacheControl | None]


class ImageUrl(StrictItem):
    """An image, in a data URL or at an address of an allowed host."""

    url: ImageData
    detail: NotRequired[Name | None]  # without effect


class ImagePart(StrictItem):
    """An image in a message."""

    type: Literal["image_url"]
    image_url: ImageUrl
    cache_control: NotRequired[CacheControl | None]


Part = Annotated[
    Union[Annotated[TextPart, Tag("<text>")], Annotated[ImagePart, Tag("<image_url>")]],  # noqa: UP007
    Discriminator(tag_of),
]


def image_part(url: str) -> dict[str, Any]:
    """Return the part of a message that is an image."""
    return {"type": "image_url", "image_url": {"url": url}}


class CalledFunction(Body):
    """The function that an assistant's message calls."""

    name: GivenName
    arguments: Text | dict[str, Any] | None = None  # JSON


class ToolCall(Body):
    """A call in an assistant's message."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Ignored[int] = None  # as in streams


class Message(Body):
    """A message of a conversation."""

    role: Role
    content: Text | Annotated[list[Part], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: Name | None = None
    id: Ignored[Name] = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # another name of reasoning_content
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None

    # Clients return an assistant's message as they received it: with these fields, empty.
    refusal: Annotated[str | None, Refused("models here have no separate refusals; put the text into content")] = None
    annotations: Annotated[list[Any] | None, Refused("annotations are not served here")] = None
    audio: Annotated[dict[str, Any] | None, TEXT_ONLY] = None
    function_call: Annotated[dict[str, Any] | None, Refused("functions are called by tool_calls here")] = None

    @model_validator(mode="after")
    def check_tools(self) -> Message:
        """Check that a result names its call, and that only an assistant calls tools."""
        if self.role == "tool" and not self.tool_call_id:
            raise PydanticCustomError("tool_message", "tool_call_id is missing; it names the call that was answered")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_message", "tool_calls belong to messages of role 'assistant'")
        return self

    @field_validator("content", mode="before")
    @classmethod
    def bound_parts(cls, value: Any) -> Any:
        """Bound the fields of each part, and report the first part that is neither text nor image."""
        if isinstance(value, list):
            for i, part in enumerate(value):
                bound_fields(part)
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind not in ("text", "image_url"):
                    raise PydanticCustomError("no_text", "{kind}", {"index": i, "kind": kind})
        return value


class FunctionTool(Body):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: no parameters
    strict: bool | None = None  # True: a grammar enforces the schema of the arguments


class Tool(Body):
    """A tool. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionTool
    cache_control: CacheControl | None = None


class NamedFunction(Body):
    """The name of a function."""

    name: GivenName


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Rendering(Body):
    """Options for rendering messages with the chat template, with vLLM's names."""

    add_generation_prompt: bool | None = None  # None: True unless the last message is continued
    continue_final_message: Off = False
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the template, such as enable_thinking
    tools: Tools | None = None

    def check_depths(self) -> None:
        """Raise RequestError for a value that is nested too deeply to be written as JSON."""
        check_depth(self.chat_template_kwargs or {}, "chat_template_kwargs")
        for i, tool in enumerate(self.tools or ()):
            check_depth(tool.function.parameters or {}, f"tools[{i}].function.parameters")

    def adds_prompt(self) -> bool:
        """Return whether the prompt ends with the start of an answer. Raises ApiError if a message is continued too."""
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message continues the last message, so there is no room for a generation prompt"
            raise ApiError(f"{message}; leave one of them out", param="continue_final_message")
        return not self.continue_final_message and self.add_generation_prompt is not False


class ChatRequest(Sampling, Rendering):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_tokens: MaxTokens | None = None  # None: to the end of the context
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    tool_choice: Annotated[Literal["", "none", "auto", "required"] | NamedTool | None, BeforeValidator(_nothing)] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Name | None = None  # for the chat template; "none" turns reasoning off
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    include_reasoning: On = True
    prompt_cache_key: Text | None = None  # requests with the same key share a budget for kept blocks
    prompt_cache_retention: CacheRetention = None
    cache_control: CacheControl | None = None  # the mark of the whole prompt, in addition to those of its parts
    safety_identifier: Ignored[Text] = None

    functions: Annotated[list[Any] | None, Refused("functions are given as tools here")] = None
    function_call: Annotated[
        str | dict[str, Any] | None, Refused("functions are chosen by tool_choice here", "none", "auto")
    ] = None
    chat_template: Annotated[str | None, NO_TEMPLATE] = None
    modalities: Annotated[list[str] | None, Refused("only text is served here", ["text"])] = None
    audio: Annotated[dict[str, Any] | None, TEXT_ONLY] = None
    prediction: Annotated[dict[str, Any] | None, Refused("predicted outputs are not served here")] = None
    verbosity: Annotated[
        Name | None,
        Refused("the length of an answer cannot be set here, except by max_completion_tokens", "medium"),
    ] = None
    prompt_cache_options: CacheOptions = None
    moderation: Annotated[dict[str, Any] | None, NO_MODERATION] = None
    web_search_options: Annotated[Any, Refused("the web is not searched here", refuses_empty=True)] = None

    def check_together(self) -> None:
        """Check the shared fields, and those that only a chat has. Raises ApiError or RequestError."""
        super().check_together()
        self.adds_prompt()
        self.check_depths()
        self._check_tools()
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs does not go with stream: a chat's first chunk is sent before the prompt has run"
            raise ApiError(message, param="prompt_logprobs")
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs is {self.top_logprobs} without logprobs; set logprobs to true"
            raise ApiError(message, param="logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            message = (
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; they are "
                f"two names of one limit, so give one of them"
            )
            raise ApiError(message, param="max_tokens")

    def retention(self) -> Retention | None:
        """Return how long the conversation's blocks are kept, or None if no field asks for it."""
        parts = (part for message in self.messages if isinstance(message.content, list) for part in message.content)
        marks = (self.cache_control, *(part.get("cache_control") for part in parts))
        seconds = seconds_of(longest((*marks, *(tool.cache_control for tool in self.tools or ()))))
        chosen = self.prompt_cache_retention or (DEFAULT if self.prompt_cache_key and not seconds else "")
        seconds = max(seconds, RETENTION[chosen])
        return Retention(self.prompt_cache_key or "", seconds) if seconds else None

    def _check_tools(self) -> None:
        names: dict[str, int] = {}
        for i, tool in enumerate(self.tools or ()):
            name, path = tool.function.name, f"tools[{i}].function"
            if (other := names.setdefault(name, i)) != i:
                raise ApiError(f"{path}.name is {name!r}, as that of tools[{other}]", param=f"{path}.name")
            parameters = tool.function.parameters or {}
            if parameters.get("type", "object") != "object":
                message = f"{path}.parameters has the type {parameters['type']!r}; arguments are an object"
                raise ApiError(message, param=f"{path}.parameters")
        choice = self.tool_choice
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            message = f"tool_choice names {choice.function.name!r}, which is not a function of tools"
            raise ApiError(message, param="tool_choice")
        if choice == "required" and not names:
            raise ApiError("tool_choice is 'required' without tools; give some", param="tool_choice")
        if self.must_call() and (field := super().grammar_field()) is not None:
            message = f"{field} constrains the text, but tool_choice allows only calls; leave one of them out"
            raise ApiError(message, param=field)
        if self.is_strict() and (field := super().grammar_field()) not in (None, "response_format"):
            message = f"{field} constrains the text, and strict the calls in it; leave one of them out"
            raise ApiError(message, param=field)
        if self.use_beam_search and (names or self.thinking_token_budget is not None):
            field = "tools" if names else "thinking_token_budget"
            raise ApiError(f"{field} does not go with use_beam_search; leave one of them out", param=field)

    def may_call(self) -> bool:
        """Return whether the answer may have calls."""
        return bool(self.tools) and self.tool_choice != "none"

    def must_call(self) -> bool:
        """Return whether the answer must consist of calls only."""
        return bool(self.tools) and (self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool))

    def is_strict(self) -> bool:
        """Return whether the arguments of calls must follow their schemas."""
        return self.may_call() and any(tool.function.strict for tool in self.tools or ())

    def has_calls_of_a_grammar(self) -> bool:
        """Return whether a grammar constrains the calls: one is required, strict, or the only one allowed."""
        if self.must_call() or self.is_strict():
            return True
        return self.may_call() and self.parallel_tool_calls is False and super().grammar_field() is None

    def structure_field(self) -> str | None:
        """Return the name of the field that constrains the text, if any. Raises ApiError if several do.

        A response_format is ignored if the answer must be a call: agents send both, and there is no text to constrain.
        """
        field = super().structure_field()
        return None if field == "response_format" and self.must_call() else field

    def grammar_field(self) -> str | None:
        """Return the name of the field that requires a grammar, if any: also tools or thinking_token_budget."""
        field = super().grammar_field()
        if field is None and self.has_calls_of_a_grammar():
            return "tools"
        return "thinking_token_budget" if field is None and self.thinking_token_budget is not None else field


ChatFinishReason = Annotated[str, WithJsonSchema({"enum": ["stop", "length", "tool_calls"], "type": "string"})]


class ChatLogprobs(Answer):
    """The logprobs of a message's tokens."""

    content: list[ChatLogprob]
    refusal: None


class AnsweredFunction(Answer):
    """A function, and the JSON of its arguments."""

    name: str
    arguments: str


class AnsweredCall(Answer):
    """A tool call."""

    id: str
    type: Literal["function"]
    function: AnsweredFunction


class ChatMessage(Answer):
    """A message of the model: its text, reasoning and calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[AnsweredCall]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatChoice(Answer):
    """One continuation of a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatHead(Head):
    """The first fields of an answer."""

    object: Literal["chat.completion"]


class ChatEnd(Answer):
    """The last fields of an answer, after its choices."""

    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class ChatCompletion(ChatHead, ChatEnd):
    """The answer of /v1/chat/completions."""

    choices: list[ChatChoice]


class FunctionDelta(Answer):
    """An addition to a called function: first its name, then parts of the arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(Answer):
    """An addition to a tool call. The first one of each call has an id."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(Answer, total=False):
    """An addition to a message."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDelta]
    reasoning_content: str
    reasoning: str


class ChatChunkChoice(Answer):
    """A part of a choice; the last one has a finish_reason."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: NotRequired[int | str | None]
    prompt_token_ids: NotRequired[list[int]]  # in a choice's first part
    token_ids: NotRequired[list[int]]


class ChatChunkHead(Head):
    """The first fields of a chunk."""

    object: Literal["chat.completion.chunk"]


class ChatChunk(ChatChunkHead):
    """A chunk of a streamed chat completion. It has one choice, or none in a last chunk with the usage."""

    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
