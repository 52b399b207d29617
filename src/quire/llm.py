"""LLM: the offline interface. Prompts in; texts, embeddings or log-likelihoods out."""

from __future__ import annotations

import gc
import logging
import re
import weakref
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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
from quire.engine.ranks import LeadingRunner
from quire.errors import ConfigError, GroupLost, QuireError, RequestError, Unsupported
from quire.importing import uncollected
from quire.kv_disk import attach_disk, check_disk
from quire.loglikelihood import (
    LoglikelihoodOutput,
    check_pair,
    encode_pair,
    loglikelihood_output,
    loglikelihood_request,
)
from quire.models import check_device, check_parallel, load_model, locate
from quire.models.files import Files, files_of
from quire.models.generation_config import read_default_sampling
from quire.models.hub import locate_description
from quire.models.lora.fitting import prepare
from quire.parallel.group import Group, join
from quire.parallel.worker import agree_on_model, follow
from quire.progress import progress_bar
from quire.prompts import Messages, Prompt, Prompts, each_lora, each_priority, list_prompts, parse_prompt
from quire.request import Request, SamplingParams
from quire.text import (
    BeamSearchOutput,
    RequestOutput,
    TextEngine,
    beam_sequences,
)

log = logging.getLogger("quire")


class LLM:
    """A model, ready to continue prompts.

    model: a directory or a Hugging Face repository; None is the model that comes with Quire.
    Further options are those of `EngineConfig` and `CacheConfig`, under vLLM's names where it has them: dtype,
    max_model_len, max_num_seqs, max_num_batched_tokens, block_size, seed, ...
    lora: LoRA adapters as PEFT saves them, directories by the names that `generate` takes.

    Raises ConfigError for an unknown or impossible option, ModelError for a checkpoint that cannot be served,
    Unsupported where the device or the attention backend is not to be had.
    """

    @uncollected()
    def __init__(
        self, model: str | None = None, *, lora: Mapping[str, str | Path] | None = None, **options: Any
    ) -> None:
        if lora:
            options["enable_lora"] = True
        config = engine_config(model=model, **options)
        self.config: EngineConfig = replace(config, device=check_device(config.device))
        self.files: Files = files_of(locate(self.config.model, self.config.gguf_file))
        self.text_files: Files = self._find_text_files()
        # What SamplingParams have where a request does not say.
        self.default_sampling: Mapping[str, Any] = read_default_sampling(self.config.generation_config, self.files)
        self.backend: ops.Backend = ops.load(self.config.attention_backend, self.config.device)
        self._say_if_slow()
        if self.config.prefetch is not None:
            self.backend.set_prefetch(self.config.prefetch)
        if self.config.reproducible and not self.backend.limits.reproducible:  # before weights are read
            raise Unsupported(f"attention backend {self.backend.name!r} does not give the same bits in every batch")
        check_disk(self.config, self.backend)
        self.tokenizer: ChatTokenizer | None = find_chat_tokenizer(self.text_files)
        self.group: Group | None = None  # of the processes that compute the model together
        self._load()
        attach_disk(self.engine, self.decoder, self.files, self.backend, self.config)
        self.processor = TextEngine(self.engine, self.tokenizer)
        self.prompts = Prompts(self.engine, self.tokenizer, self.default_sampling)
        for name, directory in (lora or {}).items():
            self.load_lora(name, directory)

    def _load(self) -> None:
        """Read the weights and build the engine. The other ranks of a group do so at the same time.

        In a process that a launcher has started as one of these, it ends with the group: this call raises SystemExit.
        """
        config = self.config
        exchange = None
        if config.tensor_parallel_size > 1:
            check_parallel(self.files, config, self.backend)
            self.group = group = join(config, self.backend)
            exchange = group.exchange
            if group.rank > 0:
                follow(group, self.files, config, self.backend)
                raise SystemExit(0)
            weakref.finalize(self, group.close)
        try:
            self.decoder = load_model(self.files, config, self.backend, exchange)
            self.engine: Engine = build_engine(self.decoder, self.backend, config)
            if self.group is not None:
                agree_on_model(self.group, self.decoder, self.files, config, self.backend)
        except BaseException as error:
            if self.group is not None:
                self.group.fail(error)
                self.group.close()
            raise

    def _say_if_slow(self) -> None:
        """Nothing falls back silently: the reference computes every model, and is many times slower."""
        if self.config.attention_backend == "auto" and self.backend.name == "reference":
            fast = "cpu" if self.config.device == "cpu" else "triton"
            reason = ops.unavailable(fast, self.config.device)
            log.warning("the slow backend 'reference' computes, since there is no %r here: %s", fast, reason)

    def _find_text_files(self) -> Files:
        """What the tokenizer and the chat template are read from."""
        if self.config.tokenizer is None:
            return self.files
        found = files_of(locate_description(self.config.tokenizer))
        if not found.has_tokenizer:
            raise ConfigError(f"tokenizer is {self.config.tokenizer!r}; there is no tokenizer in {found.path}")
        return found

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
        if isinstance(self.engine, Closed):
            return
        self.prompts.close()
        if self.group is not None:
            with suppress(GroupLost):
                cast(LeadingRunner, self.engine.runner).end()
            self.group.close()
        self.engine.close()
        if self.tokenizer is not None:
            self.tokenizer.close()
        for name in ("engine", "decoder", "backend", "processor", "prompts"):
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
            self.prompts.requests(
                [self.prompts.encoded(prompt) for prompt in list_prompts(listed)], sampling_params, priority, lora
            ),
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
        encoded = [self.prompts.encoded_chat(conversation, **rendering) for conversation in listed]
        return self._finished(self.prompts.requests(encoded, sampling_params, priority, lora), use_tqdm)

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
            self.prompts.requests(
                [self.prompts.encoded(prompt) for prompt in list_prompts(prompts)], sampling_params, priority, lora
            )
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
        searches: list[tuple[str | None, list[int], BeamDriver]] = []
        listed = list_prompts(prompts)
        for prompt, own_lora in zip(listed, each_lora(lora, len(listed)), strict=True):
            text, tokens, salt = self.prompts.encoded(prompt)
            with _by_place(len(searches), len(listed)):
                driver = BeamDriver(self.engine, self.prompts.next_name(), tokens, params, salt, own_lora)
                driver.check()
            searches.append((text, tokens, driver))
        takers = {request_id: driver for _, _, driver in searches for request_id in driver.request_ids}
        try:
            for _, _, driver in searches:
                driver.start()
            while not all(driver.done for _, _, driver in searches):
                with deferred_interrupts():  # a search knows its beams only between two steps
                    events = self.engine.step()
                    list(self.processor.process(events))  # also those of other streams
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
        listed = list_prompts(prompts)
        requests: list[tuple[Request, RequestOutput]] = []
        each = zip(listed, each_priority(priority, len(listed)), each_lora(lora, len(listed)), strict=True)
        for prompt, own_priority, own_lora in each:
            text, tokens, salt = self.prompts.encoded(prompt)
            requests.append(embedding_request(self.prompts.next_name(), text, tokens, own_priority, salt, own_lora))
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
        firsts, seconds = list_prompts(data_1, "data_1"), list_prompts(data_2, "data_2")
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
        firsts, seconds = list_prompts(prompts), list_prompts(continuations, "continuations")
        if len(firsts) != len(seconds):
            raise RequestError(f"{len(firsts)} prompts were given with {len(seconds)} continuations; give one each")
        requests: list[tuple[Request, RequestOutput]] = []
        starts: list[tuple[str | None, str | None, int]] = []  # of each pair its texts, and the prompt's tokens
        loras = each_lora(lora, len(firsts))
        for i, own_priority in enumerate(each_priority(priority, len(firsts))):
            prompt, salt = parse_prompt(firsts[i])
            continuation, _ = parse_prompt(seconds[i], "continuation")
            texts: tuple[str | None, str | None] = (None, None)
            if isinstance(prompt, str) and isinstance(continuation, str):
                texts = (prompt, continuation)
                before, after = encode_pair(self.prompts.tokenizer_for(prompt), prompt, continuation)
            elif isinstance(prompt, str) or isinstance(continuation, str):
                kinds = ["a text" if isinstance(x, str) else "token ids" for x in (prompt, continuation)]
                raise RequestError(
                    f"prompt {i} is {kinds[0]} and its continuation {kinds[1]}; give both as texts or both as token ids"
                )
            else:
                before, after = prompt, continuation
            check_pair(i, before, after)
            requests.append(
                loglikelihood_request(self.prompts.next_name(), before, after, own_priority, salt, loras[i])
            )
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
        places = {name: i for i, name in enumerate(dict.fromkeys(output.request_id for _, output in requests))}
        for request, output in requests:
            with _by_place(places[output.request_id], len(places)):
                self.engine.check(request)
        names = [request.id for request, _ in requests]
        pending = {output.request_id for _, output in requests}
        ended: deque[RequestOutput] = deque()
        try:
            for request, output in requests:
                self.processor.add(request, output, ended)
            while pending:
                if not self.engine.has_work:
                    raise QuireError("events of this call were lost: an exception interrupted another call")
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
        return list({output.request_id: output for _, output in self.processor.process(self.engine.step())}.values())


class Closed:
    """What stands in the place of an LLM's parts when it is closed."""

    def __getattr__(self, name: str) -> Any:
        raise QuireError("this LLM is closed and its memory is free; make another one")


@contextmanager
def _by_place(place: int, count: int) -> Iterator[None]:
    """Within it, errors name a prompt by its place among the caller's, who does not know the requests' names."""
    try:
        yield
    except RequestError as error:
        who = "the request" if count == 1 else f"the request of prompt {place}"
        raise RequestError(re.sub(r"^(request|beam search) [^ :]+", who, str(error)), error.field) from error
