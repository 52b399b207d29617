"""Sampling fields shared by the routes that generate text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quire.engine.beam import MAX_LENGTH_PENALTY
from quire.errors import RequestError
from quire.request import (
    MAX_BIAS,
    MAX_SEED,
    NOT_STRUCTURED,
    OPENAI,
    SERVED,
    SamplingParams,
    StructuredOutputsParams,
    served_in,
)
from quire.server.http.api_error import ApiError
from quire.server.protocol.body import (
    MAX_GRAMMAR,
    MAX_N,
    MAX_STOP_TOKENS,
    MAX_STOPS,
    MAX_TOKEN,
    Body,
    GivenName,
    Grammar,
    Ignored,
    Kept,
    Name,
    Number,
    Off,
    On,
    Priority,
    Refused,
    Stop,
    StopText,
    Text,
    Token,
)

BodyT = TypeVar("BodyT", bound=Body)
MAX_BIASED = 1024  # tokens of a logit_bias; OpenAI takes 300
MAX_ALLOWED = 2**16  # token ids
MAX_BAD_WORDS = 256
MAX_CHOICES = 4096
Bias = Annotated[Number, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Choices = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=MAX_GRAMMAR)]],
    Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True),
]
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")  # of vLLM's structured_outputs
SAMPLED = tuple(name for name in served_in(OPENAI) if name != "seed")
GRAMMAR_FIELDS = ("regex", "grammar", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


ServiceTier = Annotated[
    Name | None,
    Refused("there is one tier of service here, 'default' (and see priority)", "auto", "default"),
]


class StreamOptions(Body):
    """Options for the information that a stream reports in addition to the text."""

    include_usage: Off = False  # a last chunk with the number of tokens
    continuous_usage_stats: Off = False  # with include_usage, the counts so far in every chunk, as in vLLM
    include_obfuscation: Annotated[bool | None, Refused("chunks are not padded here")] = None


class JsonSchema(Body):
    """The schema of a response_format."""

    model_config = ConfigDict(extra="forbid")

    name: Ignored[Name] = None
    description: Ignored[Name] = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: Ignored[bool] = None  # a schema is always enforced


class ResponseFormat(Body):
    """The format of the generated text. Every field of it changes the text, so unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def refuse_other_schemas(self) -> ResponseFormat:
        """Refuse a schema with any type but "json_schema", the only one that enforces a schema."""
        if self.json_schema is not None and self.type != "json_schema":
            raise ValueError(f"type {self.type!r} would ignore its json_schema; the type 'json_schema' keeps to it")
        return self

    def schema_given(self) -> dict[str, Any]:
        """Return the schema of the type "json_schema". Raises ApiError if it is missing."""
        if self.json_schema is None:
            raise ApiError("response_format.json_schema is missing; it must hold the schema", param="response_format")
        return self.json_schema.schema_


class StructuredOutputs(Body):
    """vLLM's structured outputs: exactly one constraint. As in a ResponseFormat, unknown fields are refused."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: Grammar | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None
    json_object: bool | None = None

    disable_any_whitespace: Annotated[bool | None, Refused(NOT_STRUCTURED["disable_any_whitespace"])] = None
    disable_additional_properties: Ignored[bool] = None  # further keys are allowed only by the schema itself
    whitespace_pattern: Annotated[str | None, Refused(NOT_STRUCTURED["whitespace_pattern"])] = None
    structural_tag: Annotated[str | None, Refused(NOT_STRUCTURED["structural_tag"])] = None

    def asked(self) -> dict[str, Any]:
        """Return the fields that are set, by name."""
        given = {name: getattr(self, "json_" if name == "json" else name) for name in STRUCTURES}
        return {name: value for name, value in given.items() if value is not None}


def numbers_of(protocol: str, *, is_checked: bool = False) -> Callable[[type[BodyT]], type[BodyT]]:
    """Return a decorator that adds the numeric fields of SamplingParams that a protocol has to a body.

    is_checked: check their bounds here. Otherwise the chat request that is made of the body does.
    """

    def add(body: type[BodyT]) -> type[BodyT]:
        found: dict[str, Any] = {}
        for theirs, ours in served_in(protocol).items():
            if (bounds := SERVED[ours].http) is None or theirs in body.model_fields:
                continue
            kind: Any = Number if isinstance(bounds[0], float) else int
            if is_checked:
                default = SamplingParams.__dataclass_fields__[ours].default
                found[theirs] = (Annotated[kind, Field(ge=bounds[0], le=bounds[1])] | None, default)
            else:
                found[theirs] = (kind | None, None)
        return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **found)

    return add


@numbers_of(OPENAI, is_checked=True)
class Sampling(Body):
    """The fields shared by completions and chat completions. The second group of fields is vLLM's.

    Temperature, penalties and the like are those of SamplingParams with the same bounds or narrower ones.
    """

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = 1
    logit_bias: Annotated[dict[Name, Bias], Field(max_length=MAX_BIASED)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    stop: StopText | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Ignored[Text] = None

    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = 0
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    include_stop_str_in_output: Off = False
    ignore_eos: Off = False  # the end of a grammar still ends the text: the model did not choose it
    skip_special_tokens: On = True
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    priority: Priority | None = 0
    cache_salt: GivenName | None = None
    use_beam_search: Off = False
    length_penalty: Annotated[Number, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = 1.0
    regex: Grammar | None = None
    grammar: Grammar | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Grammar | None = None
    guided_choice: Choices | None = None
    guided_grammar: Grammar | None = None
    guided_decoding_backend: Annotated[Name | None, Refused(NOT_STRUCTURED["backend"], "auto", "guidance")] = None
    guided_whitespace_pattern: Annotated[str | None, Refused(NOT_STRUCTURED["whitespace_pattern"])] = None
    allowed_token_ids: Annotated[list[Token], Field(min_length=1, max_length=MAX_ALLOWED, fail_fast=True)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    truncate_prompt_tokens: Kept | None = None
    return_token_ids: Off = False
    spaces_between_special_tokens: Annotated[On, WithJsonSchema({"enum": [True, None]})] = True

    # OpenAI fields that clients send: accepted with a value that requests nothing, otherwise refused.
    metadata: Ignored[dict[str, Any]] = None  # notes of the client
    store: Annotated[bool | None, Refused("nothing is stored here")] = None
    service_tier: ServiceTier = None

    @field_validator("logit_bias", mode="after")
    @classmethod
    def check_tokens(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        """Check that each key is a token id as a decimal string: JSON has no integer keys."""
        for token in value or ():
            if not (token.isascii() and token.isdecimal()):
                raise PydanticCustomError("no_token", "{token}", {"token": token})
        return value

    @field_validator("spaces_between_special_tokens", mode="after")
    @classmethod
    def check_spaces(cls, value: bool) -> bool:
        """Refuse any value but the default."""
        if not value:
            raise ValueError("special tokens are written as the tokenizer writes them; leave it out")
        return value

    def sampled(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that are set and not empty, without those that have other types here."""
        given = ((name, getattr(self, name)) for name in SAMPLED if name in self.model_fields_set)
        return {name: value for name, value in given if value not in (None, "", [])}

    def check_together(self) -> None:
        """Raise ApiError for a field that is valid alone, but conflicts with another or has no effect without it."""
        if self.length_penalty not in (None, 1) and not self.use_beam_search:
            message = f"length_penalty is {self.length_penalty:g} without use_beam_search; it has an effect only there"
            raise ApiError(message, param="length_penalty")
        if (field := self.grammar_field()) is not None and self.min_tokens:
            message = f"min_tokens does not go with {field}, which decides where the text ends; leave one of them out"
            raise ApiError(message, param="min_tokens")

    def grammar_field(self) -> str | None:
        """Return the name of the field that requires a grammar, if any. Raises ApiError if several do."""
        return self.structure_field()

    def structure_field(self) -> str | None:
        """Return the name of the field that constrains the text, if any. Raises ApiError if several do."""
        # An empty schema counts: it allows any JSON. Empty strings do not: forms send them for untouched fields.
        given = [name for name in GRAMMAR_FIELDS if (one := getattr(self, name)) or isinstance(one, dict)]
        if self.structured_outputs is not None:
            given.insert(0, "structured_outputs")
        if self.response_format is not None and self.response_format.type != "text":
            given.insert(0, "response_format")
        if len(given) > 1:
            message = f"{' and '.join(given)} were given; a text can follow one of them only"
            raise ApiError(message, param=given[1])
        return given[0] if given else None

    def structure(self) -> StructuredOutputsParams | None:
        """Return the constraint on the text, from whichever field has it.

        Raises ApiError if it is invalid or if several fields have one.
        """
        name, form = self.structure_field(), self.response_format
        if name is None:
            return None
        if name == "structured_outputs" and self.structured_outputs is not None:
            asked = self.structured_outputs.asked()
        elif name != "response_format" or form is None:
            asked = {name.removeprefix("guided_"): getattr(self, name)}
        elif form.type == "json_object":
            asked = {"json_object": True}
        else:
            asked = {"json": form.schema_given()}
        try:
            return StructuredOutputsParams(**asked)
        except RequestError as error:
            raise ApiError(str(error), param=name) from error
