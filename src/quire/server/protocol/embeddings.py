"""The body of /v1/embeddings, its answer, and the fields shared by the routes that embed texts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quire.server.http.api_error import Answer, ApiError
from quire.server.protocol.answers import SystemFingerprint, Usage
from quire.server.protocol.body import (
    MAX_TOKEN,
    Body,
    GivenName,
    Ignored,
    Inputs,
    Kept,
    Name,
    Off,
    On,
    Priority,
    Refused,
    Text,
)
from quire.server.protocol.chat import Messages, Rendering


class Embedding(Body):
    """The fields shared by the routes that embed texts. The second group of fields is vLLM's."""

    model: Name | None = None
    user: Ignored[Text] = None

    add_special_tokens: On = True
    truncate_prompt_tokens: Kept | None = None  # -1: as many as fit
    priority: Priority | None = 0
    cache_salt: GivenName | None = None

    def cuts(self) -> list[tuple[int, Literal["start", "end"] | None]]:
        """Return the most tokens of an input, -1 as many as fit, and the side that is cut; None: the model's own."""
        return [] if self.truncate_prompt_tokens is None else [(self.truncate_prompt_tokens, None)]


class EmbeddingRequest(Embedding, Rendering):
    """The body of /v1/embeddings: inputs, or a conversation, as in vLLM."""

    input: Inputs | None = None
    prompt_name: Text | None = None  # of a prompt of the checkpoint, which precedes each text
    messages: Messages | None = None
    encoding_format: Literal["float", "base64", ""] | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    truncate: Literal["NONE", "START", "END", ""] | None = None  # the side at which an input that is too long is cut

    add_generation_prompt: Off = False  # by default no answer is begun
    input_type: Annotated[
        str | None, Refused("prompt_name names one of the model's own prompts; else write a prefix into the text")
    ] = None

    def inputs(self) -> Inputs | None:
        """Return the inputs, or None if the conversation is embedded. Raises ApiError unless exactly one is given."""
        if (self.input is None) == (self.messages is None):
            what = "is missing" if self.input is None else "goes without messages"
            raise ApiError(f"input {what}; give either input or messages", param="input")
        return self.input

    def cuts(self) -> list[tuple[int, Literal["start", "end"] | None]]:
        """Return the cuts of an input, also that of `truncate`."""
        sides: dict[str | None, Literal["start", "end"]] = {"START": "start", "END": "end"}
        return super().cuts() + ([(-1, sides[self.truncate])] if self.truncate in sides else [])


class InputVector(Answer):
    """One input's vector, as numbers or as base64 of their bytes: little-endian, in fp32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(Answer):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[InputVector]
    model: str
    usage: Usage
    system_fingerprint: SystemFingerprint
