"""LLM: the offline interface, from prompts to texts, embeddings or log-likelihoods."""

from __future__ import annotations

import gc
import logging
import re
import time
import weakref
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from quire import ops
from quire.config import EMBEDDED_NAME, EngineConfig, describes_options, engine_config, takes_options
from quire.engine.beam import BeamSearchParams
from quire.engine.beam_driver import BeamDriver
from quire.engine.engine import Engine, build_engine
from quire.engine.interrupts import deferred_interrupts
from quire.engine.ranks import end
from quire.errors import ConfigError, GroupLost, QuireError, RequestError, Unsupported
from quire.frontend.chat_tokenizer import ChatTokenizer, find_chat_tokenizer
from quire.frontend.disk_cache import attach_disk, check_disk
from quire.frontend.draft_model import find_draft_model, load_draft_model
from quire.frontend.embedding import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RankedDocument,
    ScoringRequestOutput,
    pooling_output,
)
from quire.frontend.images import PromptImages
from quire.frontend.loglikelihood import LoglikelihoodOutput, check_pair, encode_pair, loglikelihood_output
from quire.frontend.metric_values import Metric, read_families
from quire.frontend.model_fingerprint import receipts_fingerprint
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import BeamSearchOutput, RequestOutput, beam_sequences
from quire.frontend.pooled import Call, Pooled
from quire.frontend.receipts import Receipts
from quire.frontend.replacing import load_dropped, load_new, sleep, use_new, wake_up
from quire.frontend.request_factory import (
    Messages,
    Prompt,
    RequestFactory,
    RequestOptions,
    each_lora,
    each_priority,
    list_prompts,
    named_loras,
    parse_prompt,
)
from quire.frontend.requests import Made
from quire.frontend.yes_no import is_named_reranker
from quire.importing import uncollected
from quire.lora.request import LoRARequest
from quire.models import check_device, check_parallel, find_files, load_images, load_model
from quire.models.files import Files, files_of
from quire.models.generation_config import read_default_sampling
from quire.models.hub import locate_description
from quire.models.lora.fitting import prepare
from quire.models.model import Model
from quire.models.replaced import NewWeights
from quire.parallel.group import ProcessGroup, join
from quire.parallel.worker import agree_on_model, follow
from quire.progress import progress_bar
from quire.request import Event, RequestOutputKind, SamplingParams

if TYPE_CHECKING:  # only with disable_log_stats=False
    from quire.frontend.clocks import Clocks
    from quire.frontend.metrics import Metrics

log = logging.getLogger("quire")
T = TypeVar("T")


@describes_options
class LLM:
    """A loaded model with its engine, tokenizer and KV cache.

    Args:
        model: a directory, a GGUF file, or the name of a Hugging Face repository; None is the model that comes with
            Quire.
        lora: LoRA adapters in PEFT's format: their directories, by the names that `generate` takes.
        **options: fields of `EngineConfig` and `CacheConfig`, with vLLM's names where it has them. Other arguments of
            vLLM's are accepted if they ask for existing behaviour; docs/coming-from-vllm.md lists them. With
            disable_log_stats=False, requests are counted for `get_metrics`.

    Raises:
        ConfigError: an option is unknown, invalid, or cannot be satisfied.
        ModelError: the checkpoint or an adapter cannot be found or read.
        Unsupported: the device, the attention backend or the model is not supported.

    Example:
        ```python
        from quire import LLM, SamplingParams

        with LLM(num_blocks=128) as llm:
            [output] = llm.generate("def fibonacci(", SamplingParams(temperature=0.0))
            print(output.outputs[0].text)
        ```
    """

    @takes_options
    @uncollected()
    def __init__(
        self, model: str | None = None, *, lora: Mapping[str, str | Path] | None = None, **options: Any
    ) -> None:
        if lora:
            options["enable_lora"] = True
        config = engine_config(model=model, **options)
        device = check_device(config.device)
        # Each rank of a group gets its own GPU later.
        self.config: EngineConfig = config if config.tensor_parallel_size > 1 else replace(config, device=device)
        # First: a wrong path must not cost the time to load a model.
        self.receipts: Receipts | None = None if self.config.receipts is None else Receipts(self.config.receipts)
        self.files: Files = find_files(self.config)
        self.text_files: Files = self._find_text_files()
        # Fields of SamplingParams for requests without any.
        self.default_sampling: Mapping[str, Any] = read_default_sampling(self.config.generation_config, self.files)
        self.backend: ops.Backend = ops.load(self.config.attention_backend, self.config.device)
        self._say_if_slow()
        if self.config.prefetch is not None:
            self.backend.set_prefetch(self.config.prefetch)
        if self.config.reproducible and not self.backend.limits.reproducible:  # before weights are read
            raise Unsupported(f"attention backend {self.backend.name!r} does not give the same bits in every batch")
        check_disk(self.config, self.backend)
        self.tokenizer: ChatTokenizer | None = find_chat_tokenizer(self.text_files)
        self.group: ProcessGroup | None = None  # the processes that compute the model together
        self._load()
        attach_disk(self.engine, self.decoder, self.files, self.backend, self.config)
        self.num_replacements = 0  # of the weights
        self.processor = OutputProcessor(self.engine, self.tokenizer, self.receipts)
        if self.receipts is not None:
            self.receipts.fingerprint = receipts_fingerprint(self)
        self.factory = RequestFactory.of(self.engine, self.tokenizer, self.default_sampling)
        self.read_images()
        self.factory.asks = self.engine.pooling.writes and is_named_reranker(self.config.model or "")
        for name, directory in (lora or {}).items():
            self.load_lora(name, directory)
        self._metrics: Metrics | None = None
        self._clocks: Clocks | None = None
        if options.get("disable_log_stats") is False:
            from quire.frontend.clocks import Clocks
            from quire.frontend.metrics import Metrics

            self._metrics = Metrics(self.engine, self.config.model or EMBEDDED_NAME, vllm_names=False)
            self._clocks = Clocks(self._metrics, None)
            self.engine.listen(self._clocks.hear)

    def read_images(self) -> None:
        """Read images with the vision part of the current weights, if the model has one."""
        load = load_images(self.files, self.decoder, self.config, self.backend)
        if self.receipts is not None:
            self.factory.images = "receipts are written, which have no images"
        elif load is not None and isinstance(self.factory.images, PromptImages):
            self.factory.images.use(load)  # a server has this object, too
        elif load is not None:
            self.factory.images = PromptImages(load, self.decoder.max_model_len)

    def _load(self) -> None:
        """Read the weights and build the engine, at the same time as the other ranks of a group.

        In a process that a launcher started as another rank, this call serves that rank until the group ends, and then
        raises SystemExit.
        """
        config = self.config
        draft_files = find_draft_model(config, self.files, self.tokenizer, self.backend)
        exchange = None
        if config.tensor_parallel_size > 1:
            check_parallel(self.files, config, self.backend)
            self.group = group = join(config, self.backend)
            exchange = group.exchange
            if group.rank > 0:
                follow(group, self.files, config, self.backend)
                raise SystemExit(0)
            weakref.finalize(self, group.close)
            config = self.config = group.placed(config)
        try:
            self.decoder: Model = load_model(self.files, config, self.backend, exchange)
            draft = load_draft_model(draft_files, config, self.backend)
            self.engine: Engine = build_engine(self.decoder, self.backend, config, draft)
            if self.group is not None:
                agree_on_model(self.group, self.decoder, self.files, config, self.backend)
        except BaseException as error:
            if self.group is not None:
                self.group.fail(error)
                self.group.close()
            raise

    def _say_if_slow(self) -> None:
        """Log a warning if the reference backend was chosen, which runs every model but is many times slower."""
        if self.config.attention_backend == "auto" and self.backend.name == "reference":
            fast = "cpu" if self.config.device == "cpu" else "triton"
            reason = ops.unavailable(fast, self.config.device)
            log.warning("the slow backend 'reference' is used, since %r is not available: %s", fast, reason)

    def _find_text_files(self) -> Files:
        """Return the files from which the tokenizer and the chat template are read."""
        if self.config.tokenizer is None:
            return self.files
        found = files_of(locate_description(self.config.tokenizer))
        if not found.has_tokenizer:
            raise ConfigError(f"tokenizer is {self.config.tokenizer!r}; there is no tokenizer in {found.path}")
        return found

    def load_lora(self, name: str, directory: str | Path) -> None:
        """Load a LoRA adapter, so that prompts can use it. The LLM must have been created with lora or enable_lora.

        docs/lora.md has an example that creates and loads an adapter.

        Args:
            name: the name that `generate` takes.
            directory: the adapter in PEFT's format.

        Raises:
            ModelError: the adapter cannot be read, or belongs to another model.
            ConfigError: the LLM was created without adapters, the name is used already, or the adapter exceeds
                max_loras or max_lora_rank.
        """
        self.engine.load_lora(name, prepare(self.engine.known_loras(), Path(directory)))

    def unload_lora(self, name: str) -> None:
        """Unload a LoRA adapter. Running prompts that use it continue with it.

        Args:
            name: the adapter's name.

        Raises:
            RequestError: no adapter has this name.
        """
        self.engine.unload_lora(name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights and the KV cache, and stop the processes of grammars and templates.

        Streams that have not ended and all later calls raise QuireError. Closing an LLM again has no effect.
        """
        if isinstance(self.engine, Closed):
            return
        self.factory.close()
        if self.group is not None:
            with suppress(GroupLost):
                end(self.group.exchange)
            self.group.close()
        self.engine.close()
        if self.receipts is not None:
            self.receipts.close()
        if self.tokenizer is not None:
            self.tokenizer.close()
        for name in ("engine", "decoder", "backend", "processor", "factory", "_metrics", "_clocks"):
            setattr(self, name, Closed())
        gc.collect()  # an engine's parts refer to one another
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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt.

        Args:
            prompts: one prompt or a list. A prompt is a text, a list of token ids, {"prompt": text} or
                {"prompt_token_ids": ids}. A dictionary may have a "cache_salt": prompts with different salts share no
                cached blocks. With "prompt" it may have "multi_modal_data": {"image": an image or a list of them},
                each an image of Pillow, a path, a data URL or a file's bytes; the text has the model's mark for each.
            sampling_params: one for all prompts, or one for each; None is `get_default_sampling_params()`.
            prompt_token_ids: one list of token ids or a list of them, instead of prompts.
            use_tqdm: show a progress bar if standard error is a terminal.
            priority: one for each prompt, lower is first; for scheduling_policy="priority".
            lora: the name of an adapter for all prompts, or one for each; None is the model without an adapter.
            lora_request: the same as `lora` in vLLM's form. An adapter that is not loaded yet is loaded.

        Returns:
            One output for each prompt, in the same order. If a step failed, the outputs of its prompts have the
                finish_reason "error" and the reason in `error`. Other prompts are not affected.

        Raises:
            RequestError: a prompt is invalid or can never fit. Nothing was computed.

        Example:
            ```python
            from quire import LLM, SamplingParams

            with LLM(num_blocks=128) as llm:
                for output in llm.generate(["import os", "class Queue:"], SamplingParams(max_tokens=8, seed=1)):
                    print(output.prompt, output.outputs[0].text)
            ```
        """
        if (prompts is None) == (prompt_token_ids is None):
            given = "neither" if prompts is None else "both"
            raise RequestError(f"{given} of prompts and prompt_token_ids was given; give one of them")
        listed = cast("Sequence[Prompt]", prompt_token_ids if prompts is None else prompts)
        tokenized = [self.factory.tokenize(prompt) for prompt in list_prompts(listed)]
        lora = self._named_loras(lora, lora_request)
        return self._finished(self.factory.generations(tokenized, sampling_params, priority, lora), use_tqdm)

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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or each of a list.

        Args:
            messages: one conversation or a list. A conversation is a list of messages with a role and a content, in the
                form of OpenAI's API. A part of a content is a text, or, if the model reads images, an image:
                {"type": "image_url", "image_url": {"url": data URL}}, or {"type": "image", "image": a path, a data URL
                or an image of Pillow}.
            sampling_params: see `generate`.
            use_tqdm: see `generate`.
            chat_template: the text of a template to use instead of the model's.
            add_generation_prompt: end the prompt where the model's answer begins.
            continue_final_message: continue the last message instead of beginning an answer. Needs
                add_generation_prompt=False.
            tools: functions that the model may call, in the form of OpenAI's API. Calls are part of the answer's text.
            chat_template_kwargs: additional variables of the template.
            priority: see `generate`.
            lora: see `generate`.
            lora_request: see `generate`.

        Returns:
            One output for each conversation, in the same order, see `generate`.

        Raises:
            RequestError: see `generate`; or there is no template, or it does not support the messages.
            ModelError: the model's template is invalid.

        Example:
            ```python
            from quire import LLM, SamplingParams

            with LLM(num_blocks=128) as llm:
                [output] = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=8))
                print(output.prompt, output.outputs[0].text)
            ```
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
        tokenized = [self.factory.tokenize_chat(conversation, **rendering) for conversation in listed]
        lora = self._named_loras(lora, lora_request)
        return self._finished(self.factory.generations(tokenized, sampling_params, priority, lora), use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Continue each prompt and yield its output whenever it has grown. Closing the iterator aborts the prompts.

        Args:
            prompts: see `generate`.
            sampling_params: see `generate`.
            priority: see `generate`.
            lora: see `generate`.

        Yields:
            The output of a prompt, the same object each time. It has all text so far.

        Raises:
            RequestError: see `generate`.

        Example:
            ```python
            from quire import LLM, SamplingParams

            with LLM(num_blocks=128) as llm:
                for output in llm.stream("def fibonacci(", SamplingParams(max_tokens=8)):
                    print(output.outputs[0].text, output.finished)
            ```
        """
        tokenized = [self.factory.tokenize(prompt) for prompt in list_prompts(prompts)]
        made = self.factory.generations(tokenized, sampling_params, priority, lora)
        for _, [request, *_] in made:
            if (kind := request.sampling.output_kind) is not RequestOutputKind.CUMULATIVE:
                raise RequestError(
                    f"output_kind is {kind.name}; LLM.stream yields all text so far, so it is CUMULATIVE"
                )
        yield from self._run(made, is_streamed=True)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the most probable continuations of each prompt.

        The sequences are those of transformers' `generate` with the same number of beams. Beams share the KV blocks of
        their common prefixes.

        Args:
            prompts: see `generate`.
            params: the width and the end of the search.
            lora: see `generate`.

        Returns:
            One output for each prompt, in the same order, each with its sequences, best first.

        Raises:
            RequestError: a prompt is invalid or can never fit. Nothing was computed.

        Example:
            ```python
            from quire import LLM, BeamSearchParams

            with LLM(num_blocks=128) as llm:
                [output] = llm.beam_search("import", BeamSearchParams(beam_width=3, max_tokens=4))
                print([sequence.text for sequence in output.sequences])
            ```
        """
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is a {type(params).__name__}; it must be BeamSearchParams")
        searches: list[tuple[str | None, list[int], BeamDriver]] = []
        listed = list_prompts(prompts)
        for prompt, own_lora in zip(listed, each_lora(lora, len(listed)), strict=True):
            text, tokens, salt, images = self.factory.tokenize(prompt)
            if images is not None:
                raise RequestError("the prompt has an image; a beam search reads text alone")
            with _by_place(len(searches), len(listed)):
                driver = BeamDriver(self.engine, self.factory.next_name(), tokens, params, salt, own_lora)
                driver.check()
            searches.append((text, tokens, driver))
        takers = {request_id: driver for _, _, driver in searches for request_id in driver.request_ids}
        try:
            for _, _, driver in searches:
                driver.start()
            while not all(driver.done for _, _, driver in searches):
                with deferred_interrupts():  # a search is consistent only between two steps
                    events, _ = self._compute()  # also those of other streams
                    for event in events:
                        if event.request_id in takers:
                            takers[event.request_id].take(event)
            self._take_back(takers)
        except BaseException:
            self._take_back(takers)
            raise
        return [
            BeamSearchOutput(
                text,
                tokens,
                beam_sequences(tokens, driver.results(), self.tokenizer),
                driver.error,
                self.weights_version,
            )
            for text, tokens, driver in searches
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Compute an embedding of each prompt, by the pooling of the checkpoint's files.

        Without such files the embedding is the mean of an encoder's hidden states, or the hidden state of a decoder's
        last token after the final norm; its length is 1. Prompts of a decoder are computed in the same batches and with
        the same prefix cache as those of `generate`. No token is drawn.

        Args:
            prompts: see `generate`.
            dimensions: number of leading values to keep, 1..hidden_size, for models that were trained for that. They
                are normalised to length 1 again, if the model's are. None keeps all.
            prompt_name: the name of a prompt of the checkpoint, such as "query", that precedes each text.
            truncate_prompt_tokens: most tokens of a prompt to keep, -1 as many as fit: the first ones for an encoder,
                the last ones for a decoder. None keeps all.
            use_tqdm: see `generate`.
            priority: see `generate`.
            lora: see `generate`.

        Returns:
            One output for each prompt, in the same order, with fp32 values. If a step failed, the outputs of its
                prompts have no values and the reason in `error`. Other prompts are not affected.

        Raises:
            RequestError: a prompt is invalid or can never fit, or an argument is out of range. Nothing was computed.

        Example:
            ```python
            from quire import LLM

            with LLM(num_blocks=128) as llm:
                [output] = llm.embed("import os", dimensions=64)
                print(len(output.outputs.embedding))
            ```
        """
        pooled = self._pooled(truncate_prompt_tokens, priority, lora)
        return self._answer(pooled.embed(prompts, dimensions, prompt_name), use_tqdm)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: str = "embed",
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[PoolingRequestOutput]:
        """Compute the embedding of each prompt, or a classifier's scores, as a tensor, see `embed` and `classify`.

        Args:
            prompts: see `generate`.
            pooling_task: "embed" or "classify".
            use_tqdm: see `generate`.
            priority: see `generate`.
            lora: see `generate`.
            lora_request: see `generate`.

        Returns:
            One output for each prompt, in the same order; `outputs.data` is fp32 [hidden_size] or [labels].

        Raises:
            Unsupported: pooling_task is another one.
            RequestError: see `embed`.

        Example:
            ```python
            from quire import LLM

            with LLM(num_blocks=128) as llm:
                [output] = llm.encode("import os")
                print(output.outputs.data.shape)
            ```
        """
        if pooling_task not in ("embed", "classify"):
            raise Unsupported(f"pooling_task is {pooling_task!r}; it must be 'embed' or 'classify'")
        pooled = self._pooled(None, priority, self._named_loras(lora, lora_request))
        made = pooled.embed(prompts, None, None).made if pooling_task == "embed" else pooled.classify(prompts).made
        return [pooling_output(output, self.factory.pooling) for output in self._finished(made, use_tqdm)]

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Compute the similarity of pairs of prompts: the cosine of their embeddings, -1..1, as in vLLM for decoders.

        A cross-encoder, which is a classifier with one label, reads both texts of a pair together and gives its score.
        A decoder with the word reranker in its name, such as Qwen3-Reranker, gives the probability of its yes.

        Args:
            data_1: the first prompts of the pairs, see `generate`. A single one is paired with each of data_2.
            data_2: the second prompts of the pairs.
            truncate_prompt_tokens: see `embed`. Of a pair that is read together, the longer text is cut first.
            use_tqdm: see `generate`.
            priority: one for each prompt of data_1, then of data_2, or one for each pair that is read together; see
                `generate`.
            lora: the name of an adapter for all prompts.

        Returns:
            One output for each pair, in the same order. If a step failed, the scores of its prompts are NaN.

        Raises:
            RequestError: see `embed`; or the numbers of prompts differ, and data_1 has more than one.

        Example:
            ```python
            from quire import LLM

            with LLM(num_blocks=128) as llm:
                for output in llm.score("import os", ["import sys", "class Queue:"]):
                    print(output.outputs.score)
            ```
        """
        pooled = self._pooled(truncate_prompt_tokens, priority, lora)
        return self._answer(pooled.score(data_1, data_2), use_tqdm)

    def rerank(
        self,
        query: Prompt,
        documents: Sequence[Prompt],
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora: str | None = None,
    ) -> list[RankedDocument]:
        """Return the documents that fit a query best, best first, by the scores of `score`.

        Args:
            query: the query, see `generate`.
            documents: the documents.
            top_n: the number of documents to return; None returns all.
            truncate_prompt_tokens: see `score`.
            use_tqdm: see `generate`.
            lora: see `score`.

        Returns:
            The best documents. Equal ones keep their order.

        Raises:
            RequestError: see `score`.

        Example:
            ```python
            from quire import LLM

            with LLM(num_blocks=128) as llm:
                for found in llm.rerank("import os", ["class Queue:", "import sys"], top_n=1):
                    print(found.index, found.score)
            ```
        """
        return self._answer(self._pooled(truncate_prompt_tokens, None, lora).rerank(query, documents, top_n), use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Compute the scores of a classifier's labels for each prompt.

        Args:
            prompts: see `generate`.
            truncate_prompt_tokens: see `embed`.
            use_tqdm: see `generate`.
            priority: see `generate`.
            lora: see `generate`.

        Returns:
            One output for each prompt, in the same order: the probabilities of all labels, or independent scores if the
                checkpoint's config has one label or several that may hold together.

        Raises:
            RequestError: the model is no classifier; or see `embed`.

        Example:
            ```python
            from quire import LLM
            from quire.errors import RequestError

            with LLM(num_blocks=128) as llm:
                try:
                    print(llm.classify("import os")[0].outputs.label)
                except RequestError as error:
                    print(error)
            ```
        """
        return self._answer(self._pooled(truncate_prompt_tokens, priority, lora).classify(prompts), use_tqdm)

    def _pooled(
        self, truncate: int | None, priority: Sequence[int] | None, lora: str | Sequence[str | None] | None
    ) -> Pooled:
        return Pooled(self.factory, self.factory.next_name, truncate, priority, lora)

    def _answer(self, call: Call[T], use_tqdm: bool) -> T:
        return call.finish(self._finished(call.made, use_tqdm))

    def loglikelihood(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[LoglikelihoodOutput]:
        """Compute the log-likelihood of each continuation after its prompt.

        Texts are tokenized as in lm_eval: the prompt and the continuation are tokenized as one text, and the tokens
        after those of the prompt alone are the continuation. White space at the prompt's end belongs to the
        continuation. The tokenizer's special tokens precede the prompt. Token ids are concatenated unchanged.

        Args:
            prompts: one prompt or a list, see `generate`. An empty prompt needs a special token before it.
            continuations: one continuation for each prompt: a text after a text, token ids after token ids.
            use_tqdm: see `generate`.
            priority: see `generate`.
            lora: see `generate`.

        Returns:
            One output for each pair, in the same order. If a step failed, the outputs of its pairs have no logprobs and
                the reason in `error`. Other pairs are not affected.

        Raises:
            RequestError: a pair is invalid or can never fit. Nothing was computed.

        Example:
            ```python
            from quire import LLM

            with LLM(num_blocks=128) as llm:
                for output in llm.loglikelihood(["import "] * 2, ["os", "colour"]):
                    print(output.continuation, output.cumulative_logprob, output.is_greedy)
            ```
        """
        firsts, seconds = list_prompts(prompts), list_prompts(continuations, "continuations")
        if len(firsts) != len(seconds):
            raise RequestError(f"{len(firsts)} prompts were given with {len(seconds)} continuations; give one each")
        made: list[Made] = []
        starts: list[tuple[str | None, str | None, int]] = []  # of each pair its texts, and the number of prompt tokens
        loras = each_lora(lora, len(firsts))
        for i, own_priority in enumerate(each_priority(priority, len(firsts))):
            prompt, salt = parse_prompt(firsts[i])
            continuation, _ = parse_prompt(seconds[i], "continuation")
            texts: tuple[str | None, str | None] = (None, None)
            if isinstance(prompt, str) and isinstance(continuation, str):
                texts = (prompt, continuation)
                before, after = encode_pair(self.factory.tokenizer_for(prompt), prompt, continuation)
            elif isinstance(prompt, str) or isinstance(continuation, str):
                kinds = ["a text" if isinstance(x, str) else "token ids" for x in (prompt, continuation)]
                raise RequestError(
                    f"prompt {i} is {kinds[0]} and its continuation {kinds[1]}; give both as texts or both as token ids"
                )
            else:
                before, after = prompt, continuation
            check_pair(i, before, after)
            options = RequestOptions(own_priority, salt, loras[i])
            made.append(self.factory.loglikelihood(self.factory.next_name(), before, after, options))
            starts.append((*texts, len(before)))
        ended = self._finished(made, use_tqdm)
        return [loglikelihood_output(output, *start) for output, start in zip(ended, starts, strict=True)]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of calls without any: those of the checkpoint's generation_config.json.

        Of that file temperature, top_p, top_k, min_p, repetition_penalty and max_new_tokens are used. The option
        generation_config selects another directory, or "none".

        Returns:
            The sampling parameters.

        Example:
            ```python
            from quire import LLM

            with LLM(num_blocks=128) as llm:
                print(llm.get_default_sampling_params().temperature)
            ```
        """
        return SamplingParams(**self.default_sampling)

    def get_tokenizer(self) -> ChatTokenizer:
        """Return the model's tokenizer, with `encode`, `decode` and `apply_chat_template`.

        Returns:
            The tokenizer.

        Raises:
            RequestError: the model has no tokenizer.

        Example:
            ```python
            from quire import LLM

            with LLM(num_blocks=128) as llm:
                print(llm.get_tokenizer().encode("import os"))
            ```
        """
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer, so it takes and returns token ids only")
        return self.tokenizer

    @property
    def hidden_size(self) -> int:
        """The number of values in an embedding."""
        return self.factory.vector_size

    def get_metrics(self) -> list[Metric]:
        """Return the metrics of this engine: those of a server's /metrics that concern no HTTP.

        The LLM must have been created with disable_log_stats=False. Beam searches are counted by their steps alone.

        Returns:
            A `Counter`, `Gauge` or `Histogram` of quire.metrics for each metric and set of labels.

        Raises:
            ConfigError: nothing was counted.

        Example:
            ```python
            from quire import LLM
            from quire.metrics import Counter

            with LLM(num_blocks=128, disable_log_stats=False) as llm:
                llm.generate("import os")
                for metric in llm.get_metrics():
                    if isinstance(metric, Counter):
                        print(metric.name, metric.value)
            ```
        """
        if self._metrics is None:
            raise ConfigError("this LLM counts nothing; create it with disable_log_stats=False to get metrics")
        return list(read_families(self._metrics.collect()))

    def reset_prefix_cache(self) -> None:
        """Remove all blocks from the prefix cache, so that later prompts reuse none of them."""
        self.engine.reset_prefix_cache()

    def update_weights(self, weights: NewWeights, version: str | None = None) -> str:
        """Replace weights by others of the same model, between two steps.

        All are loaded, and compared with the model, before anything is changed: if that fails, the old weights remain
        in use. Until then, both are in memory. No later prompt finds K and V of the old weights in the prefix cache. A
        stream that has not ended continues with the new weights: its tokens so far are computed again, and
        `CompletionOutput.weights_versions` states which weights chose which tokens. docs/weights-in-place.md has an
        example.

        Args:
            weights: a directory with safetensors files, or the tensors, by the names that the checkpoint has: a
                dictionary or pairs. Weights that are missing stay unchanged. Tensors are copied, and kept in memory.
            version: the name of the weights in outputs. None: the number of replacements so far.

        Returns:
            The version.

        Raises:
            ModelError: the weights cannot be read, belong to another model, or replace those of a GGUF file.
            ConfigError: the version is that of the current weights, adapters are enabled, or several processes compute
                the model.

        Example:
            ```python
            import torch

            from quire import LLM, SamplingParams

            with LLM(num_blocks=128) as llm:
                print(llm.update_weights({"model.norm.weight": torch.ones(llm.hidden_size)}, version="step-1"))
                [output] = llm.generate("import os", SamplingParams(max_tokens=4))
                print(output.weights_version)
            ```
        """
        loaded = load_new(self, weights, version)
        with deferred_interrupts():
            self._settle()
            return use_new(self, loaded)

    @property
    def weights_version(self) -> str:
        """The version of the current weights: "0" until they are replaced."""
        return self.engine.weights_version

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache, and at level 2 that of the weights. Until `wake_up`, prompts are refused.

        Blocks on the disk (`kv_disk`) stay. A stream that has not ended continues after `wake_up` with the same
        results, if it is not read before.

        Args:
            level: 1 keeps the weights; 2 drops them.

        Raises:
            ConfigError: the level is invalid, several processes compute the model, or adapters are enabled at level 2.

        Example:
            ```python
            from quire import LLM, SamplingParams

            with LLM(num_blocks=128) as llm:
                llm.sleep(level=2)
                llm.wake_up()
                print(llm.generate("import os", SamplingParams(max_tokens=4))[0].outputs[0].text)
            ```
        """
        with deferred_interrupts():
            self._settle()
            sleep(self, level)

    def wake_up(self) -> None:
        """Allocate the memory that `sleep` freed. Weights that it dropped are read from their files again.

        Raises:
            ModelError: the dropped weights are not in files, or these can no longer be read.
        """
        wake_up(self, load_dropped(self))

    def is_sleeping(self) -> bool:
        """Return whether `sleep` was called, and `wake_up` was not called since.

        Returns:
            True if no prompt can be computed.
        """
        return self.engine.is_asleep

    def _settle(self) -> None:
        """Commit a step that was launched ahead, and update the outputs."""
        start = time.monotonic()
        if events := self.engine.settle():
            self._processed(events, start)

    def _finished(self, made: Sequence[Made], use_tqdm: bool) -> list[RequestOutput]:
        """Run prompts to completion. Return their outputs in the order of the prompts."""
        with progress_bar("prompts", len(made)) if use_tqdm else nullcontext(abs) as advance:
            for output in self._run(made, is_streamed=False):
                if output.finished:
                    advance(1)
        return [output for output, _ in made]

    def _run(self, made: Sequence[Made], *, is_streamed: bool) -> Iterator[RequestOutput]:
        """Run prompts. Yield an output whenever it has grown. is_streamed: see `OutputProcessor.add`."""
        for place, (_, requests) in enumerate(made):
            with _by_place(place, len(made)):
                for request in requests:
                    self.engine.check(request)
        names = [request.id for _, requests in made for request in requests]
        pending = {output.request_id for output, _ in made}
        ended: deque[RequestOutput] = deque()
        try:
            for output, requests in made:
                for request in requests:
                    self.processor.add(request, output, ended, is_streamed=is_streamed or self._clocks is not None)
                    if self._clocks is not None:
                        self._clocks.add({request.id: self._clocks.clock(request)})
            while pending:
                if not self.engine.has_work:
                    raise QuireError("events of this call were lost: an exception interrupted another call")
                grown = self._step()
                yield from (output for output in grown if output.request_id in pending and not output.finished)
                while ended:  # in this step, or in one of another stream
                    output = ended.popleft()
                    pending.remove(output.request_id)
                    yield output
            self._take_back(names)  # a stop string may have just marked some to end
        except BaseException:  # also an interrupt, or the caller closed the iterator
            self._take_back(names)
            raise

    @deferred_interrupts()
    def _take_back(self, request_ids: Collection[str]) -> None:
        """Abort these requests and remove them from the engine."""
        for request_id in request_ids:
            self.engine.abort(request_id)
        if any(request_id in self.engine.scheduler.requests for request_id in request_ids) and self.engine.can_step:
            self._step()

    @deferred_interrupts()
    def _step(self) -> list[RequestOutput]:
        """Run one step of the engine. Return the outputs that have grown, of this call and of others.

        An interrupt is deferred until the outputs are updated, so it loses no token, only the report of the growth.
        """
        _, grown = self._compute()
        return list({output.request_id: output for _, output in grown}.values())

    def _compute(self) -> tuple[Sequence[Event], list[tuple[Event, RequestOutput]]]:
        """Run one step. Return its events, and those that changed an output, with the output."""
        start = time.monotonic()
        events = self.engine.step()
        return events, self._processed(events, start)

    def _processed(self, events: Sequence[Event], start: float) -> list[tuple[Event, RequestOutput]]:
        """Process the events of a step that began at `start`. Return those that changed an output, with the output."""
        end = time.monotonic()
        grown = list(self.processor.process(events))
        if self._clocks is not None:
            from quire.frontend.jobs import EngineStep

            self._clocks.observe(EngineStep(events, grown, (), start, end))
        return grown

    def _named_loras(
        self,
        lora: str | Sequence[str | None] | None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> str | Sequence[str | None] | None:
        """Return the names of a call's adapters, after loading those that are not loaded yet."""
        if lora_request is None:
            return lora
        names, missing = named_loras(lora, lora_request, self.engine.known_loras().by_name)
        for one in missing:
            self.load_lora(one.lora_name, one.lora_path)
        return names


class Closed:
    """Placeholder for the parts of a closed LLM."""

    def __getattr__(self, name: str) -> Any:
        raise QuireError("this LLM is closed and its memory is free; create another one")


@contextmanager
def _by_place(place: int, count: int) -> Iterator[None]:
    """Make errors name a prompt by its place in the caller's list, since the names of requests are internal."""
    try:
        yield
    except RequestError as error:
        who = "the request" if count == 1 else f"the request of prompt {place}"
        raise RequestError(re.sub(r"^(request|beam search) [^ :]+", who, str(error)), error.field) from error
