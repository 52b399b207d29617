"""Shared parts of all answers. Routes build these dictionaries, and the OpenAPI document describes them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema
from typing_extensions import NotRequired

from quire.server.http.api_error import Answer

LOWEST_LOGPROB = -9999.0  # replaces numbers that JSON does not have, as in vLLM
FINGERPRINT_SIZE = 10  # hexadecimal digits of a system_fingerprint
Logprob = Annotated[
    float,
    Field(
        ge=LOWEST_LOGPROB,
        description=f"A natural logarithm; {LOWEST_LOGPROB} replaces lower values and NaN",
    ),
]
SystemFingerprint = Annotated[
    str | None,
    Field(
        pattern=f"^fp_[0-9a-f]{{{FINGERPRINT_SIZE}}}$",
        description="Identifies the system that computed the answer: weights, configuration, tokenizer, template, "
        "versions and arithmetic. The same for all replicas that return the same bits; null if unknown",
    ),
]
# A request that fails is answered with an error.
FinishReason = Annotated[str, WithJsonSchema({"enum": ["stop", "length"], "type": "string"})]


class PromptDetails(Answer):
    """Prompt tokens that were found in the cache."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Generated tokens that are reasoning."""

    reasoning_tokens: int


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: NotRequired[CompletionDetails]  # of reasoning models


class Head(Answer):
    """The first fields of a completion, of a chat completion, and of their chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: SystemFingerprint


class PromptLogprob(Answer):
    """A candidate at a position of the prompt."""

    logprob: Logprob
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None  # by token id


class TopLogprob(Answer):
    """A candidate token."""

    token: str
    logprob: Logprob
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token, with the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class Model(Answer):
    """A model that is served, by one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None  # of an adapter
    max_model_len: int


class Models(Answer):
    """The answer of /v1/models."""

    object: Literal["list"]
    data: list[Model]


class Version(Answer):
    """The answer of /version."""

    version: str
