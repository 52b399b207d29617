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

    def kept(self, tokens: list[int], longest: int) -> list[int]:
        """Return the tokens of an input that are embedded. `longest` is the model's maximum length."""
        count = self.truncate_prompt_tokens
        return tokens if count is None else tokens[-(longest if count == -1 else count) :]


class EmbeddingRequest(Embedding, Rendering):
    """The body of /v1/embeddings: inputs, or a conversation, as in vLLM."""

    input: Inputs | None = None
    messages: Messages | None = None
    encoding_format: Literal["float", "base64", ""] | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    truncate: Literal["NONE", "START", "END", ""] | None = None  # the side at which an input that is too long is cut

    add_generation_prompt: Off = False  # by default no answer is begun
    input_type: Annotated[
        str | None, Refused("a text is embedded unchanged; write the model's prefix for queries or documents into it")
    ] = None

    def inputs(self) -> Inputs | None:
        """Return the inputs, or None if the conversation is embedded. Raises ApiError unless exactly one is given."""
        if (self.input is None) == (self.messages is None):
            what = "is missing" if self.input is None else "goes without messages"
            raise ApiError(f"input {what}; give either input or messages", param="input")
        return self.input

    def kept(self, tokens: list[int], longest: int) -> list[int]:
        """Return the tokens of an input that are embedded, also after `truncate`."""
        tokens = super().kept(tokens, longest)
        if self.truncate == "END":
            return tokens[:longest]
        return tokens[-longest:] if self.truncate == "START" else tokens


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
