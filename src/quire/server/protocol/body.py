"""Shared parts of all request bodies: bounds, field types, and the messages for unsupported fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
    with_config,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function
from typing_extensions import TypedDict

from quire.request import MAX_PRIORITY

MAX_N = 128  # samples of a prompt; OpenAI's limit
MAX_PROMPTS = 1024  # in one request
MAX_PROMPT = 2**21  # characters or tokens
MAX_STOPS, MAX_STOP_LENGTH = 64, 256  # editors send a keyword for each kind of line that may follow
MAX_STOP_TOKENS = 256
MAX_TOKEN = 2**31 - 1
MAX_NAME = 256
MAX_MESSAGES = 4096
MAX_GRAMMAR = 2**16
MAX_FIELDS = 100  # of an object; no object of the API has this many


def _check_some_are_kept(count: int) -> int:
    if count == 0:
        raise ValueError("it must be at least 1, or -1 for as many tokens as there is room for")
    return count


Token = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
# fail_fast: only one error is reported, so there is no need to collect a million of them.
Tokens = Annotated[list[Token], Field(min_length=1, max_length=MAX_PROMPT, fail_fast=True)]
Text = Annotated[str, StringConstraints(max_length=MAX_PROMPT)]
Name = Annotated[str, StringConstraints(max_length=MAX_NAME)]
GivenName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
Role = Annotated[str, StringConstraints(min_length=1, max_length=64)]
# One text, one list of token ids, or several of these.
Inputs = Text | Tokens | Annotated[list[Text | Tokens], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
StopText = Annotated[str, StringConstraints(max_length=MAX_STOP_LENGTH)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Number = Annotated[float, Field(allow_inf_nan=False)]
# The number of last tokens of a text that truncation keeps.
Kept = Annotated[int, Field(ge=-1, le=MAX_TOKEN), AfterValidator(_check_some_are_kept)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKEN)]
Grammar = Annotated[str, StringConstraints(max_length=MAX_GRAMMAR)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
FLAG = WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]})
Off = Annotated[bool, BeforeValidator(lambda value: False if value is None else value), FLAG]
On = Annotated[bool, BeforeValidator(lambda value: True if value is None else value), FLAG]
# The OpenAPI schemas of fields that may only have an empty value. Body.NOT_SERVED has the reasons.
NO_TEXT = {"type": "string", "maxLength": 0}
NO_LIST = {"type": "array", "maxItems": 0}
NO_OBJECT = {"type": "object", "maxProperties": 0}
NO_CHOICE = {"anyOf": [NO_TEXT, NO_OBJECT]}
NoText = Annotated[str, WithJsonSchema(NO_TEXT)]
NoList = Annotated[list[Any], WithJsonSchema(NO_LIST)]
NoObject = Annotated[dict[str, Any], WithJsonSchema(NO_OBJECT)]
NoFlag = Annotated[bool, WithJsonSchema({"const": False})]
# Other values that such a field may have, because they request the default behavior.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "guided_decoding_backend": ("auto", "guidance"),
    "modalities": (["text"],),
    "prompt_cache_options": ({"mode": "implicit"},),
    "prompt_cache_retention": ("in_memory",),
    "service_tier": ("auto", "default"),
    "repeat_last_n": (-1,),
    "speed": ("standard",),
    "tfs_z": (1,),
    "typical_p": (1,),
    "verbosity": ("medium",),
}


@with_config(ConfigDict(extra="ignore", strict=True))
class HistoryItem(TypedDict):
    """An item of a history. A dictionary, because there may be very many and building an object for each is slow.

    Its further fields, such as its id and status, are for other servers and are dropped.
    """


@with_config(ConfigDict(extra="forbid", strict=True))
class StrictItem(TypedDict):
    """An item that has no other fields than those of its class. A dictionary, as a HistoryItem is."""


def tag_of(value: Any) -> str | None:
    """Return the kind of an object, from its "type", for a Discriminator.

    It is in angle brackets: an error's path contains it, and no field has such a name.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else None


@dataclass(frozen=True)
class OrText:
    """Annotation of a list of parts that may also be given as a string."""

    make: Callable[[str], dict[str, Any]]  # makes the only part from the string

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that validates the list."""

        def parts(value: Any) -> Any:
            return [self.make(value)] if isinstance(value, str) else value

        return no_info_before_validator_function(parts, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema for the OpenAPI document."""
        return {"anyOf": [{"type": "string"}, handler(schema)]}


def neutral(name: str, nothing: dict[str, Any]) -> WithJsonSchema:
    """Return the OpenAPI schema of a field that must have a neutral value or match `nothing`."""
    return WithJsonSchema({"anyOf": [{"enum": list(NEUTRAL[name])}, nothing]})


def bound_fields(value: Any) -> None:
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"it has {len(value)} fields, more than any object here can have")


class Body(BaseModel):
    """A request's body, or an object in it. Validation is strict: no value is converted.

    UnknownFields removes fields that the class does not have, before a route sees the body.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    # Unsupported fields and the reasons: their values must be null, empty or listed in NEUTRAL.
    NOT_SERVED: ClassVar[dict[str, str]] = {}
    # Names that other protocols use for a field that changes the text, and the name of the field here.
    ALSO_CALLED: ClassVar[dict[str, str]] = {}
    NOTES: ClassVar[tuple[str, ...]] = ()  # fields that are accepted and have no effect

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, value: Any) -> Any:
        """Bound the number of fields. Otherwise each unknown field would produce a separate error, for seconds."""
        bound_fields(value)
        return value

    @field_validator("*", mode="after")
    @classmethod
    def refuse_what_is_not_served(cls, value: Any, info: Any) -> Any:
        """Refuse an option that cannot be honoured, instead of ignoring it."""
        name = info.field_name
        if value and name in cls.NOT_SERVED and value not in NEUTRAL.get(name, ()):
            raise ValueError(f"{cls.NOT_SERVED[name]}; leave it out")
        return value

    def drop_notes(self) -> None:
        """Reset the fields that have no effect."""
        for name in self.NOTES:
            setattr(self, name, None)
