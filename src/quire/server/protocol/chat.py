"""The body of /v1/chat/completions, and the messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import NotRequired, TypedDict

from quire.sandbox.grammar import check_depth
from quire.server.http.api_error import ApiError
from quire.server.protocol.body import (
    MAX_MESSAGES,
    MAX_TOKEN,
    NO_CHOICE,
    NO_LIST,
    NO_OBJECT,
    NO_TEXT,
    Body,
    FunctionName,
    GivenName,
    MaxTokens,
    Name,
    NoList,
    NoObject,
    NoText,
    Off,
    On,
    Role,
    Text,
    bound_fields,
    neutral,
)
from quire.server.protocol.sampling import Sampling

MAX_TOOLS = 1024  # of a request
MAX_CALLS = 1024  # of a message


def _nothing(value: Any) -> Any:
    """An empty object asks for nothing."""
    return None if value == {} else value


class TextPart(TypedDict):
    """A part of a message. As a dictionary, since there may be very many, and an object of each takes its time."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    type: Literal["text"]
    text: Text
    cache_control: NotRequired[Any]  # of no consequence: the prefix cache needs no breakpoints


class CalledFunction(Body):
    """What an assistant's message has called."""

    name: GivenName
    arguments: Text | dict[str, Any] | None = None  # JSON


class ToolCall(Body):
    """A call in an assistant's message."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # as streams have it: of no consequence

    NOTES: ClassVar[tuple[str, ...]] = ("index",)


class Message(Body):
    """A message of a conversation."""

    role: Role
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: Name | None = None
    id: Name | None = None  # of no consequence
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # another name of it
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None

    # An assistant's message as it was answered has these, and there they say nothing.
    refusal: NoText | None = None
    annotations: NoList | None = None
    audio: NoObject | None = None
    function_call: NoObject | None = None

    NOTES: ClassVar[tuple[str, ...]] = ("id",)
    NOT_SERVED: ClassVar[dict[str, str]] = {
        "refusal": "models here have no words for refusals; say it in content",
        "annotations": "annotations are not served here",
        "audio": "only text is served here",
        "function_call": "functions are called by tool_calls here",
    }

    @model_validator(mode="after")
    def check_tools(self) -> Message:
        """A result belongs to a call, and only an assistant calls."""
        if self.role == "tool" and not self.tool_call_id:
            raise PydanticCustomError("tool_message", "tool_call_id is missing; it names the call that was answered")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("tool_message", "tool_calls belong to messages of role 'assistant'")
        return self

    @field_validator("content", mode="before")
    @classmethod
    def bound_parts(cls, value: Any) -> Any:
        """As for all other objects, and with a sentence about the first part that is no text."""
        if isinstance(value, list):
            for i, part in enumerate(value):
                bound_fields(part)
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind != "text":
                    raise PydanticCustomError("no_text", "{kind}", {"index": i, "kind": kind})
        return value


class FunctionTool(Body):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema; None: there are none
    strict: bool | None = None  # arguments follow the schema in any case


class Tool(Body):
    """A tool, of the one kind that there is."""

    type: Literal["function"]
    function: FunctionTool
    cache_control: dict[str, Any] | None = None  # of no consequence

    NOTES: ClassVar[tuple[str, ...]] = ("cache_control",)


class NamedFunction(Body):
    """The name of a function."""

    name: GivenName


class NamedTool(Body):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]
Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class Rendering(Body):
    """How a chat template makes a prompt of messages. Names are vLLM's."""

    add_generation_prompt: bool | None = None  # None: unless the last message is to be continued
    continue_final_message: Off = False
    chat_template_kwargs: dict[str, Any] | None = None  # what the template sees besides, such as enable_thinking
    tools: Tools | None = None

    def check_depths(self) -> None:
        """Raise RequestError for what is too deeply nested to be written as JSON."""
        check_depth(self.chat_template_kwargs or {}, "chat_template_kwargs")
        for i, tool in enumerate(self.tools or ()):
            check_depth(tool.function.parameters or {}, f"tools[{i}].function.parameters")

    def adds_prompt(self) -> bool:
        """Whether the prompt ends where a new answer begins. Raises ApiError where a message is continued as well."""
        if self.continue_final_message and self.add_generation_prompt:
            message = (
                "continue_final_message goes on with the last message, so there is no room for a generation prompt"
            )
            raise ApiError(f"{message}; leave one of both out", param="continue_final_message")
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
    reasoning_effort: Name | None = None  # the chat template's; "none" asks it for no thoughts
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    include_reasoning: On = True
    prompt_cache_key: Text | None = None  # of no consequence: there is one cache, which all requests go to
    safety_identifier: Text | None = None  # of no consequence, like user

    functions: NoList | None = None
    function_call: Annotated[str | dict[str, Any], neutral("function_call", NO_CHOICE)] | None = None
    chat_template: NoText | None = None
    modalities: Annotated[list[str], neutral("modalities", NO_LIST)] | None = None
    audio: NoObject | None = None
    prediction: NoObject | None = None
    verbosity: Annotated[Name, neutral("verbosity", NO_TEXT)] | None = None
    prompt_cache_retention: Annotated[Name, neutral("prompt_cache_retention", NO_TEXT)] | None = None
    prompt_cache_options: Annotated[dict[str, Any], neutral("prompt_cache_options", NO_OBJECT)] | None = None
    moderation: NoObject | None = None
    web_search_options: Annotated[Any, WithJsonSchema({"type": "null"})] = None

    NOTES = (*Sampling.NOTES, "prompt_cache_key", "safety_identifier")
    NOT_SERVED: ClassVar[dict[str, str]] = Sampling.NOT_SERVED | {
        "functions": "functions are given as tools here",
        "function_call": "functions are chosen by tool_choice here",
        "chat_template": "a template in a request would be a program from a stranger; start the server with one",
        "audio": "only text is served here",
        "prediction": "predicted outputs are not served here",
        "modalities": "only text is served here",
        "verbosity": "how much is said cannot be set here, except by max_completion_tokens",
        "prompt_cache_retention": "how long a prompt stays in the cache cannot be set here",
        "prompt_cache_options": "the prefix cache needs no breakpoints, and how long a prompt stays cannot be set here",
        "moderation": "texts are not moderated here",
        "web_search_options": "the web is not searched here",
    }

    @field_validator("web_search_options", mode="after")
    @classmethod
    def refuse_web_search(cls, value: Any) -> Any:
        """An empty object asks for a search as well."""
        if value is not None:
            raise ValueError(f"{cls.NOT_SERVED['web_search_options']}; leave it out")
        return value

    def check_together(self) -> None:
        """As for completions, and what only a chat has."""
        super().check_together()
        self.adds_prompt()
        self.check_depths()
        self._check_tools()
        if self.stream and self.prompt_logprobs is not None:
            message = "prompt_logprobs does not go with stream: a chat's first piece is sent before the prompt has run"
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
            message = f"tool_choice names {choice.function.name!r}, which is none of the functions of tools"
            raise ApiError(message, param="tool_choice")
        if choice == "required" and not names:
            raise ApiError("tool_choice is 'required' without tools; give some", param="tool_choice")
        if self.must_call() and (field := super().grammar_field()) is not None:
            message = f"{field} says what the text is, and tool_choice that there is none; leave one of them out"
            raise ApiError(message, param=field)
        if self.is_strict() and (field := super().grammar_field()) not in (None, "response_format"):
            message = f"{field} says what the text is, and strict what a call in it is; leave one of them out"
            raise ApiError(message, param=field)
        if self.use_beam_search and (names or self.thinking_token_budget is not None):
            field = "tools" if names else "thinking_token_budget"
            raise ApiError(f"{field} does not go with use_beam_search; leave one of them out", param=field)

    def may_call(self) -> bool:
        """Whether the answer may have calls."""
        return bool(self.tools) and self.tool_choice != "none"

    def must_call(self) -> bool:
        """Whether the answer has nothing but calls."""
        return bool(self.tools) and (self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool))

    def is_strict(self) -> bool:
        """Whether a function is called with arguments of its schema only."""
        return self.may_call() and any(tool.function.strict for tool in self.tools or ())

    def has_calls_of_a_grammar(self) -> bool:
        """Whether a grammar says what calls are: where one must come, be right, or be the only one."""
        if self.must_call() or self.is_strict():
            return True
        return self.may_call() and self.parallel_tool_calls is False and super().grammar_field() is None

    def structure_field(self) -> str | None:
        """As for completions. Agents send a response_format along where a turn must be a call: it has no text."""
        field = super().structure_field()
        return None if field == "response_format" and self.must_call() else field

    def grammar_field(self) -> str | None:
        """As for completions; and tools may have one."""
        field = super().grammar_field()
        if field is None and self.has_calls_of_a_grammar():
            return "tools"
        return "thinking_token_budget" if field is None and self.thinking_token_budget is not None else field
