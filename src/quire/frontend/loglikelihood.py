"""Log-likelihoods of continuations after prompts, token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.errors import RequestError
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests import make_requests
from quire.frontend.tokenizer import Tokenizer
from quire.request import Request, SamplingParams, Task

SCORED = SamplingParams(max_tokens=None, prompt_logprobs=0)


@dataclass(frozen=True)
class LoglikelihoodOutput:
    """The log-likelihood of one continuation. Logarithms are natural, of the raw logits' softmax."""

    request_id: str  # the id of the request
    prompt: str | None  # the prompt's text; None if token ids were given
    continuation: str | None  # the continuation's text; None if token ids were given
    prompt_token_ids: list[int]  # the tokens before the continuation, special tokens included
    token_ids: list[int]  # the continuation's tokens
    token_logprobs: list[float]  # of each of token_ids; empty if the step failed
    ranks: list[int]  # of each of token_ids, 1: the most probable; among equally probable tokens the lower id is first
    num_cached_tokens: int  # tokens whose K and V were in the prefix cache
    error: str | None = None  # the reason of a failure
    weights_version: str | None = None  # of the weights that computed it

    @property
    def cumulative_logprob(self) -> float:
        """The log-likelihood, which is the sum of token_logprobs. NaN if the step failed."""
        return math.nan if self.error is not None else math.fsum(self.token_logprobs)

    @property
    def is_greedy(self) -> bool:
        """True if each token is the most probable one, so that greedy decoding would generate the continuation."""
        return self.error is None and all(rank == 1 for rank in self.ranks)


def encode_pair(tokenizer: Tokenizer, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and of its continuation, see `LLM.loglikelihood`."""
    kept = prompt.rstrip()
    both = tokenizer.encode(prompt + continuation, add_special_tokens=False)
    before = tokenizer.encode(kept, add_special_tokens=False)
    return tokenizer.leading_tokens + before, both[len(before) :]


def check_pair(number: int, before: list[int], after: list[int]) -> None:
    """Raise RequestError, which names the pair, if the continuation or the prompt has no token."""
    if not after:
        raise RequestError(
            f"continuation {number} has no separate token after prompt {number}: it is empty or becomes one token "
            f"with the prompt's end; cut the text elsewhere, or give token ids"
        )
    if not before:
        raise RequestError(
            f"prompt {number} is empty, and no special token precedes it; the continuation's first token needs "
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
    """Return a request for the logprobs of `after` following `before`, and its output, still empty."""
    output, [request] = make_requests(name, None, before + after, SCORED, priority, cache_salt, lora)
    request.task = Task.LOGLIKELIHOOD
    request.first_prompt_logprob = len(before) - 1  # earlier logprobs are not needed, so these tokens may be cached
    return request, output


def loglikelihood_output(
    output: RequestOutput, prompt: str | None, continuation: str | None, num_before: int
) -> LoglikelihoodOutput:
    """Return the caller's form of an output that has ended. `num_before` counts the tokens before the continuation."""
    before, after = output.prompt_token_ids[:num_before], output.prompt_token_ids[num_before:]
    error = output.outputs[0].error
    found = (output.prompt_logprobs or [])[1:]  # the first token has no logprob
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
        output.weights_version,
    )
