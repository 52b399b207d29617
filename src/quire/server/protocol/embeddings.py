"""The body of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quire.server.protocol.body import MAX_TOKEN, Body, Inputs, Name, On, Priority, Text


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
