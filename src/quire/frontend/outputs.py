"""Outputs that callers receive: texts, token ids and logprobs of each prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.engine.beam import Hypothesis
from quire.request import (
    PrefixReport,
    TokenLogprobs,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
from quire.frontend.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """One candidate token at a position."""

    logprob: float  # natural logarithm, of the raw logits' softmax
    rank: int  # 1: the most probable token
    decoded_token: str | None  # None without a tokenizer


@dataclass
class CompletionOutput:
    """One sample of a prompt. It grows as tokens arrive."""

    index: int  # index of the sample, 0..n-1
    text: str = ""  # the generated text; empty without a tokenizer
    token_ids: list[int] = field(default_factory=list)  # the generated tokens
    cumulative_logprob: float | None = None  # sum over token_ids; None without logprobs
    logprobs: list[dict[int, Logprob]] | None = None  # for each position: token id -> Logprob
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | str | None = None  # the stop token or string that ended it
    error: str | None = None  # the reason of a failure, if finish_reason is "error"
    # For each version of the weights that chose tokens, in order: the index of its first token, and its name. There are
    # several if the weights were replaced meanwhile. Logprobs of the prompt are of the first one.
    weights_versions: list[tuple[int, str]] = field(default_factory=list, repr=False)
    num_differences: int = field(default=0, repr=False)  # delivered tokens that differed when drawn again
    seed: int | None = None  # key of the prompt's random numbers; as SamplingParams.seed it repeats the samples

    @property
    def finished(self) -> bool:
        """True if the sample has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of a request, with the names of vLLM: `_time` is in seconds since the epoch, `_ts` of time.monotonic()."""

    arrival_time: float  # when it was queued
    queued_ts: float  # the same moment
    first_token_ts: float | None = None  # the first token of any sample; None before it, and if none is generated
    last_token_ts: float | None = None  # the end of the last sample; None before it
    num_generation_tokens: int = 0  # of all samples, at the end
    num_draft_tokens: int = 0  # that were computed for them, at the end
    num_accepted_tokens: int = 0  # draft tokens that are among the samples' tokens

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the arrival to the first token."""
        return None if self.first_token_ts is None else self.first_token_ts - self.queued_ts

    @property
    def first_token_time(self) -> float | None:
        """When the first token was generated."""
        return None if self.first_token_ts is None else self.arrival_time + self.first_token_ts - self.queued_ts

    @property
    def finished_time(self) -> float | None:
        """When the last sample ended."""
        return None if self.last_token_ts is None else self.arrival_time + self.last_token_ts - self.queued_ts


@dataclass
class RequestOutput:
    """One prompt and its samples."""

    request_id: str  # the id of the request
    prompt: str | None  # the prompt's text; None if token ids were given
    prompt_token_ids: list[int]  # the prompt's tokens
    outputs: list[CompletionOutput]  # the samples, in the order of their index
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # for each token; None for the first one
    prefix_report: PrefixReport | None = None  # result of the prefix cache; None until the prompt runs
    # [H], of the prompt's last token, for a request that is embedded.
    hidden_state: NDArray[np.float32] | None = field(default=None, repr=False, compare=False)
    # The digest of the replica that computes it, if that is not this process, see Fingerprint.
    fingerprint: str | None = field(default=None, repr=False, compare=False)
    metrics: RequestMetrics | None = field(default=None, repr=False, compare=False)  # None until it is queued
    num_running: int = field(init=False, repr=False)  # samples that have not ended

    def __post_init__(self) -> None:
        self.num_running = sum(not output.finished for output in self.outputs)

    @property
    def weights_version(self) -> str | None:
        """The version of the weights that compute it, or finished it; None until it is queued."""
        return next((version for sample in self.outputs for _, version in reversed(sample.weights_versions)), None)

    @property
    def is_mixed(self) -> bool:
        """True if the weights were replaced after a sample's first token: `weights_versions` has the places."""
        return any(len(sample.weights_versions) > 1 for sample in self.outputs)

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens whose K and V were in the prefix cache; None until the prompt runs."""
        return None if self.prefix_report is None else self.prefix_report.num_cached

    @property
    def finished(self) -> bool:
        """True if all samples have ended."""
        return self.num_running == 0


@dataclass(frozen=True)
class BeamSearchSequence:
    """One sequence that a beam search found."""

    tokens: list[int]  # the prompt's and the generated tokens
    text: str | None  # the text of all tokens; None without a tokenizer
    cum_logprob: float  # sum over the generated tokens, natural logarithm
    score: float  # cum_logprob / number of generated tokens ** length_penalty
    finish_reason: str  # "stop" or "length"
    logprobs: list[dict[int, Logprob]] | None = None  # of each generated token, if requested


@dataclass(frozen=True)
class BeamSearchOutput:
    """One prompt and the sequences that a beam search found."""

    prompt: str | None  # the prompt's text; None if token ids were given
    prompt_token_ids: list[int]  # the prompt's tokens
    sequences: list[BeamSearchSequence]  # best first
    error: str | None = None  # the reason of a failure; then there may be no sequence
    weights_version: str | None = None  # of the weights that computed it


def candidates(logprobs: TokenLogprobs, decode: Callable[[int], str | None]) -> dict[int, Logprob]:
    """Return the token at a position and the most probable ones: token id -> Logprob. `decode` returns the texts."""
    chosen = {logprobs.token: Logprob(logprobs.logprob, logprobs.rank, decode(logprobs.token))}
    top = {token: Logprob(logprob, rank, decode(token)) for rank, (token, logprob) in enumerate(logprobs.top, start=1)}
    return chosen | top


def beam_logprobs(found: Hypothesis, tokenizer: Tokenizer | None) -> list[dict[int, Logprob]] | None:
    """Return the logprobs of a hypothesis's tokens, or None if they were not requested."""

    def decode(token: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token], skip_special_tokens=False)

    return [candidates(one, decode) for one in found.logprobs] if found.logprobs else None


def beam_sequences(
    prompt: Sequence[int], found: Sequence[Hypothesis], tokenizer: Tokenizer | None
) -> list[BeamSearchSequence]:
    """Return the hypotheses as sequences with prompt and text."""
    return [
        BeamSearchSequence(
            tokens := [*prompt, *hypothesis.tokens],
            None if tokenizer is None else tokenizer.decode(tokens),
            hypothesis.cumulative_logprob,
            hypothesis.score,
            hypothesis.finish_reason.value,
            beam_logprobs(hypothesis, tokenizer),
        )
        for hypothesis in found
    ]
