"""LLM: the offline interface. Prompts in; texts, embeddings or log-likelihoods out."""

from __future__ import annotations

import gc
import itertools
import threading
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from quire import ops
from quire.chat import ChatTokenizer, find_chat_tokenizer
from quire.config import EngineConfig, engine_config
from quire.embedding import (
    EmbeddingRequestOutput,
    ScoringRequestOutput,
    check_dimensions,
    embedding_output,
    embedding_request,
    similarity,
)
from quire.engine.beam import BeamSearchParams
from quire.engine.beam_driver import BeamDriver
from quire.engine.engine import Engine, build_engine
from quire.engine.interrupts import deferred_interrupts
from quire.errors import QuireError, RequestError, Unsupported, check_integer
from quire.loglikelihood import (
    LoglikelihoodOutput,
    check_pair,
    encode_pair,
    loglikelihood_output,
    loglikelihood_request,
)
from quire.models import check_device, load_model, locate
from quire.models.generation_config import read_default_sampling
from quire.models.lora.fitting import prepare
from quire.progress import progress_bar
from quire.request import MAX_PRIORITY, Constraints, Guide, Request, SamplingParams, StructuredOutputsParams
from quire.sandbox.grammar import Grammars, Spec
from quire.text import (
    BeamSearchOutput,
    RequestOutput,
    TextEngine,
    beam_sequences,
    constraints_for,
    make_requests,
    truncated,
)

# A text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as vLLM has it, both with a "cache_salt" if wanted.
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, Any]]  # a conversation


class Encoded(NamedTuple):
    """A prompt as the engine takes it."""

    text: str | None  # None where token ids were given
    tokens: list[int]
    salt: str  # its cache_salt


class LLM:
    """A model, ready to continue prompts.

    model: a directory or a Hugging Face repository; None is the model that comes with Quire.
    Further options are those of `EngineConfig` and `CacheConfig`, under vLLM's names where it has them: dtype,
    max_model_len, max_num_seqs, max_num_batched_tokens, block_size, seed, ...
    lora: LoRA adapters as PEFT saves them, directories by the names that `generate` takes.

    Raises ConfigError for an unknown or impossible option, ModelError for a checkpoint that cannot be served,
    Unsupported where the device or the attention backend is not to be had.
    """

    def __init__(
        self, model: str | None = None, *, lora: Mapping[str, str | Path] | None = None, **options: Any
    ) -> None:
        if lora:
            options["enable_lora"] = True
        config = engine_config(model=model, **options)
        self.config: EngineConfig = replace(config, device=check_device(config.device))
        self.directory = locate(self.config.model)
        # What SamplingParams have where a request does not say.
        self.default_sampling: Mapping[str, Any] = read_default_sampling(self.config.generation_config, self.directory)
        self.backend: ops.Backend = ops.load(self.config.attention_backend, self.config.device)
        if self.config.prefetch is not None:
            self.backend.set_prefetch(self.config.prefetch)
        if self.config.reproducible and not self.backend.limits.reproducible:  # before weights are read
            raise Unsupported(f"attention backend {self.backend.name!r} does not give the same bits in every batch")
        self.decoder = load_model(self.directory, self.config, self.backend)
        self.tokenizer: ChatTokenizer | None = find_chat_tokenizer(self.directory)
        self.engine: Engine = build_engine(self.decoder, self.backend, self.config)
        self.texts = TextEngine(self.engine, self.tokenizer)  # of all requests, an AsyncLLM's too
        self._grammars: Grammars | None = None  # made at first use
        self._grammars_lock = threading.Lock()
        self._names = itertools.count()
        for name, directory in (lora or {}).items():
            self.load_lora(name, directory)

    def load_lora(self, name: str, directory: str | Path) -> None:
        """Let prompts name a LoRA adapter. The engine must have been built with lora or enable_lora.

        Raises ModelError for an adapter that cannot be read or is of another model, ConfigError where the name is taken
        or a limit (max_loras, max_lora_rank) does not let it in.
        """
        self.engine.load_lora(name, prepare(self.engine.known_loras(), Path(directory)))

    def unload_lora(self, name: str) -> None:
        """Let no further prompt name that adapter. Raises RequestError where there is none."""
        self.engine.unload_lora(name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights, the KV cache and the processes of grammars and templates. What is called later raises.

        Streams that have not ended raise QuireError, like every later call. To close it once more changes nothing.
        """
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
        if self.tokenizer is not None:
            self.tokenizer.close()
        for name in ("engine", "decoder", "backend", "texts"):
            setattr(self, name, Closed())
        gc.collect()  # an engine's parts know one another
        if self.config.device != "cpu":
            torch.cuda.empty_cache()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results are in the prompts' order.

        prompts: one or a list of texts, lists of token ids, or {"prompt_token_ids": [...]}.
        prompt_token_ids: in place of prompts, one or a list of lists of token ids.
        sampling_params: one for all prompts or one each; None is `get_default_sampling_params()`.
        use_tqdm: show a progress bar, if standard error is a terminal.
        priority: one for each prompt, the lower the sooner; for scheduling_policy="priority".
        lora: the name of an adapter for all prompts, or one each; None is the model alone.

        Raises RequestError for a prompt that is invalid or can never fit; then nothing was computed. A prompt whose
        step failed has the finish_reason "error" and says why in its `error`; the others are not affected.
        """
        if (prompts is None) == (prompt_token_ids is None):
            given = "neither" if prompts is None else "both"
            raise RequestError(f"{given} of prompts and prompt_token_ids was given; give one of them")
        listed = cast("Sequence[Prompt]", prompt_token_ids if prompts is None else prompts)
        return self._finished(
            self._requests([self.encoded(prompt) for prompt in _listed(listed)], sampling_params, priority, lora),
            use_tqdm,
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or each of a list; the results are in their order, as those of `generate`.

        messages: each with a role and a content, as OpenAI's clients write them; of parts of a content, texts only.
        chat_template: a template's text, in place of the model's. add_generation_prompt: the prompt ends where the
        model's answer begins. continue_final_message: the model goes on with the last message, in place of that.
        tools: functions that the model may call, as OpenAI's clients describe them; a call is a part of the answer's
        text. chat_template_kwargs: what the template sees besides. The rest is as in `generate`.

        Raises RequestError as `generate` does, and where there is no template or it does not take such messages;
        ModelError where the model's template is none.
        """
        rendering: dict[str, Any] = {
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        is_one = isinstance(messages, Sequence) and len(messages) > 0 and isinstance(messages[0], Mapping)
        listed = cast("Sequence[Messages]", [messages] if is_one else messages)
        encoded = [self.encoded_chat(conversation, **rendering) for conversation in listed]
        return self._finished(self._requests(encoded, sampling_params, priority, lora), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Like `generate`, but yields an output whenever it has grown. It is the same object each time.

        Closing the iterator early takes the prompts back.
        """
        yield from self._run(
            self._requests([self.encoded(prompt) for prompt in _listed(prompts)], sampling_params, priority, lora)
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search each prompt for its most probable continuations; the results are in the prompts' order.

        The sequences are those of transformers' `generate` with as many beams, best first. Beams share the blocks that
        they have in common.

        Raises RequestError for a prompt that is invalid or can never fit; then nothing was computed.
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is a {type(params).__name__}; it must be BeamSearchParams")
        searches = []
        listed = _listed(prompts)
        for prompt, own_lora in zip(listed, _loras(lora, len(listed)), strict=True):
            text, tokens, salt = self.encoded(prompt)
            driver = BeamDriver(self.engine, self.next_name(), tokens, params, salt, own_lora)
            driver.check()
            searches.append((text, tokens, driver))
        takers = {request_id: driver for _, _, driver in searches for request_id in driver.request_ids}
        try:
            for _, _, driver in searches:
                driver.start()
            while not all(driver.done for _, _, driver in searches):
                with deferred_interrupts():  # a search knows its beams only between two steps
                    events = self.engine.step()
                    list(self.texts.process(events))  # those of streams beside this call
                    for event in events:
                        if event.request_id in takers:
                            takers[event.request_id].take(event)
            self._take_back(takers)
        except BaseException:
            self._take_back(takers)
            raise
        return [
            BeamSearchOutput(text, tokens, beam_sequences(tokens, driver.results(), self.tokenizer), driver.error)
            for text, tokens, driver in searches
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding of each prompt: the hidden state of its last token after the final norm, of length 1, in fp32.

        The results are in the prompts' order. prompts, use_tqdm, priority and lora are those of `generate`;
        prompts are computed in the same batches, with the same prefix cache, and no token is drawn. dimensions: keep
        the first so many numbers, for models that were trained so that these say nearly as much; they are normalised
        then.

        Raises RequestError for a prompt that is invalid or can never fit; then nothing was computed. A prompt whose
        step failed has no numbers and says why in its `error`; the others are not affected.
        """
        check_dimensions(dimensions, self.hidden_size)
        listed = _listed(prompts)
        requests: list[tuple[Request, RequestOutput]] = []
        each = zip(listed, _priorities(priority, len(listed)), _loras(lora, len(listed)), strict=True)
        for prompt, own_priority, own_lora in each:
            text, tokens, salt = self.encoded(prompt)
            requests.append(embedding_request(self.next_name(), text, tokens, own_priority, salt, own_lora))
        return [embedding_output(output, dimensions) for output in self._finished(requests, use_tqdm)]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How similar the prompts of each pair are: the cosine of their embeddings, -1..1, as vLLM scores a decoder.

        One prompt of data_1 goes with all of data_2; else there are as many of both. Models that read a pair at once,
        cross-encoders, are not served. use_tqdm and priority are those of `generate`, for each of data_1, then of
        data_2. lora: the name of an adapter that embeds them all.

        Raises RequestError as `embed` does, and for numbers of prompts that make no pairs.
        """
        firsts, seconds = _listed(data_1, "data_1"), _listed(data_2, "data_2")
        if len(firsts) not in (1, len(seconds)):
            raise RequestError(
                f"data_1 has {len(firsts)} prompts and data_2 has {len(seconds)}; give as many, or one as data_1"
            )
        found = self.embed([*firsts, *seconds], use_tqdm=use_tqdm, priority=priority, lora=lora)
        first, second = found[: len(firsts)], found[len(firsts) :]
        return [
            similarity(one, other)
            for one, other in zip(first * len(second) if len(first) == 1 else first, second, strict=True)
        ]

    def loglikelihood(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[LoglikelihoodOutput]:
        """How probable each continuation is after its prompt, one for each; the results are in the prompts' order.

        A text goes with a text and token ids with token ids, which are joined as they are. Of texts, the prompt with
        the continuation after it is taken apart as a whole, and what goes beyond the prompt's own tokens is the
        continuation. White space at the prompt's end counts as the continuation's beginning, since tokens hold it
        there. That is how lm_eval does it; special tokens stand before the prompt, if the tokenizer has any.

        An empty prompt is refused if no special token stands before it, as nothing would stand before the
        continuation's first token. What prompts have in common is computed once, where there is a prefix cache.

        Raises RequestError for a pair that is invalid or can never fit; then nothing was computed. A pair whose step
        failed has no logprobs and says why in its `error`; the others are not affected.
        """
        firsts, seconds = _listed(prompts), _listed(continuations, "continuations")
        if len(firsts) != len(seconds):
            raise RequestError(f"{len(firsts)} prompts were given with {len(seconds)} continuations; give one each")
        requests: list[tuple[Request, RequestOutput]] = []
        starts: list[tuple[str | None, str | None, int]] = []  # of each pair its texts, and the prompt's tokens
        loras = _loras(lora, len(firsts))
        for i, own_priority in enumerate(_priorities(priority, len(firsts))):
            prompt, salt = _parsed(firsts[i])
            continuation, _ = _parsed(seconds[i], "continuation")
            texts: tuple[str | None, str | None] = (None, None)
            if isinstance(prompt, str) and isinstance(continuation, str):
                texts = (prompt, continuation)
                before, after = encode_pair(self._tokenizer_for(prompt), prompt, continuation)
            elif isinstance(prompt, str) or isinstance(continuation, str):
                kinds = ["a text" if isinstance(x, str) else "token ids" for x in (prompt, continuation)]
                raise RequestError(
                    f"prompt {i} is {kinds[0]} and its continuation {kinds[1]}; give both as texts or both as token ids"
                )
            else:
                before, after = prompt, continuation
            check_pair(i, before, after)
            requests.append(loglikelihood_request(self.next_name(), before, after, own_priority, salt, loras[i]))
            starts.append((*texts, len(before)))
        ended = self._finished(requests, use_tqdm)
        return [loglikelihood_output(output, *start) for output, start in zip(ended, starts, strict=True)]

    def get_default_sampling_params(self) -> SamplingParams:
        """How tokens are chosen where a call does not say: as the checkpoint's generation_config.json has it.

        Of that file temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens count. The option
        generation_config names another directory, or "none".
        """
        return SamplingParams(**self.default_sampling)

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's, with `encode`, `decode` and `apply_chat_template`. Raises RequestError where it has none."""
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it takes and gives token ids only")
        return self.tokenizer

    @property
    def hidden_size(self) -> int:
        """Numbers of an embedding."""
        return self.decoder.config.hidden_size

    def reset_prefix_cache(self) -> None:
        """Forget all blocks that later prompts could reuse."""
        self.engine.reset_prefix_cache()

    def _finished(self, requests: list[tuple[Request, RequestOutput]], use_tqdm: bool) -> list[RequestOutput]:
        """Run the requests to their ends: their outputs, in the order in which they were given."""
        outputs: dict[str, RequestOutput] = {}
        names = list(dict.fromkeys(output.request_id for _, output in requests))
        with progress_bar("prompts", len(names)) if use_tqdm else nullcontext(lambda: None) as advance:
            for output in self._run(requests):
                if output.finished:
                    outputs[output.request_id] = output
                    advance()
        return [outputs[name] for name in names]

    def _run(self, requests: list[tuple[Request, RequestOutput]]) -> Iterator[RequestOutput]:
        for request, _ in requests:
            self.engine.check(request)
        names = [request.id for request, _ in requests]
        pending = {output.request_id for _, output in requests}
        ended: deque[RequestOutput] = deque()
        try:
            for request, output in requests:
                self.texts.add(request, output, ended)
            while pending:
                if not self.engine.has_work:
                    raise QuireError("events of this call were lost: an exception interrupted a call beside it")
                grown = self._step()
                yield from (output for output in grown if output.request_id in pending and not output.finished)
                while ended:  # by this step, or by one of another stream
                    output = ended.popleft()
                    pending.remove(output.request_id)
                    yield output
            self._take_back(names)  # what a stop string has just marked to end
        except BaseException:  # an interrupt, too, or the caller lost interest
            self._take_back(names)
            raise

    @deferred_interrupts()
    def _take_back(self, request_ids: Collection[str]) -> None:
        """Let nothing of these requests stay in the engine."""
        for request_id in request_ids:
            self.engine.abort(request_id)
        if any(request_id in self.engine.scheduler.requests for request_id in request_ids):
            self._step()

    @deferred_interrupts()
    def _step(self) -> list[RequestOutput]:
        """One step of the engine: the outputs that have grown, of this call and of others.

        An interrupt waits until they have: what is lost is only that they have grown.
        """
        return list({output.request_id: output for _, output in self.texts.process(self.engine.step())}.values())

    # ------------------------------------------------------------------------------------------- its input

    def _requests(
        self,
        listed: Sequence[Encoded],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        lora: str | Sequence[str | None] | None,
    ) -> list[tuple[Request, RequestOutput]]:
        """A request for each sample of each prompt, with the output that it belongs to."""
        priorities = _priorities(priority, len(listed))
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            each = [sampling_params or self.get_default_sampling_params()] * len(listed)
        else:
            each = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
        if len(each) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts were given with {len(each)} sampling_params; give one for all, or one each"
            )
        requests: list[tuple[Request, RequestOutput]] = []
        constraints: dict[int, Constraints | None] = {}
        loras = _loras(lora, len(listed))
        for prompt, sampling, own_priority, own_lora in zip(listed, each, priorities, loras, strict=True):
            if not isinstance(sampling, SamplingParams):
                raise RequestError(f"sampling_params has a {type(sampling).__name__}; it must be SamplingParams")
            if id(sampling) not in constraints:  # one for all prompts that have it
                constraints[id(sampling)] = constraints_for(sampling, self.tokenizer, self.engine.vocab_size)
            own = (own_priority, own_lora, constraints[id(sampling)])
            output, samples = self._request(self.next_name(), prompt, sampling, *own)
            requests += [(request, output) for request in samples]
        return requests

    def request(
        self, name: str, prompt: Encoded, sampling: SamplingParams | None, priority: int, lora: str | None
    ) -> tuple[RequestOutput, list[Request]]:
        """The output of one prompt, still empty, and the requests of its samples, see `generate`.

        Any thread may ask. Raises RequestError.
        """
        if sampling is None:
            sampling = self.get_default_sampling_params()
        if not isinstance(sampling, SamplingParams):
            raise RequestError(f"sampling_params is a {type(sampling).__name__}; it must be SamplingParams")
        [priority] = _priorities([priority], 1)
        constraints = constraints_for(sampling, self.tokenizer, self.engine.vocab_size)
        return self._request(name, prompt, sampling, priority, lora, constraints)

    def embedding_request(
        self, name: str, prompt: Prompt, priority: int, lora: str | None
    ) -> tuple[RequestOutput, list[Request]]:
        """The output of one prompt, still empty, and its request, see `embed`. Any thread may ask.

        Raises RequestError.
        """
        text, tokens, salt = self.encoded(prompt)
        [priority] = _priorities([priority], 1)
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
        if sampling.stop_strings and self.tokenizer is None:
            raise RequestError(f"stop is {sampling.stop!r}; without a tokenizer only stop_token_ids can end a request")
        longest = self.engine.scheduler.max_model_len
        tokens = truncated(prompt.tokens, sampling.truncate_prompt_tokens, sampling.max_tokens, longest)
        own = (priority, prompt.salt, lora, constraints)
        output, samples = make_requests(name, prompt.text, tokens, sampling, *own)
        if sampling.structured_outputs is not None:
            guide = self._guide(sampling.structured_outputs)
            for request in samples:
                request.guide = guide.copy()
        return output, samples

    def _guide(self, asked: StructuredOutputsParams) -> Guide:
        """What keeps a text to what was asked. Raises RequestError for what cannot be followed."""
        if self.tokenizer is None:
            raise RequestError("structured_outputs are of texts, and this model has no tokenizer")
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer.json(), self.engine.vocab_size, self.engine.eos_token_ids)
            grammars = self._grammars
        return grammars.compile(Spec.of(asked))

    def next_name(self) -> str:
        """A name for a prompt. Any thread may ask."""
        return str(next(self._names))

    def encoded(self, prompt: Prompt) -> Encoded:
        """A prompt as the engine takes it. Any thread may ask. Raises RequestError."""
        given, salt = _parsed(prompt)
        if isinstance(given, str):
            return Encoded(given, self._tokenizer_for(given).encode(given), salt)
        return Encoded(None, given, salt)

    def encoded_chat(self, messages: Sequence[Mapping[str, Any]], **rendering: Any) -> Encoded:
        """A conversation as the engine takes it, see `chat`. Any thread may ask. Raises RequestError."""
        if self.tokenizer is None:
            raise RequestError("a chat is text, and this model has no tokenizer; generate takes token ids")
        text = self.tokenizer.render(messages, **rendering)
        return Encoded(text, self.tokenizer.encode(text, add_special_tokens=False), "")

    def _tokenizer_for(self, text: str) -> ChatTokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{text[:40]!r} is a text, and this model has no tokenizer; give token ids")
        return self.tokenizer


class Closed:
    """What stands in the place of an LLM's parts when it is closed."""

    def __getattr__(self, name: str) -> Any:
        raise QuireError("this LLM is closed and its memory is free; make another one")


def _parsed(prompt: Prompt, what: str = "prompt") -> tuple[str | list[int], str]:
    """The prompt's text or tokens, and its cache_salt. what: its name in errors; only a prompt may be a mapping."""
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


def _priorities(priority: Sequence[int] | None, count: int) -> list[int]:
    """A priority for each of that many prompts."""
    priorities = [0] * count if priority is None else list(priority)
    if len(priorities) != count:
        raise RequestError(f"{count} prompts were given with {len(priorities)} priorities; give one each")
    for i, value in enumerate(priorities):
        check_integer(RequestError, f"priority[{i}]", value, -MAX_PRIORITY, MAX_PRIORITY)
    return priorities


def _loras(lora: str | Sequence[str | None] | None, count: int) -> list[str | None]:
    """An adapter's name, or None, for each of that many prompts."""
    loras = [lora] * count if lora is None or isinstance(lora, str) else list(lora)
    if len(loras) != count:
        raise RequestError(f"{count} prompts were given with {len(loras)} adapters; give one for all, or one each")
    return loras


def _listed(prompts: Prompt | Sequence[Prompt], name: str = "prompts") -> list[Prompt]:
    """The prompts as a list, also where a single one was given: a text, a mapping, or one list of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"{name} is a {type(prompts).__name__}; give a text, a list of token ids, or a list of these"
        )
    if len(prompts) > 0 and isinstance(prompts[0], Integral):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))
