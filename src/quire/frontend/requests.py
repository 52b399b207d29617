"""Requests of the engine from token ids. `RequestFactory` calls these functions for all interfaces."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TypeAlias

from quire.engine.constraints import constraints_of
from quire.errors import RequestError
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.tokenizer import Tokenizer
from quire.request import MAX_SEED, Constraints, Request, SampleGroup, SamplingParams

Made: TypeAlias = tuple[RequestOutput, list[Request]]  # a prompt's output, still empty, and the requests of its samples


def bad_sequences(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, alone and after a space. Raises RequestError without a tokenizer."""
    if not words:
        return ()
    if tokenizer is None:
        raise RequestError("bad_words are texts, and this model has no tokenizer; logit_bias takes tokens", "bad_words")
    written = (lead + word.lstrip() for word in words for lead in ("", " "))
    found = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in written)
    return tuple(dict.fromkeys(tokens for tokens in found if tokens))


def constraints_for(sampling: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> Constraints | None:
    """Return the constraints of sampling parameters, which all their requests may share. None: every token is allowed.

    Raises RequestError for token ids outside the vocabulary, and for bad words without a tokenizer.
    """
    return constraints_of(sampling, bad_sequences(sampling.bad_words or (), tokenizer), vocab_size)


def truncated(tokens: list[int], count: int | None, max_tokens: int | None, max_model_len: int) -> list[int]:
    """Return the prompt's last tokens, see SamplingParams.truncate_prompt_tokens.

    `max_model_len` is the limit of prompt and answer together, in tokens.
    """
    if count is None:
        return tokens
    return tokens[-(max(1, max_model_len - (max_tokens or 1)) if count == -1 else count) :]


def seed_of(name: str) -> int:
    """Return the seed of a request without one: always the same for the same name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8, person=b"quire seed").digest(), "little") & MAX_SEED


def make_requests(
    name: str,
    text: str | None,
    tokens: list[int],
    sampling: SamplingParams,
    priority: int = 0,
    cache_salt: str = "",
    lora: str | None = None,
    constraints: Constraints | None = None,
) -> Made:
    """Return a prompt's output, still empty, and the requests of its samples.

    `constraints` is the result of `constraints_for`.
    """
    output = RequestOutput(name, text, tokens, [CompletionOutput(i) for i in range(sampling.n)])
    group = SampleGroup() if sampling.n > 1 else None
    prompt = array("i", tokens)
    requests = []
    other = sampling if sampling.prompt_logprobs is None else replace(sampling, prompt_logprobs=None)
    for i in range(sampling.n):
        own = sampling if i == 0 else other  # prompt_logprobs are reported once
        request = Request(f"{name}-{i}", prompt[:], len(prompt), own, i, priority, cache_salt, group, lora=lora)
        request.constraints = constraints
        requests.append(request)
    if group is not None:
        group.members += requests
    return output, requests
