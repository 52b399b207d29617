"""Beam search over one prompt: selects the beams that stay alive and the hypotheses that are finished.

It works on tokens and scores only; its driver computes the log-probabilities and forks the cache. The rules are those
of transformers' `generate(num_beams=W, num_return_sequences=W, do_sample=False, early_stopping=False)`. The idea is
Lowerre's (The HARPY Speech Recognition System, 1976); the length penalty is a power of the length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from quire.errors import BadValue, RequestError, check_integer, check_number, checked
from quire.request import MAX_SEED, FinishReason, TokenLogprobs

MAX_BEAM_WIDTH = 256  # a step ranks 2 * width**2 candidates or more: one request must not stall the others
MAX_LENGTH_PENALTY = 10.0  # its power of any length stays well inside the range of floats
# vLLM's names that are not fields here, with the reason given to the user.
NOT_SEARCH = MappingProxyType(
    {
        "include_stop_str_in_output": "no stop string ends a beam",
        "temperature": "nothing is drawn in a search",
    }
)


@checked(RequestError, "BeamSearchParams has no field", NOT_SEARCH, {"temperature": 0.0})
@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Parameters of a beam search, with vLLM's names and defaults.

    Args:
        beam_width: live beams at a time, and hypotheses to keep.
        max_tokens: maximum number of new tokens.
        ignore_eos: continue past the model's end-of-sequence tokens.
        length_penalty: a score is cumulative logprob / length**length_penalty: above 0 it favours long hypotheses.
        logprobs: number of most probable tokens to report at each position; 0: the chosen one only.

    Raises:
        RequestError: a field is unknown or its value is invalid. The message names the field.

    Example:
        ```python
        from quire import LLM, BeamSearchParams

        with LLM(num_blocks=128) as llm:
            [output] = llm.beam_search("import", BeamSearchParams(beam_width=3, max_tokens=4))
        print(output.sequences[0].text)
        ```
    """

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_integer(RequestError, "beam_width", self.beam_width, 1, MAX_BEAM_WIDTH)
        check_integer(RequestError, "max_tokens", self.max_tokens, 1)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
        check_number(RequestError, "length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.logprobs is not None:
            check_integer(RequestError, "logprobs", self.logprobs, 0, MAX_SEED)


@dataclass(frozen=True)
class Beam:
    """A continuation of the prompt that may still grow."""

    tokens: tuple[int, ...]  # the generated ones
    cumulative_logprob: float  # natural log, the sum over them
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each of them, if requested


@dataclass(frozen=True)
class Hypothesis:
    """A continuation of the prompt that has ended."""

    tokens: tuple[int, ...]  # the generated ones, including a final end-of-sequence token
    cumulative_logprob: float  # natural log, the sum over them
    score: float  # cumulative_logprob / len(tokens)**length_penalty
    finish_reason: FinishReason  # STOP or LENGTH
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each of the tokens, if requested


class BeamSearch:
    """The search for one prompt: `advance` it with each step's candidates until it is `done`.

    Each step ranks all continuations of all live beams by cumulative logprob. Of the `num_candidates` best ones, those
    that end become hypotheses if they are among the first beam_width, and the first beam_width of the others live on.
    The beam_width hypotheses of the highest score are kept. The search is done at max_tokens, or once that many are
    kept and the best live beam, scored at its current length, does not beat the worst of them.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int, eos: frozenset[int]) -> None:
        """Start with one empty beam.

        Args:
            params: The user's parameters; their max_tokens is ignored.
            max_tokens: Most tokens to generate: the user's limit, or fewer if the engine's longest sequence is shorter.
            eos: The tokens that end a hypothesis, unless params.ignore_eos is set.
        """
        check_integer(RequestError, "max_tokens", max_tokens, 1)
        self.beams = [Beam((), 0.0)]  # best first
        self._width = params.beam_width
        self._num_logprobs = params.logprobs
        self._length_penalty = params.length_penalty
        self._max_tokens = max_tokens
        self._eos = frozenset() if params.ignore_eos else eos
        self._hypotheses: list[Hypothesis] = []  # best first

    @property
    def num_candidates(self) -> int:
        """Number of next tokens per live beam: enough for beam_width to continue even if all EOS tokens rank first."""
        return max(2, 1 + len(self._eos)) * self._width

    @property
    def done(self) -> bool:
        """True if no beam is alive."""
        return not self.beams

    def results(self) -> list[Hypothesis]:
        """Return the hypotheses that have ended so far, best first; at most beam_width."""
        return list(self._hypotheses)

    def advance(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, int]]:
        """Extend the live beams by one token.

        Equal continuations rank by token, then by beam; of equal hypotheses the earlier one ranks first.

        Args:
            candidates: For each live beam, its most probable next tokens with their natural log-probabilities, best
                first: at least `num_candidates`, or all tokens if there are fewer. Those of -inf are skipped.

        Returns:
            The new live beams, best first: the index of the parent among the old ones, and the token. Fewer than
            beam_width if there are no more possible tokens; none when done.

        Raises:
            BadValue: The number of entries differs from that of the live beams, or a log-probability is NaN.
        """
        if len(candidates) != len(self.beams):
            raise BadValue(f"candidates has {len(candidates)} entries; {len(self.beams)} beams are live")
        live: list[tuple[int, int]] = []
        beams: list[Beam] = []
        for rank, (parent, place, total) in enumerate(self._best(candidates)):
            token = candidates[parent][place][0]
            tokens = (*self.beams[parent].tokens, token)
            logprobs = self.beams[parent].logprobs + self._reported(candidates[parent], place)
            if token in self._eos or len(tokens) == self._max_tokens:
                if rank < self._width:
                    reason = FinishReason.STOP if token in self._eos else FinishReason.LENGTH
                    score = self._score(total, len(tokens))
                    self._hypotheses.append(Hypothesis(tokens, total, score, reason, logprobs))
            elif len(beams) < self._width:
                live.append((parent, token))
                beams.append(Beam(tokens, total, logprobs))
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self._hypotheses[self._width :]
        if beams and not self._can_improve(beams[0]):
            live, beams = [], []
        self.beams = beams
        return live

    def _best(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, int, float]]:
        """Return the `num_candidates` best continuations: parent, index in its candidates, cumulative logprob."""
        continuations = []
        for parent, (beam, pairs) in enumerate(zip(self.beams, candidates, strict=True)):
            for place, (token, logprob) in enumerate(pairs):
                if math.isnan(logprob):
                    raise BadValue(f"candidates[{parent}] has NaN as the log-probability of token {token}")
                if logprob > -math.inf:
                    continuations.append((-beam.cumulative_logprob - logprob, token, parent, place))
        best = sorted(continuations)[: self.num_candidates]
        return [(parent, place, -negated) for negated, _, parent, place in best]

    def _reported(self, candidates: Sequence[tuple[int, float]], place: int) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs to report for the candidate at index `place`, if requested."""
        if self._num_logprobs is None:
            return ()
        token, logprob = candidates[place]
        return (TokenLogprobs(token, logprob, place + 1, tuple(candidates[: self._num_logprobs])),)

    def _can_improve(self, best: Beam) -> bool:
        """Return whether the best live beam, at its current score, would be among the results."""
        if len(self._hypotheses) < self._width:
            return True
        return self._score(best.cumulative_logprob, len(best.tokens)) > self._hypotheses[-1].score

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / math.pow(length, self._length_penalty)
