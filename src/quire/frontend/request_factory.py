"""Conversion of callers' prompts and conversations, with their options, into requests of the engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias, cast

from quire.engine.engine import Engine
from quire.errors import RequestError, check_integer
from quire.frontend.chat_tokenizer import ChatTokenizer
from quire.frontend.embedding import embedding_request
from quire.frontend.outputs import RequestOutput
from quire.frontend.requests import constraints_for, make_requests, truncated
from quire.request import MAX_PRIORITY, Constraints, Guide, Request, SamplingParams, StructuredOutputsParams
from quire.sandbox.grammar import Grammars, Spec

# A text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as in vLLM, both with an optional "cache_salt".
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, Any]]  # a conversation


class Encoded(NamedTuple):
    """A prompt in the engine's form."""

    text: str | None  # None if token ids were given
    tokens: list[int]
    salt: str  # its cache_salt


class Prompts:
    """Factory of an engine's requests. It is thread-safe."""

    def __init__(self, engine: Engine, tokenizer: ChatTokenizer | None, default_sampling: Mapping[str, Any]) -> None:
        """Create the factory. `default_sampling` has the fields of SamplingParams for requests without any."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._default_sampling = default_sampling
        self._grammars: Grammars | None = None  # made at first use
        self._grammars_lock = threading.Lock()
        self._names = itertools.count()

    def close(self) -> None:
        """Stop the processes that compile grammars."""
        with self._grammars_lock:
            if self._grammars is not None:
                self._grammars.close()

    def next_name(self) -> str:
        """Return a new name for a prompt."""
        return str(next(self._names))

    def encoded(self, prompt: Prompt) -> Encoded:
        """Tokenize a prompt. Raises RequestError if it is invalid."""
        given, salt = parse_prompt(prompt)
        if isinstance(given, str):
            return Encoded(given, self.tokenizer_for(given).encode(given), salt)
        return Encoded(None, given, salt)

    def encoded_chat(self, messages: Sequence[Mapping[str, Any]], **rendering: Any) -> Encoded:
        """Render and tokenize a conversation, see `LLM.chat`. Raises RequestError if it is invalid."""
        if self._tokenizer is None:
            raise RequestError("a chat is text, and this model has no tokenizer; generate takes token ids")
        text = self._tokenizer.render(messages, **rendering)
        return Encoded(text, self._tokenizer.encode(text, add_special_tokens=False), "")

    def tokenizer_for(self, text: str) -> ChatTokenizer:
        """Return the model's tokenizer. Raises RequestError, which quotes the text, if the model has none."""
        if self._tokenizer is None:
            raise RequestError(f"{text[:40]!r} is a text, and this model has no tokenizer; give token ids")
        return self._tokenizer

    def requests(
        self,
        listed: Sequence[Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        lora: str | Sequence[str | None] | None,
    ) -> list[tuple[Request, RequestOutput]]:
        """Return a request for each sample of each prompt, with the output that it belongs to."""
        priorities = each_priority(priority, len(listed))
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            each = [sampling_params or SamplingParams(**self._default_sampling)] * len(listed)
        else:
            each = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
        if len(each) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts were given with {len(each)} sampling_params; give one for all, or one each"
            )
        requests: list[tuple[Request, RequestOutput]] = []
        constraints: dict[int, Constraints | None] = {}
        loras = each_lora(lora, len(listed))
        for prompt, sampling, own_priority, own_lora in zip(listed, each, priorities, loras, strict=True):
            if id(sampling) not in constraints:  # shared by all prompts with these parameters
                constraints[id(sampling)] = self._constraints(sampling)
            own = (own_priority, own_lora, constraints[id(sampling)])
            output, samples = self._request(self.next_name(), prompt, sampling, *own)
            requests += [(request, output) for request in samples]
        return requests

    def request(
        self, name: str, prompt: Encoded, sampling: SamplingParams | None, priority: int, lora: str | None
    ) -> tuple[RequestOutput, list[Request]]:
        """Return the output of one prompt, still empty, and the requests of its samples, see `LLM.generate`.

        Raises RequestError for an invalid argument.
        """
        if sampling is None:
            sampling = SamplingParams(**self._default_sampling)
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling_params is a {type(sampling).__name__}; it must be SamplingParams")
        [priority] = each_priority([priority], 1)
        constraints = constraints_for(sampling, self._tokenizer, self._engine.vocab_size)
        return self._request(name, prompt, sampling, priority, lora, constraints)

    def embedding_request(
        self, name: str, prompt: Prompt, priority: int, lora: str | None
    ) -> tuple[RequestOutput, list[Request]]:
        """Return the output of one prompt, still empty, and its request, see `LLM.embed`.

        Raises RequestError for an invalid argument.
        """
        text, tokens, salt = self.encoded(prompt)
        [priority] = each_priority([priority], 1)
        request, output = embedding_request(name, text, tokens, priority, salt, lora)
        return output, [request]

    def _request(
        self,
        name: str,
        prompt: Encoded,
        sampling: SamplingParams,
        priority: int,
        lora: str | None,
        constraints: Constraints | None,
    ) -> tuple[RequestOutput, list[Request]]:
        if sampling.stop_strings and self._tokenizer is None:
            raise RequestError(f"stop is {sampling.stop!r}; without a tokenizer only stop_token_ids can end a request")
        longest = self._engine.scheduler.max_model_len
        tokens = truncated(prompt.tokens, sampling.truncate_prompt_tokens, sampling.max_tokens, longest)
        own = (priority, prompt.salt, lora, constraints)
        output, samples = make_requests(name, prompt.text, tokens, sampling, *own)
        if sampling.structured_outputs is not None:
            guide = self._guide(sampling.structured_outputs)
            for request in samples:
                request.guide = guide.copy()
        return output, samples

    def _constraints(self, sampling: SamplingParams) -> Constraints | None:
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling_params has a {type(sampling).__name__}; it must be SamplingParams")
        return constraints_for(sampling, self._tokenizer, self._engine.vocab_size)

    def _guide(self, asked: StructuredOutputsParams) -> Guide:
        """Return the guide that enforces a constraint. Raises RequestError for an unsupported one."""
        if self._tokenizer is None:
            raise RequestError("structured_outputs constrain text, and this model has no tokenizer")
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer.json(), self._engine.vocab_size, self._engine.eos_token_ids)
            grammars = self._grammars
        return grammars.compile(Spec.of(asked))


def parse_prompt(prompt: Prompt, what: str = "prompt") -> tuple[str | list[int], str]:
    """Return a prompt's text or tokens, and its cache_salt.

    `what` is its name in errors. Only a "prompt" may be a mapping. Raises RequestError for an invalid prompt.
    """
    salt = ""
    if isinstance(prompt, Mapping) and what == "prompt":
        salt = prompt.get("cache_salt", "")
        if not isinstance(salt, str):
            raise RequestError(f"cache_salt is {salt!r}; it must be a text")
        keys = set(prompt) - {"cache_salt"}
        if keys == {"prompt_token_ids"}:
            prompt = prompt["prompt_token_ids"]
        elif keys == {"prompt"}:
            prompt = prompt["prompt"]
        else:
            raise RequestError(f"a prompt has the keys {sorted(keys)}; give either 'prompt' or 'prompt_token_ids'")
    if isinstance(prompt, str):
        return prompt, salt
    if not isinstance(prompt, Sequence):
        raise RequestError(f"a {what} is a {type(prompt).__name__}; give a text or a list of token ids")
    for i, token in enumerate(prompt):
        check_integer(RequestError, f"{what} token {i}", token, 0, 2**31 - 1)
    return [int(token) for token in prompt], salt


def each_priority(priority: Sequence[int] | None, count: int) -> list[int]:
    """Return a priority for each of `count` prompts. Raises RequestError if there are not `count` valid ones."""
    priorities = [0] * count if priority is None else list(priority)
    if len(priorities) != count:
        raise RequestError(f"{count} prompts were given with {len(priorities)} priorities; give one each")
    for i, value in enumerate(priorities):
        check_integer(RequestError, f"priority[{i}]", value, -MAX_PRIORITY, MAX_PRIORITY)
    return priorities


def each_lora(lora: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """Return the adapter's name or None for each of `count` prompts. Raises RequestError for another number."""
    loras = [lora] * count if lora is None or isinstance(lora, str) else list(lora)
    if len(loras) != count:
        raise RequestError(f"{count} prompts were given with {len(loras)} adapters; give one for all, or one each")
    return loras


def list_prompts(prompts: Prompt | Sequence[Prompt], name: str = "prompts") -> list[Prompt]:
    """Return prompts as a list, even for a single one: a text, a mapping, or one list of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"{name} is a {type(prompts).__name__}; give a text, a list of token ids, or a list of these"
        )
    if len(prompts) > 0 and isinstance(prompts[0], Integral):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))
