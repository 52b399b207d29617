"""Shared parts of all request bodies: bounds, field types, and the messages for unsupported fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

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
    model_validator,
    with_config,
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function, no_info_before_validator_function
from typing_extensions import TypedDict

from quire.request import MAX_PRIORITY

MAX_N = 128  # samples of a prompt; OpenAI's limit
MAX_PROMPTS = 1024  # in one request
MAX_PROMPT = 2**21  # characters or tokens
MAX_IMAGE = 45 * 2**20  # characters of base64, for the bytes that are decoded at most
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
ImageData = Annotated[str, StringConstraints(max_length=MAX_IMAGE)]
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
IGNORED = "ignored"  # marks a field that is accepted, since clients send it, and has no effect
T = TypeVar("T")
Ignored = Annotated[T | None, IGNORED]
# The OpenAPI schemas of empty values, by type.
EMPTY: dict[str | None, dict[str, Any]] = {
    "string": {"type": "string", "maxLength": 0},
    "array": {"type": "array", "maxItems": 0},
    "object": {"type": "object", "maxProperties": 0},
    "boolean": {"const": False},
    "integer": {"const": 0},
    "number": {"const": 0},
    "null": {"type": "null"},
}


class Refused:
    """Annotation of an unsupported field: an option that cannot be honoured is refused, instead of ignored.

    Its value must be null, empty, or neutral: one that requests the default behavior.
    """

    def __init__(self, why: str, *neutral: Any, refuses_empty: bool = False) -> None:
        self.why = why
        self.neutral = neutral
        self._refuses_empty = refuses_empty

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that validates the field."""

        def check(value: Any) -> Any:
            if (value or (self._refuses_empty and value is not None)) and value not in self.neutral:
                raise ValueError(f"{self.why}; leave it out")
            return value

        return no_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema for the OpenAPI document."""
        found = handler(schema)
        neutral = [{"enum": list(self.neutral)}] if self.neutral else []
        empty = (EMPTY.get(one.get("type"), one) for one in found.get("anyOf", [found]))
        return {"anyOf": [*neutral, *([EMPTY["null"]] if self._refuses_empty else empty)]}


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


def bound_fields(value: Any) -> None:
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"it has {len(value)} fields, more than any object here can have")


class Body(BaseModel):
    """A request's body, or an object in it. Validation is strict: no value is converted.

    UnknownFields removes fields that the class does not have, before a route sees the body.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    # Names that other protocols use for a field that changes the text, and the name of the field here.
    ALSO_CALLED: ClassVar[dict[str, str]] = {}
    IGNORED: ClassVar[tuple[str, ...]] = ()  # fields without effect
    REFUSED: ClassVar[Mapping[str, Refused]] = {}

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, value: Any) -> Any:
        """Bound the number of fields. Otherwise each unknown field would produce a separate error, for seconds."""
        bound_fields(value)
        return value

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        marks = [(name, mark) for name, one in cls.model_fields.items() for mark in one.metadata]
        cls.IGNORED = tuple(name for name, mark in marks if mark is IGNORED)
        cls.REFUSED = {name: mark for name, mark in marks if isinstance(mark, Refused)}

    def drop_ignored(self) -> None:
        """Reset the fields that have no effect."""
        for name in self.IGNORED:
            setattr(self, name, None)
