"""The body of /v1/chat/completions, and the messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from quire.server.http.api_error import ApiError
from quire.server.protocol.body import (
    MAX_MESSAGES,
    MAX_TOKEN,
    NO_CHOICE,
    NO_LIST,
    NO_OBJECT,
    NO_TEXT,
    Body,
    MaxTokens,
    Name,
    NoList,
    NoObject,
    NoText,
    On,
    Text,
    bound_fields,
    neutral,
)
from quire.server.protocol.sampling import Sampling


class TextPart(TypedDict):
    """A part of a message. As a dictionary, since there may be very many, and an object of each takes its time."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    type: Literal["text"]
    text: Text


class Message(Body):
    """A message of a conversation."""

    role: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    content: Text | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    name: Name | None = None

    # An assistant's message as it was answered has these, and there they say nothing.
    refusal: NoText | None = None
    annotations: NoList | None = None
    audio: NoObject | None = None
    function_call: NoObject | None = None
    tool_calls: NoList | None = None
    tool_call_id: NoText | None = None

    NOT_SERVED: ClassVar[dict[str, str]] = {
        "refusal": "models here have no words for refusals; say it in content",
        "annotations": "annotations are not served here",
        "audio": "only text is served here",
        "function_call": "functions are not served here",
        "tool_calls": "tools are not served here",
        "tool_call_id": "tools are not served here",
    }

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


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_tokens: MaxTokens | None = None  # None: to the end of the context
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    add_generation_prompt: On = True
    prompt_cache_key: Text | None = None  # of no consequence: there is one cache, which all requests go to
    safety_identifier: Text | None = None  # of no consequence, like user

    tools: NoList | None = None
    tool_choice: Annotated[str | dict[str, Any], neutral("tool_choice", NO_CHOICE)] | None = None
    parallel_tool_calls: bool | None = None
    functions: NoList | None = None
    function_call: Annotated[str | dict[str, Any], neutral("function_call", NO_CHOICE)] | None = None
    chat_template: NoText | None = None
    modalities: Annotated[list[str], neutral("modalities", NO_LIST)] | None = None
    audio: NoObject | None = None
    prediction: NoObject | None = None
    reasoning_effort: Annotated[Name, neutral("reasoning_effort", NO_TEXT)] | None = None
    verbosity: Annotated[Name, neutral("verbosity", NO_TEXT)] | None = None
    prompt_cache_retention: Annotated[Name, neutral("prompt_cache_retention", NO_TEXT)] | None = None
    prompt_cache_options: Annotated[dict[str, Any], neutral("prompt_cache_options", NO_OBJECT)] | None = None
    moderation: NoObject | None = None
    web_search_options: Annotated[Any, WithJsonSchema({"type": "null"})] = None

    NOTES = (*Sampling.NOTES, "prompt_cache_key", "safety_identifier")
    NOT_SERVED: ClassVar[dict[str, str]] = Sampling.NOT_SERVED | {
        "tools": "tools are not served here",
        "tool_choice": "tools are not served here",
        "functions": "functions are not served here",
        "function_call": "functions are not served here",
        "chat_template": "a template in a request would be a program from a stranger; start the server with one",
        "audio": "only text is served here",
        "prediction": "predicted outputs are not served here",
        "reasoning_effort": "the effort of reasoning cannot be set here",
        "modalities": "only text is served here",
        "verbosity": "how much is said cannot be set here, except by max_completion_tokens",
        "prompt_cache_retention": "how long a prompt stays in the cache cannot be set here",
        "prompt_cache_options": "the prefix cache needs no breakpoints, and how long a prompt stays cannot be set here",
        "moderation": "texts are not moderated here",
    }

    @field_validator("web_search_options", mode="after")
    @classmethod
    def refuse_web_search(cls, value: Any) -> Any:
        """An empty object asks for a search as well."""
        if value is not None:
            raise ValueError("the web is not searched here; leave it out")
        return value

    def check_together(self) -> None:
        """As for completions, and what only a chat has."""
        super().check_together()
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
