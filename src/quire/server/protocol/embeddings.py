"""The body of /v1/embeddings, and what the routes that embed have in common."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from quire.server.protocol.body import MAX_TOKEN, Body, Inputs, Name, On, Priority, Text


class Embedding(Body):
    """What the routes that embed texts have in common. The second part is vLLM's."""

    model: Name | None = None
    user: Text | None = None  # of no consequence

    add_special_tokens: On = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKEN)] | None = None  # the last ones; -1: what fits
    priority: Priority | None = 0
    cache_salt: Name | None = None

    NOTES: ClassVar[tuple[str, ...]] = ("user",)


class EmbeddingRequest(Embedding):
    """The body of /v1/embeddings."""

    input: Inputs
    encoding_format: Literal["float", "base64", ""] | None = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
