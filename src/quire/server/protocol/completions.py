"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from quire.server.protocol.body import MAX_N, MAX_TOKEN, Inputs, NoText, On
from quire.server.protocol.sampling import Sampling


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: Inputs
    suffix: NoText | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = 16
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOKEN)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    add_special_tokens: On = True

    NOT_SERVED: ClassVar[dict[str, str]] = Sampling.NOT_SERVED | {
        "suffix": "text cannot be filled in before a suffix: models here only continue"
    }
