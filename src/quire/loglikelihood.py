"""Log-likelihoods: how probable a continuation is after a prompt, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.errors import RequestError
from quire.request import Request, SamplingParams, Task
from quire.text import RequestOutput, Tokenizer, make_requests

SCORED = SamplingParams(max_tokens=None, prompt_logprobs=0)


@dataclass(frozen=True)
class LoglikelihoodOutput:
    """One continuation and how probable it is after its prompt. Logarithms are natural ones, of the raw logits."""

    request_id: str
    prompt: str | None  # None where token ids were given
    continuation: str | None
    prompt_token_ids: list[int]  # all that stands before the continuation, special tokens included
    token_ids: list[int]  # the continuation's
    token_logprobs: list[float]  # of each of these; empty where the step failed
    ranks: list[int]  # of each, 1: the most probable one; of equally probable ones the lower id comes first
    num_cached_tokens: int  # tokens whose K and V were in the prefix cache
    error: str | None = None  # what failed

    @property
    def cumulative_logprob(self) -> float:
        """The log-likelihood: the sum over the tokens. NaN where the step failed."""
        return math.nan if self.error is not None else math.fsum(self.token_logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most probable one: greedy decoding would have said the same."""
        return self.error is None and all(rank == 1 for rank in self.ranks)


def encode_pair(tokenizer: Tokenizer, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens of two texts, one after the other; see `LLM.loglikelihood`."""
    kept = prompt.rstrip()
    both = tokenizer.encode(prompt + continuation, add_special_tokens=False)
    before = tokenizer.encode(kept, add_special_tokens=False)
    return tokenizer.leading_tokens + before, both[len(before) :]


def check_pair(number: int, before: list[int], after: list[int]) -> None:
    """Raise RequestError, naming the pair, where there is nothing to score or nothing to score it by."""
    if not after:
        raise RequestError(
            f"continuation {number} has no token of its own after prompt {number}: it is empty or becomes one token "
            f"with the prompt's end; cut the text elsewhere, or give token ids"
        )
    if not before:
        raise RequestError(
            f"prompt {number} is empty, and no special token stands before it; the continuation's first token needs "
            f"one before itself, so give token ids that begin with the model's beginning- or end-of-sequence token"
        )


def loglikelihood_request(
    name: str,
    before: list[int],
    after: list[int],
    priority: int = 0,
    cache_salt: str = "",
    lora: str | None = None,
) -> tuple[Request, RequestOutput]:
    """A request for the logprobs of the tokens after others, and its output, still empty."""
    output, [request] = make_requests(name, None, before + after, SCORED, priority, cache_salt, lora)
    request.task = Task.LOGLIKELIHOOD
    request.first_prompt_logprob = len(before) - 1  # of those before nothing is asked, so they may come from the cache
    return request, output


def loglikelihood_output(
    output: RequestOutput, prompt: str | None, continuation: str | None, num_before: int
) -> LoglikelihoodOutput:
    """What the caller sees of an output that has ended. num_before: tokens before the continuation."""
    before, after = output.prompt_token_ids[:num_before], output.prompt_token_ids[num_before:]
    error = output.outputs[0].error
    found = (output.prompt_logprobs or [])[1:]  # without the first token's of all, which has none
    pairs = zip(found, after, strict=True) if error is None else ()
    one_each = [candidates[token] for candidates, token in pairs if candidates is not None]
    return LoglikelihoodOutput(
        output.request_id,
        prompt,
        continuation,
        before,
        after,
        [one.logprob for one in one_each],
        [one.rank for one in one_each],
        output.num_cached_tokens or 0,
        error,
    )
