"""What the routes that generate text have in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from quire.engine.beam import MAX_LENGTH_PENALTY
from quire.request import MAX_SEED, SMALLEST
from quire.server.http.api_error import ApiError
from quire.server.protocol.body import (
    MAX_N,
    MAX_PROMPT,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOKEN,
    NO_TEXT,
    Body,
    Grammar,
    Name,
    NoFlag,
    NoObject,
    Number,
    Off,
    On,
    Priority,
    Stop,
    StopText,
    Token,
    neutral,
)


class StreamOptions(Body):
    """What a stream reports besides the text."""

    include_usage: Off = False  # a last chunk with the number of tokens
    continuous_usage_stats: Off = False  # with it, the numbers so far in every chunk, as vLLM has it
    include_obfuscation: NoFlag | None = None

    NOT_SERVED: ClassVar[dict[str, str]] = {"include_obfuscation": "chunks are not padded here"}


class JsonSchema(Body):
    """The schema of a response_format."""

    model_config = ConfigDict(extra="forbid")

    name: Name | None = None
    description: Name | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None  # a schema is always kept to


class ResponseFormat(Body):
    """What the text has to be. All that stands in it is to change the text, so what is unknown is refused."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def refuse_other_schemas(self) -> ResponseFormat:
        """Only one type keeps to a schema."""
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError(f"type {self.type!r} would ignore its json_schema; the type 'json_schema' keeps to it")
        return self

    def schema_given(self) -> dict[str, Any]:
        """The schema of the type that has one. Raises ApiError where it is missing."""
        if self.json_schema is None:
            raise ApiError("response_format.json_schema is missing; it must hold the schema", param="response_format")
        return self.json_schema.schema_


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
    service_tier: Annotated[Name, neutral("service_tier", NO_TEXT)] | None = None

    NOTES: ClassVar[tuple[str, ...]] = ("user", "metadata")
    NOT_SERVED: ClassVar[dict[str, str]] = {
        "logit_bias": "tokens cannot be biased here",
        "store": "nothing is stored here",
        "service_tier": "there is one tier of service here, 'default' (and see priority)",
    }

    def check_together(self) -> None:
        """Raise ApiError for a field that is right by itself, but has no effect beside the others, or without one."""
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
