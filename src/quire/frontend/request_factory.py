"""RequestFactory: the one place where prompts and their options become requests of the engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np

from quire.engine.engine import Engine
from quire.errors import RequestError, check_integer
from quire.frontend.chat_tokenizer import ChatTokenizer
from quire.frontend.embedding import embedding_request
from quire.frontend.images import PromptImages, split_images
from quire.frontend.loglikelihood import loglikelihood_request
from quire.frontend.requests import Made, constraints_for, make_requests, truncated
from quire.frontend.tokenizer import Tokenizer
from quire.lora.request import LoRARequest
from quire.models.lora.slots import Lora
from quire.models.pooling_config import PoolingConfig
from quire.request import MAX_PRIORITY, Constraints, Guide, ImageRows, Retention, SamplingParams
from quire.sandbox.grammar import Grammars, Spec

# A text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as in vLLM, both with an optional "cache_salt".
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, Any]]  # a conversation


class TokenizedPrompt(NamedTuple):
    """A prompt in the engine's form."""

    text: str | None  # None if token ids were given
    tokens: list[int]
    salt: str = ""  # its cache_salt, if it was given with the prompt
    images: ImageRows | None = None


class RequestOptions(NamedTuple):
    """Options of a request in addition to its sampling parameters."""

    priority: int = 0
    cache_salt: str = ""
    lora: str | None = None  # the name of an adapter
    retention: Retention | None = None  # how long blocks of a generation are kept


class RequestFactory:
    """Makes the requests of one model for LLM, AsyncLLM, the server's routes and replicas. It is thread-safe.

    Args:
        tokenizer: the model's tokenizer; None if the model has none.
        vocab_size: number of the model's token ids.
        max_model_len: most tokens of a prompt and its answer together.
        eos_token_ids: token ids that end a text.
        default_sampling: fields of SamplingParams for requests without any.
        pooling: how a text becomes a vector.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Collection[int],
        default_sampling: Mapping[str, Any],
        pooling: PoolingConfig = PoolingConfig(),  # noqa: B008  # frozen
    ) -> None:
        self.pooling = pooling
        # Set by LLM, if the model reads images; else the reason why it does not.
        self.images: PromptImages | str = "this model is served for text alone"
        self.asks = False  # pairs of texts are scored by the model's yes or no; set by LLM
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._default_sampling = default_sampling
        self._grammars: Grammars | None = None  # made at first use
        self._grammars_lock = threading.Lock()
        self._names = itertools.count()

    @classmethod
    def of(cls, engine: Engine, tokenizer: Tokenizer | None, default_sampling: Mapping[str, Any]) -> RequestFactory:
        """Return the factory of an engine's requests."""
        longest = engine.scheduler.max_model_len
        pooling = engine.pooling
        return cls(tokenizer, engine.vocab_size, longest, engine.eos_token_ids, default_sampling, pooling)

    def close(self) -> None:
        """Stop the processes that compile grammars and decode images."""
        with self._grammars_lock:
            if self._grammars is not None:
                self._grammars.close()
        if isinstance(self.images, PromptImages):
            self.images.close()

    def next_name(self) -> str:
        """Return a new name for a prompt."""
        return str(next(self._names))

    # ------------------------------------------------------------------------------------------------- prompts

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Tokenize a prompt. Raises RequestError if it is invalid."""
        sources: list[Any] = []
        if isinstance(prompt, Mapping) and "multi_modal_data" in prompt:
            sources = _sources(prompt["multi_modal_data"])
            prompt = {key: value for key, value in prompt.items() if key != "multi_modal_data"}
        given, salt = parse_prompt(prompt)
        if sources:
            if not isinstance(given, str):
                raise RequestError("multi_modal_data is given with token ids; give the prompt as a text")
            return self.with_images(given, sources)._replace(salt=salt)
        if isinstance(given, str):
            return TokenizedPrompt(given, self.tokenizer_for(given).encode(given), salt)
        return TokenizedPrompt(None, given, salt)

    def with_images(self, text: str, sources: Sequence[Any]) -> TokenizedPrompt:
        """Tokenize a text with images. Raises RequestError if the model reads none, or one is invalid."""
        if isinstance(self.images, str):
            raise RequestError(f"the prompt has an image, and {self.images}")
        tokens, rows = self.images.tokenize(text, sources)
        return TokenizedPrompt(text, tokens, images=rows)

    @property
    def vector_size(self) -> int:
        """The number of values in an embedding."""
        return self.pooling.size

    def tokenize_text(
        self, prompt: Prompt, prompt_name: str | None = None, truncate: int | None = None
    ) -> TokenizedPrompt:
        """Tokenize a text that is embedded or classified, after the model's prompt of that name.

        truncate: the most tokens to keep, -1 as many as fit; None: keep all. Raises RequestError if it is invalid.
        """
        given, salt = parse_prompt(prompt)
        if isinstance(given, str):
            text = self.pooling.prompt(prompt_name) + given
            found = TokenizedPrompt(text, self.tokenizer_for(text).encode(text), salt)
        elif prompt_name is not None:
            raise RequestError(f"prompt_name is {prompt_name!r}; it is for texts, and token ids are used unchanged")
        else:
            found = TokenizedPrompt(None, given, salt)
        return found._replace(tokens=self.kept(found.tokens, truncate))

    def kept(self, tokens: list[int], truncate: int | None, side: Literal["start", "end"] | None = None) -> list[int]:
        """Return the tokens of a text that are embedded. truncate: see `tokenize_text`.

        side: the side at which tokens are left out; None: the end for an encoder, the start for a decoder.
        """
        if truncate is None:
            return tokens
        check_integer(RequestError, "truncate_prompt_tokens", truncate, -1, 2**31 - 1)
        longest = self._max_model_len if truncate == -1 else truncate
        side = side or ("end" if self.pooling.encodes else "start")
        if self._tokenizer is not None:
            return self._tokenizer.cut(tokens, longest, side)
        return tokens[:longest] if side == "end" else tokens[max(0, len(tokens) - longest) :]

    def tokenize_pair(self, first: Prompt, second: Prompt, truncate: int | None = None) -> TokenizedPrompt:
        """Tokenize two texts that a cross-encoder reads together. truncate: see `tokenize_text`."""
        texts = [parse_prompt(one)[0] for one in (first, second)]
        if not isinstance(texts[0], str) or not isinstance(texts[1], str):
            raise RequestError("a pair of token ids is given; this model reads two texts together, so give texts")
        longest = self._max_model_len if truncate == -1 else truncate
        tokenizer = self.tokenizer_for(texts[0])
        tokens = tokenizer.encode_pair(texts[0], texts[1], self.pooling.second_offset, longest)
        return TokenizedPrompt("\n".join(map(str, texts)), tokens)

    def tokenize_chat(self, messages: Messages, **rendering: Any) -> TokenizedPrompt:
        """Render and tokenize a conversation, see `LLM.chat`. Raises RequestError if it is invalid."""
        if not isinstance(self._tokenizer, ChatTokenizer):
            raise RequestError("a chat is text, and this model has no tokenizer; generate takes token ids")
        messages, sources = split_images(messages)
        text = self._tokenizer.render(messages, **rendering)
        if sources:
            return self.with_images(text, sources)
        return TokenizedPrompt(text, self._tokenizer.encode(text, add_special_tokens=False))

    def tokenizer_for(self, text: str) -> Tokenizer:
        """Return the model's tokenizer. Raises RequestError, which quotes the text, if the model has none."""
        if self._tokenizer is None:
            raise RequestError(f"{text[:40]!r} is a text, and this model has no tokenizer; give token ids")
        return self._tokenizer

    def truncate(self, tokens: list[int], count: int | None, max_tokens: int | None) -> list[int]:
        """Return the end of a prompt, see `SamplingParams.truncate_prompt_tokens`, which is `count`."""
        return truncated(tokens, count, max_tokens, self._max_model_len)

    # ------------------------------------------------------------------------------------------------- constraints

    def constraints(self, sampling: SamplingParams) -> Constraints | None:
        """Return the constraints of sampling parameters. All requests with these parameters may share them.

        Raises RequestError for token ids outside the vocabulary, and for bad words without a tokenizer.
        """
        return constraints_for(sampling, self._tokenizer, self._vocab_size)

    def grammars(self) -> Grammars:
        """Return the compiler of grammars. Raises RequestError if the model has no tokenizer."""
        if self._tokenizer is None:
            raise RequestError("structured_outputs constrain text, and this model has no tokenizer")
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer.json(), self._vocab_size, self._eos_token_ids)
            return self._grammars

    # ------------------------------------------------------------------------------------------------- requests

    def generation(
        self,
        name: str,
        prompt: TokenizedPrompt,
        sampling: SamplingParams,
        options: RequestOptions,
        constraints: Constraints | None,
        guide: Guide | None = None,
    ) -> Made:
        """Return the output of a prompt and the requests that continue it.

        Args:
            name: id of the output; those of the requests begin with it.
            prompt: the prompt, already truncated.
            sampling: parameters of sampling.
            options: priority, salt, adapter and retention.
            constraints: the result of `constraints` for these parameters.
            guide: the grammar that the text must follow. Each request gets a copy.
        """
        if prompt.images is not None and sampling.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs is given, and the prompt has images, whose rows are no tokens")
        output, requests = make_requests(name, prompt.text, prompt.tokens, sampling, *options[:3], constraints)
        for request in requests:
            if prompt.images is not None:
                request.images = prompt.images
                ids = np.frombuffer(request.tokens, np.int32)
                ids[prompt.images.positions] = prompt.images.ids
            request.retention = options.retention
            if guide is not None:
                request.guide = guide.copy()
        return output, requests

    def embedding(self, name: str, prompt: TokenizedPrompt, options: RequestOptions) -> Made:
        """Return the output of a prompt and the request for its last hidden state."""
        request, output = embedding_request(name, prompt.text, prompt.tokens, *options[:3])
        return output, [request]

    def loglikelihood(self, name: str, before: list[int], after: list[int], options: RequestOptions) -> Made:
        """Return the output and the request for the logprobs of the tokens `after`, which follow those `before`."""
        request, output = loglikelihood_request(name, before, after, *options[:3])
        return output, [request]

    def generations(
        self,
        prompts: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        lora: str | Sequence[str | None] | None,
    ) -> list[Made]:
        """Return the output and the requests of each prompt, see `LLM.generate`. Raises RequestError."""
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            each = [sampling_params or self.default_sampling()] * len(prompts)
        else:
            each = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
        if len(each) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts were given with {len(each)} sampling_params; give one for all, or one each"
            )
        constraints: dict[int, Constraints | None] = {}
        made: list[Made] = []
        for prompt, sampling, options in zip(prompts, each, each_options(prompts, priority, lora), strict=True):
            check_sampling(sampling)
            if id(sampling) not in constraints:  # shared by all prompts with these parameters
                constraints[id(sampling)] = self.constraints(sampling)
            made.append(self._whole(self.next_name(), prompt, sampling, options, constraints[id(sampling)]))
        return made

    def one_generation(
        self, name: str, prompt: TokenizedPrompt, sampling: SamplingParams | None, priority: int, lora: str | None
    ) -> Made:
        """Return the output of one prompt and its requests, see `AsyncLLM.generate`. Raises RequestError."""
        sampling = self.default_sampling() if sampling is None else sampling
        check_sampling(sampling)
        [options] = each_options([prompt], [priority], lora)
        return self._whole(name, prompt, sampling, options, self.constraints(sampling))

    def default_sampling(self) -> SamplingParams:
        """Return the parameters of requests without any."""
        return SamplingParams(**self._default_sampling)

    def _whole(
        self,
        name: str,
        prompt: TokenizedPrompt,
        sampling: SamplingParams,
        options: RequestOptions,
        constraints: Constraints | None,
    ) -> Made:
        """Truncate a prompt, compile its grammar and return its output and requests."""
        if sampling.stop_strings and self._tokenizer is None:
            raise RequestError(f"stop is {sampling.stop!r}; without a tokenizer only stop_token_ids can end a request")
        tokens = self.truncate(prompt.tokens, sampling.truncate_prompt_tokens, sampling.max_tokens)
        if prompt.images is not None and len(tokens) < len(prompt.tokens):
            raise RequestError(
                f"truncate_prompt_tokens is {sampling.truncate_prompt_tokens}, and the prompt has images"
            )
        asked = sampling.structure
        guide = None if asked is None else self.grammars().compile(Spec.of(asked))
        return self.generation(name, prompt._replace(tokens=tokens), sampling, options, constraints, guide)


def _sources(given: object) -> list[Any]:
    """Return the images of vLLM's multi_modal_data. Raises RequestError for other kinds of data."""
    if not isinstance(given, Mapping) or set(given) != {"image"}:
        raise RequestError(f"multi_modal_data is {str(given)[:80]}; it must be {{'image': an image or a list of them}}")
    image = given["image"]
    sources = list(image) if isinstance(image, (list, tuple)) else [image]
    if not sources or None in sources:
        raise RequestError("multi_modal_data has no image; it must have one, or be left out")
    return sources


def check_sampling(sampling: object) -> None:
    """Raise RequestError if this is not a SamplingParams."""
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"sampling_params is a {type(sampling).__name__}; it must be SamplingParams")


def each_options(
    prompts: Sequence[TokenizedPrompt], priority: Sequence[int] | None, lora: str | Sequence[str | None] | None
) -> list[RequestOptions]:
    """Return the options of each prompt. Raises RequestError for another number of priorities or adapters."""
    each = zip(each_priority(priority, len(prompts)), prompts, each_lora(lora, len(prompts)), strict=True)
    return [RequestOptions(own_priority, prompt.salt, own_lora) for own_priority, prompt, own_lora in each]


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


def named_loras(
    lora: str | Sequence[str | None] | None,
    lora_request: LoRARequest | Sequence[LoRARequest | None],
    loaded: Mapping[str, Lora],
) -> tuple[str | list[str | None], list[LoRARequest]]:
    """Return the names of a call's adapters, and the adapters that are still to be loaded. Raises RequestError."""
    if lora is not None:
        raise RequestError(f"lora is {lora!r} and lora_request is given too; give one of them")
    listed = [lora_request] if isinstance(lora_request, LoRARequest) else list(lora_request)
    missing: dict[str, LoRARequest] = {}
    for one in listed:
        if one is None:
            continue
        if not isinstance(one, LoRARequest):
            raise RequestError(f"lora_request has a {type(one).__name__}; it must be quire.lora.request.LoRARequest")
        known = loaded.get(one.lora_name)
        directory = missing.setdefault(one.lora_name, one).lora_path if known is None else known.directory
        if Path(directory).resolve() != Path(one.lora_path).resolve():
            raise RequestError(
                f"lora_request {one.lora_name!r} has the path {one.lora_path!r}; the adapter of that name is from "
                f"{str(directory)!r}. Choose another name, or unload it first"
            )
    names = [None if one is None else one.lora_name for one in listed]
    return (lora_request.lora_name if isinstance(lora_request, LoRARequest) else names), list(missing.values())


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
