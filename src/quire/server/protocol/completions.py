"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from quire.server.http.api_error import ApiError
from quire.server.protocol.body import MAX_N, MAX_TOKEN, Inputs, On, Text
from quire.server.protocol.sampling import Sampling


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Inputs
    suffix: Text | None = None  # the text that follows the generated text
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = 16
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    add_special_tokens: On = True

    def check_together(self) -> None:
        """Check the shared fields, and those that only a completion has. Raises ApiError."""
        super().check_together()
        if self.suffix and self.echo:
            raise ApiError("echo does not go with suffix: the generated text is between the two", param="echo")
