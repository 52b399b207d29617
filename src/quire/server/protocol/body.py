"""What the bodies of all routes have in common: bounds, kinds of fields, and what is said of those not served."""

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
)
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

from quire.request import MAX_PRIORITY

MAX_N = 128  # samples of a prompt, as OpenAI has it
MAX_PROMPTS = 1024  # in one request
MAX_PROMPT = 2**21  # characters or tokens
MAX_STOPS, MAX_STOP_LENGTH = 64, 256  # editors send a word of each kind of line that may follow
MAX_STOP_TOKENS = 256
MAX_TOKEN = 2**31 - 1
MAX_NAME = 256
MAX_MESSAGES = 4096
MAX_GRAMMAR = 2**16
MAX_FIELDS = 100  # of an object; none has as many


def _check_some_are_kept(count: int) -> int:
    if count == 0:
        raise ValueError("it must be at least 1, or -1 for as many tokens as there is room for")
    return count


Token = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
# fail_fast: one error is reported, so a million of them need not be found.
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
Kept = Annotated[int, Field(ge=-1, le=MAX_TOKEN), AfterValidator(_check_some_are_kept)]  # the last tokens of a text
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


# How an item of a history is read: as a dictionary, since there may be very many, and an object of each takes its time.
# What it says of itself besides, such as its id and status, is for other servers, and is left out.
HISTORY = ConfigDict(extra="ignore", strict=True)


def tag_of(value: Any) -> str | None:
    """Which of several kinds of objects a value is, by its "type", as a Discriminator wants it.

    In brackets, since the path of an error has it, where no field is called so.
    """
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else None


@dataclass(frozen=True)
class OrText:
    """Annotates a list of parts for which a text may stand."""

    make: Callable[[str], dict[str, Any]]  # the one part that a text is

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """What is validated: the list."""

        def parts(value: Any) -> Any:
            return [self.make(value)] if isinstance(value, str) else value

        return no_info_before_validator_function(parts, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """What the OpenAPI document says."""
        return {"anyOf": [{"type": "string"}, handler(schema)]}


def neutral(name: str, nothing: dict[str, Any]) -> WithJsonSchema:
    """What the OpenAPI document says of a field that may be neutral, or nothing."""
    return WithJsonSchema({"anyOf": [{"enum": list(NEUTRAL[name])}, nothing]})


def bound_fields(value: Any) -> None:
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise ValueError(f"it has {len(value)} fields, of which most cannot be known here")


class Body(BaseModel):
    """A request's body, or an object in it: no value is bent into shape.

    UnknownFields takes out the fields that it does not have, before a route sees it.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    # Why, by the names of fields that must ask for nothing: be null or empty, or as NEUTRAL has it.
    NOT_SERVED: ClassVar[dict[str, str]] = {}
    # What other protocols call a field that changes the text, and which one it is here.
    ALSO_CALLED: ClassVar[dict[str, str]] = {}
    NOTES: ClassVar[tuple[str, ...]] = ()  # fields that are taken and have no effect

    @model_validator(mode="before")
    @classmethod
    def check_fields(cls, value: Any) -> Any:
        """Without a bound, each unknown field would make an error of its own, for seconds."""
        bound_fields(value)
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
