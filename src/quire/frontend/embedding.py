"""Embeddings: a prompt's last hidden state, truncated and normalised, and the similarity of two prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.errors import RequestError, check_integer
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests import make_requests
from quire.models.pooling_config import PoolingConfig
from quire.request import Request, SamplingParams, Task

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOTHING_DRAWN = SamplingParams(max_tokens=None)
SHORTEST = 1e-12  # a shorter vector has no direction; it stays about as short


@dataclass(frozen=True)
class EmbeddingOutput:
    """An embedding."""

    # [dimensions], of Euclidean length 1 unless the checkpoint's files do without, fp32; empty if the step failed.
    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One prompt and its embedding."""

    request_id: str  # the id of the request
    prompt: str | None  # the prompt's text; None if token ids were given
    prompt_token_ids: list[int]  # the prompt's tokens
    outputs: EmbeddingOutput  # the embedding
    num_cached_tokens: int  # prompt tokens whose K and V were in the prefix cache
    error: str | None = None  # the reason of a failure
    weights_version: str | None = None  # of the weights that computed it


@dataclass(frozen=True, eq=False)
class PoolingOutput:
    """A pooled hidden state."""

    data: torch.Tensor  # fp32 [dimensions], of Euclidean length 1; empty if the prompt's step failed


@dataclass(frozen=True)
class PoolingRequestOutput:
    """One prompt and its pooled hidden state."""

    request_id: str  # the id of the request
    outputs: PoolingOutput  # the embedding
    prompt_token_ids: list[int]  # the prompt's tokens
    num_cached_tokens: int  # prompt tokens whose K and V were in the prefix cache
    finished: bool = True  # always True
    error: str | None = None  # the reason of a failure
    weights_version: str | None = None  # of the weights that computed it


@dataclass(frozen=True)
class ClassificationOutput:
    """A classifier's answer."""

    probs: list[float]  # [labels], the scores of all labels; empty if the prompt's step failed
    label: str | None = None  # the label with the highest score; None if there is one label, or the step failed

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """One prompt and a classifier's answer."""

    request_id: str  # the id of the request
    prompt: str | None  # the prompt's text; None if token ids were given
    prompt_token_ids: list[int]  # the prompt's tokens
    outputs: ClassificationOutput  # the answer
    num_cached_tokens: int = 0  # tokens whose K and V were in the prefix cache
    error: str | None = None  # the reason of a failure
    weights_version: str | None = None  # of the weights that computed it


@dataclass(frozen=True)
class RankedDocument:
    """A document and its score for a query."""

    index: int  # the document's place in the caller's list
    score: float  # see `LLM.score`; NaN if its step failed
    document: str | Sequence[int] | Mapping[str, Any]
    error: str | None = None  # the reason of a failure
    weights_version: str | None = None  # of the weights that computed it


@dataclass(frozen=True)
class ScoringOutput:
    """The score of two prompts."""

    # The cosine of their embeddings, -1..1, or a cross-encoder's score; NaN if a prompt's step failed.
    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """A pair of prompts and their similarity."""

    request_id: str  # the ids of both requests, joined by "_"
    outputs: ScoringOutput  # the score
    prompt_token_ids: list[int]  # the tokens of the first prompt, then of the second one
    num_cached_tokens: int  # tokens of both whose K and V were in the prefix cache
    error: str | None = None  # the reason of a failure
    weights_version: str | None = None  # of the weights that computed it


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raise RequestError unless `dimensions` is in 1..hidden_size or absent."""
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
    """Return a request for a prompt's hidden state, and its output, still empty."""
    output, [request] = make_requests(name, text, tokens, NOTHING_DRAWN, priority, cache_salt, lora)
    request.task = Task.EMBED
    return request, output


def normalised(hidden_state: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first `dimensions` numbers of a hidden state, or all, scaled to length 1: fp32 [dimensions].

    The sum of squares is computed here, on one thread in a fixed order, since a library's norm may split it by threads.
    """
    kept = hidden_state[:dimensions].astype(np.float64)
    return np.asarray(kept / max(float(np.sqrt((kept * kept).sum())), SHORTEST), np.float32)


def vector_of(hidden_state: NDArray[np.float32], dimensions: int | None, pooling: PoolingConfig) -> NDArray[np.float32]:
    """Return the first `dimensions` numbers of a vector, or all, of length 1 if the model's are: fp32 [dimensions]."""
    return normalised(hidden_state, dimensions) if pooling.normalized else hidden_state[:dimensions]


def scores_of(logits: NDArray[np.float32], activation: str) -> list[float]:
    """Return the scores of a classifier's logits."""
    values = logits.astype(np.float64)
    if activation == "softmax":
        powers = np.exp(values - values.max())
        values = powers / powers.sum()
    elif activation == "sigmoid":
        values = 1 / (1 + np.exp(-values.clip(-700, 700)))
    return [float(value) for value in values.astype(np.float32)]


def classification_output(output: RequestOutput, pooling: PoolingConfig) -> ClassificationRequestOutput:
    """Return the caller's form of a classifier's output that has ended."""
    ends, state = (output.outputs[0].error, output.weights_version), output.hidden_state
    found = ClassificationOutput([])
    if state is not None:
        probs = scores_of(state, pooling.activation)
        label = pooling.labels[probs.index(max(probs))] if len(probs) > 1 else None
        found = ClassificationOutput(probs, label)
    tokens, num_cached = output.prompt_token_ids, output.num_cached_tokens or 0
    return ClassificationRequestOutput(output.request_id, output.prompt, tokens, found, num_cached, *ends)


def pair_output(output: RequestOutput, pooling: PoolingConfig) -> ScoringRequestOutput:
    """Return the caller's form of a cross-encoder's output that has ended."""
    [score] = classification_output(output, pooling).outputs.probs or [math.nan]
    tokens, num_cached = output.prompt_token_ids, output.num_cached_tokens or 0
    ends = output.outputs[0].error, output.weights_version
    return ScoringRequestOutput(output.request_id, ScoringOutput(score), tokens, num_cached, *ends)


def ranked(documents: Sequence[Any], scored: Sequence[ScoringRequestOutput], top_n: int | None) -> list[RankedDocument]:
    """Return the best documents, best first; equal ones keep their order, and failed ones are last."""
    made = [
        RankedDocument(i, one.outputs.score, documents[i], one.error, one.weights_version)
        for i, one in enumerate(scored)
    ]
    return sorted(made, key=lambda one: math.inf if math.isnan(one.score) else -one.score)[:top_n]


def embedding_output(output: RequestOutput, dimensions: int | None, pooling: PoolingConfig) -> EmbeddingRequestOutput:
    """Return the caller's form of an output that has ended."""
    state = output.hidden_state
    return EmbeddingRequestOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        EmbeddingOutput([] if state is None else vector_of(state, dimensions, pooling).tolist()),
        output.num_cached_tokens or 0,
        output.outputs[0].error,
        output.weights_version,
    )


def pooling_output(output: RequestOutput, pooling: PoolingConfig) -> PoolingRequestOutput:
    """Return the form of `LLM.encode` of an output that has ended."""
    found = embedding_output(output, None, pooling)
    values = classification_output(output, pooling).outputs.probs if pooling.labels else found.outputs.embedding
    data = torch.tensor(values, dtype=torch.float32)
    own = found.prompt_token_ids, found.num_cached_tokens
    ended = PoolingRequestOutput(found.request_id, PoolingOutput(data), *own, error=found.error)
    return replace(ended, weights_version=found.weights_version)


def cosine(first: Iterable[float], second: Iterable[float]) -> float:
    """Return the cosine of two vectors of length 1, clamped to -1..1 since rounding changes their length."""
    return max(-1.0, min(1.0, math.fsum(a * b for a, b in zip(first, second, strict=True))))


def similarity(first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """Return the score of a pair of embeddings."""
    error = first.error or second.error
    versions = dict.fromkeys((first.weights_version, second.weights_version))
    score = math.nan
    if error is None:
        score = cosine(first.outputs.embedding, second.outputs.embedding)
    return ScoringRequestOutput(
        f"{first.request_id}_{second.request_id}",
        ScoringOutput(score),
        first.prompt_token_ids + second.prompt_token_ids,
        first.num_cached_tokens + second.num_cached_tokens,
        error,
        first.weights_version if len(versions) == 1 else None,  # the weights were replaced between the two
    )
