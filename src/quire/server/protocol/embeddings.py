"""The body of /v1/embeddings, and what the routes that embed have in common."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from quire.server.http.api_error import ApiError
from quire.server.protocol.body import MAX_TOKEN, Body, GivenName, Inputs, Kept, Name, NoText, Off, On, Priority, Text
from quire.server.protocol.chat import Messages, Rendering


class Embedding(Body):
    """What the routes that embed texts have in common. The second part is vLLM's."""

    model: Name | None = None
    user: Text | None = None  # of no consequence

    add_special_tokens: On = True
    truncate_prompt_tokens: Kept | None = None  # -1: what fits
    priority: Priority | None = 0
    cache_salt: GivenName | None = None

    NOTES: ClassVar[tuple[str, ...]] = ("user",)

    def kept(self, tokens: list[int], longest: int) -> list[int]:
        """What of an input's tokens is embedded. longest: what the model serves."""
        count = self.truncate_prompt_tokens
        return tokens if count is None else tokens[-(longest if count == -1 else count) :]


class EmbeddingRequest(Embedding, Rendering):
    """The body of /v1/embeddings: inputs, or a conversation, as vLLM has it."""

    input: Inputs | None = None
    messages: Messages | None = None
    encoding_format: Literal["float", "base64", ""] | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    truncate: Literal["NONE", "START", "END", ""] | None = None  # what is left out of an input that is too long

    add_generation_prompt: Off = False  # no answer is to begin
    input_type: NoText | None = None

    NOT_SERVED: ClassVar[dict[str, str]] = {
        "input_type": "a text is embedded as it is; write what the model wants before queries or documents into it",
    }

    def inputs(self) -> Inputs | None:
        """What is embedded, None where that is the conversation. Raises ApiError unless one of them is given."""
        if (self.input is None) == (self.messages is None):
            what = "is missing" if self.input is None else "goes without messages"
            raise ApiError(f"input {what}; give either input or messages", param="input")
        return self.input

    def kept(self, tokens: list[int], longest: int) -> list[int]:
        """Also what `truncate` leaves."""
        tokens = super().kept(tokens, longest)
        if self.truncate == "END":
            return tokens[:longest]
        return tokens[-longest:] if self.truncate == "START" else tokens
