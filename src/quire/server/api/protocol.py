"""What clients may ask for, field by field. An unknown field, or one out of bounds, is an error that names it.

An optional field that is null or empty counts as not given: many clients send such values for what was not set.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from quire.engine.beam import MAX_LENGTH_PENALTY
from quire.request import MAX_PRIORITY, MAX_SEED, SMALLEST
from quire.server.http.api_error import ApiError

MAX_N = 128  # samples of a prompt, as OpenAI has it
MAX_PROMPTS = 1024  # in one request
MAX_PROMPT = 2**21  # characters or tokens
MAX_STOPS, MAX_STOP_LENGTH = 16, 256
MAX_STOP_TOKENS = 256
MAX_TOKEN = 2**31 - 1
MAX_NAME = 256
MAX_MESSAGES = 4096
MAX_GRAMMAR = 2**16
MAX_FIELDS = 100  # of an object; none has as many

Token = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
# fail_fast: one error is reported, so a million of them need not be found.
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_PROMPT, fail_fast=True)]
Text = Annotated[str, StringConstraints(max_length=MAX_PROMPT)]
Name = Annotated[str, StringConstraints(max_length=MAX_NAME)]
# One text, one list of token ids, or several of these.
Inputs = Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
StopText = Annotated[str, StringConstraints(max_length=MAX_STOP_LENGTH)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Number = Annotated[float, Field(allow_inf_nan=False)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKEN)]
Grammar = Annotated[str, StringConstraints(max_length=MAX_GRAMMAR)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
FLAG = WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]})
Off = Annotated[bool, BeforeValidator(lambda value: False if value is None else value), FLAG]
On = Annotated[bool, BeforeValidator(lambda value: True if value is None else value), FLAG]
# Of fields that must ask for nothing: Body.NOT_SERVED says why, the OpenAPI document says it to programs.
NO_TEXT = {"type": "string", "maxLength": 0}
NO_LIST = {"type": "array", "maxItems": 0}
NO_OBJECT = {"type": "object", "maxProperties": 0}
NO_CHOICE = {"anyOf": [NO_TEXT, NO_OBJECT]}
NoText = Annotated[str, WithJsonSchema(NO_TEXT)]
NoList = Annotated[list[Any], WithJsonSchema(NO_LIST)]
NoObject = Annotated[dict[str, Any], WithJsonSchema(NO_OBJECT)]
NoFlag = Annotated[bool, WithJsonSchema({"const": False})]
# Values that such a field may have besides, since they ask for what is done anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("in_memory",),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
}


def _neutral(name: str, nothing: dict[str, Any]) -> WithJsonSchema:
    """What the OpenAPI document says of a field that may be neutral, or nothing."""
    return WithJsonSchema({"anyOf": [{"enum": list(NEUTRAL[name])}, nothing]})


def _bound_fields(value: Any) -> None:
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"it has {len(value)} fields, of which most cannot be known here")


class Body(BaseModel):
    """A request's body: no field is ignored, and no value is bent into shape."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    # Why, by the names of fields that must ask for nothing: be null or empty, or as NEUTRAL has it.
    NOT_SERVED: ClassVar[dict[str, str]] = {}
    NOTES: ClassVar[tuple[str, ...]] = ()  # fields of no consequence, which may be as large as the whole body

    @model_validator(mode="before")
    @classmethod
    def bound_fields(cls, value: Any) -> Any:
        """Without a bound, each unknown field would make an error of its own, for seconds."""
        _bound_fields(value)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def refuse_what_is_not_served(cls, value: Any, info: Any) -> Any:
        """An option that cannot be honoured is refused, not ignored."""
        name = info.field_name
        if value and name in cls.NOT_SERVED and value not in NEUTRAL.get(name, ()):
            raise ValueError(f"{cls.NOT_SERVED[name]}; leave it out")
        return value

    def drop_notes(self) -> None:
        """Forget what is of no consequence."""
        for name in self.NOTES:
            setattr(self, name, None)


class StreamOptions(Body):
    """What a stream reports besides the text."""

    include_usage: Off = False  # a last chunk with the number of tokens
    continuous_usage_stats: Off = False  # with it, the numbers so far in every chunk, as vLLM has it
    include_obfuscation: NoFlag | None = None

    NOT_SERVED = {"include_obfuscation": "chunks are not padded here"}


class JsonSchema(Body):
    """The schema of a response_format."""

    name: Name | None = None
    description: Name | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # a schema is always kept to


class ResponseFormat(Body):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def refuse_other_schemas(self) -> ResponseFormat:
        """Only one type keeps to a schema."""
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError(f"type {self.type!r} would ignore its json_schema; the type 'json_schema' keeps to it")
        return self


class Sampling(Body):
    """What completions and chat completions have in common. The second part is vLLM's."""

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[Number, Field(ge=SMALLEST, le=1)] | None = 1.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = 0.0
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopText | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[str, StringConstraints(max_length=MAX_PROMPT)] | None = None  # of no consequence

    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = 0
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = 0.0
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = 1.0
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = 0
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    include_stop_str_in_output: Off = False
    ignore_eos: Off = False  # a grammar's end is no end of the model's own, so it ends the text nevertheless
    skip_special_tokens: On = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    priority: Priority | None = 0
    cache_salt: Name | None = None
    use_beam_search: Off = False
    length_penalty: Annotated[Number, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = 1.0
    regex: Grammar | None = None
    grammar: Grammar | None = None

    # Fields of OpenAI's that are taken where they ask for nothing, since clients send them, and otherwise refused.
    logit_bias: NoObject | None = None
    metadata: dict[str, Any] | None = None  # of no consequence, by definition: what a client notes for itself
    store: NoFlag | None = None
    service_tier: Annotated[Name, _neutral("service_tier", NO_TEXT)] | None = None

    NOTES: ClassVar[tuple[str, ...]] = ("user", "metadata")
    NOT_SERVED = {
        "logit_bias": "tokens cannot be biased here",
        "store": "nothing is stored here",
        "service_tier": "there is one tier of service here, 'default' (and see priority)",
    }

    def check_together(self) -> None:
        """Raise ApiError for a field that is right by itself, but has no effect beside the others, or without one."""
        options = self.stream_options
        if options is not None and any(options.model_dump().values()) and not self.stream:
            raise ApiError("stream_options goes with stream only; set stream to true", param="stream_options")
        if self.length_penalty not in (None, 1) and not self.use_beam_search:
            message = f"length_penalty is {self.length_penalty:g} without use_beam_search; only there has it an effect"
            raise ApiError(message, param="length_penalty")
        if (field := self.grammar_field()) is not None and self.min_tokens:
            message = f"min_tokens does not go with {field}, which says where the text ends; leave one of them out"
            raise ApiError(message, param="min_tokens")

    def grammar_field(self) -> str | None:
        """The field that asks for a grammar, if one does. Raises ApiError where several do."""
        given = [name for name in ("regex", "grammar") if getattr(self, name)]
        if self.response_format is not None and self.response_format.type != "text":
            given.insert(0, "response_format")
        if len(given) > 1:
            message = f"{' and '.join(given)} were given; a text can follow one of them only"
            raise ApiError(message, param=given[1])
        return given[0] if given else None


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Inputs
    suffix: NoText | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = 16
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    add_special_tokens: On = True

    NOT_SERVED = Sampling.NOT_SERVED | {"suffix": "text cannot be filled in before a suffix: models here only continue"}


class EmbeddingRequest(Body):
    """The body of /v1/embeddings. The second part is vLLM's."""

    input: Inputs
    model: Name | None = None
    encoding_format: Literal["float", "base64", ""] | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    user: Text | None = None  # of no consequence

    add_special_tokens: On = True
    priority: Priority | None = 0
    cache_salt: Name | None = None

    NOTES = ("user",)


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

    NOT_SERVED = {
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
                _bound_fields(part)
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
    tool_choice: Annotated[str | dict[str, Any], _neutral("tool_choice", NO_CHOICE)] | None = None
    parallel_tool_calls: bool | None = None
    functions: NoList | None = None
    function_call: Annotated[str | dict[str, Any], _neutral("function_call", NO_CHOICE)] | None = None
    chat_template: NoText | None = None
    modalities: Annotated[list[str], _neutral("modalities", NO_LIST)] | None = None
    audio: NoObject | None = None
    prediction: NoObject | None = None
    reasoning_effort: Annotated[Name, _neutral("reasoning_effort", NO_TEXT)] | None = None
    verbosity: Annotated[Name, _neutral("verbosity", NO_TEXT)] | None = None
    prompt_cache_retention: Annotated[Name, _neutral("prompt_cache_retention", NO_TEXT)] | None = None
    prompt_cache_options: Annotated[dict[str, Any], _neutral("prompt_cache_options", NO_OBJECT)] | None = None
    moderation: NoObject | None = None
    web_search_options: Annotated[Any, WithJsonSchema({"type": "null"})] = None

    NOTES = (*Sampling.NOTES, "prompt_cache_key", "safety_identifier")
    NOT_SERVED = Sampling.NOT_SERVED | {
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


class TokenizeRequest(Body):
    """The body of /tokenize: a prompt, or messages."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None  # None: for a prompt; the chat template brings its own
    add_generation_prompt: On = True
    return_token_strs: Off = False


class DetokenizeRequest(Body):
    """The body of /detokenize."""

    model: Name | None = None
    tokens: Annotated[list[Token], Field(max_length=MAX_PROMPT, fail_fast=True)]
