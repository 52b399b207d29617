"""The body of /v1/completions, and its answer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import NotRequired

from quire.server.http.api_error import Answer, ApiError
from quire.server.protocol.answers import FinishReason, Head, Logprob, PromptLogprobs, Usage
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


class CompletionLogprobs(Answer):
    """A choice's tokens, each with its offset in the text and its candidates."""

    text_offset: list[int]
    token_logprobs: list[Logprob | None]
    tokens: list[str]
    top_logprobs: list[dict[str, Logprob] | None]


class CompletionChoice(Answer):
    """One continuation, or a part of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]


class CompletionHead(Head):
    """The first fields of an answer or a chunk."""

    object: Literal["text_completion"]


class Completion(CompletionHead):
    """The answer of /v1/completions."""

    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(CompletionHead):
    """A chunk of a streamed completion. It has one choice, or none in a last chunk with the usage."""

    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
