"""Embeddings: a prompt's last hidden state, cut and normalised, and how similar those of two prompts are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import RequestError, check_integer
from quire.request import Request, SamplingParams, Task
from quire.text import RequestOutput, make_requests

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOTHING_DRAWN = SamplingParams(max_tokens=None)
SHORTEST = 1e-12  # a shorter vector has no direction; it is left about as short


@dataclass(frozen=True)
class EmbeddingOutput:
    """An embedding."""

    embedding: list[float]  # of length 1, each number as fp32 holds it; empty where the prompt's step failed


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One prompt and its embedding."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int  # prompt tokens whose K and V were in the prefix cache
    error: str | None = None  # what failed


@dataclass(frozen=True)
class ScoringOutput:
    """How similar two prompts are."""

    score: float  # the cosine of their embeddings, -1..1; NaN where a prompt's step failed


@dataclass(frozen=True)
class ScoringRequestOutput:
    """A pair of prompts and how similar they are."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # of both, one after the other
    num_cached_tokens: int  # of these, tokens whose K and V were in the prefix cache
    error: str | None = None  # what failed


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raise RequestError for more numbers than the model has, or none."""
    if dimensions is not None:
        check_integer(RequestError, "dimensions", dimensions, 1, hidden_size)


def embedding_request(
    name: str,
    text: str | None,
    tokens: list[int],
    priority: int = 0,
    cache_salt: str = "",
    lora: str | None = None,
) -> tuple[Request, RequestOutput]:
    """A request for a prompt's hidden state, and its output, still empty."""
    output, [request] = make_requests(name, text, tokens, NOTHING_DRAWN, priority, cache_salt, lora)
    request.task = Task.EMBED
    return request, output


def normalised(hidden_state: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """The first so many numbers of a hidden state, or all, scaled to length 1: fp32 [dimensions].

    The sum of the squares is formed here, on one thread in a fixed order: a library's norm may split it by threads.
    """
    kept = hidden_state[:dimensions].astype(np.float64)
    return np.asarray(kept / max(float(np.sqrt((kept * kept).sum())), SHORTEST), np.float32)


def embedding_output(output: RequestOutput, dimensions: int | None) -> EmbeddingRequestOutput:
    """What the caller sees of an output that has ended."""
    state = output.hidden_state
    return EmbeddingRequestOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        EmbeddingOutput([] if state is None else normalised(state, dimensions).tolist()),
        output.num_cached_tokens or 0,
        output.outputs[0].error,
    )


def cosine(first: Iterable[float], second: Iterable[float]) -> float:
    """That of two vectors of length 1, -1..1, whatever rounding has left of their length."""
    return max(-1.0, min(1.0, math.fsum(a * b for a, b in zip(first, second, strict=True))))


def similarity(first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """The score of a pair."""
    error = first.error or second.error
    score = math.nan
    if error is None:
        score = cosine(first.outputs.embedding, second.outputs.embedding)
    return ScoringRequestOutput(
        f"{first.request_id}_{second.request_id}",
        ScoringOutput(score),
        first.prompt_token_ids + second.prompt_token_ids,
        first.num_cached_tokens + second.num_cached_tokens,
        error,
    )
