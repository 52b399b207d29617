"""LLM: the offline face. Prompts in, texts out."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

from quire import ops
from quire.config import EngineConfig, engine_config
from quire.engine.engine import Engine, build_engine
from quire.errors import RequestError
from quire.models import check_device, load_model, locate
from quire.request import Request, SamplingParams
from quire.text import CompletionOutput, OutputProcessor, RequestOutput, Tokenizer, find_tokenizer

# A text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as vLLM has it.
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model, ready to continue prompts.

    model: a directory or a Hugging Face repository; None is the model that comes with Quire.
    Further options are those of `EngineConfig` and `CacheConfig`, under vLLM's names where it has them: dtype,
    max_model_len, max_num_seqs, max_num_batched_tokens, block_size, seed, ...

    Raises ConfigError for an unknown or impossible option, ModelError for a checkpoint that cannot be served,
    Unsupported where the device or the attention backend is not to be had.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        self.config: EngineConfig = engine_config(model=model, **options)
        check_device(self.config.device)
        directory = locate(model)
        backend = ops.load(self.config.attention_backend, self.config.device)
        decoder = load_model(directory, self.config, backend)
        self.tokenizer: Tokenizer | None = find_tokenizer(directory)
        self.engine: Engine = build_engine(decoder, backend, self.config)
        self._num_prompts = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results are in the prompts' order.

        prompts: one or a list of texts, lists of token ids, or {"prompt_token_ids": [...]}.
        sampling_params: one for all prompts or one each; None is SamplingParams().
        use_tqdm: show a progress bar, if standard error is a terminal.

        Raises RequestError for a prompt that is invalid or can never fit; then nothing was computed. A prompt whose
        step failed has the finish_reason "error" and says why in its stop_reason; the others are not affected.
        """
        outputs: dict[str, RequestOutput] = {}
        requests = self._requests(prompts, sampling_params)
        with _progress(len({id(output) for _, output in requests}), use_tqdm) as advance:
            for output in self._run(requests):
                if output.finished and output.request_id not in outputs:
                    outputs[output.request_id] = output
                    advance()
        return [outputs[request_id] for request_id in dict.fromkeys(output.request_id for _, output in requests)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields an output whenever it has grown. It is the same object each time.

        Closing the iterator early takes the prompts back.
        """
        yield from self._run(self._requests(prompts, sampling_params))

    def _run(self, requests: list[tuple[Request, RequestOutput]]) -> Iterator[RequestOutput]:
        processor = OutputProcessor(self.engine, self.tokenizer)
        for request, _ in requests:
            self.engine.check(request)
        try:
            for request, output in requests:
                self.engine.add(request)
                processor.add(request, output)
            while self.engine.has_work:
                yield from processor.process(self.engine.step())
        finally:  # after an exception, or when the caller lost interest, nothing of this call stays behind
            if self.engine.has_work:
                for request, _ in requests:
                    self.engine.abort(request.id)
                self.engine.step()

    # ------------------------------------------------------------------------------------------- its input

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[Request, RequestOutput]]:
        """A request for each sample of each prompt, with the output that it belongs to."""
        listed = _listed(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            each = [sampling_params or SamplingParams()] * len(listed)
        else:
            each = list(sampling_params)
        if len(each) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts were given with {len(each)} sampling_params; give one for all, or one each"
            )
        requests = []
        for prompt, sampling in zip(listed, each, strict=True):
            text, tokens = self._encoded(prompt)
            if sampling.stop_strings and self.tokenizer is None:
                raise RequestError(
                    f"stop is {sampling.stop!r}; without a tokenizer only stop_token_ids can end a request"
                )
            name = str(self._num_prompts)
            self._num_prompts += 1
            output = RequestOutput(name, text, tokens, [CompletionOutput(i) for i in range(sampling.n)])
            for i in range(sampling.n):
                own = sampling if i == 0 else replace(sampling, prompt_logprobs=None)  # the prompt is reported once
                request = Request(f"{name}-{i}", array("i", tokens), len(tokens), own, sample_index=i)
                requests.append((request, output))
        return requests

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, if it has one, and its tokens."""
        if isinstance(prompt, Mapping):
            keys = set(prompt)
            if keys == {"prompt_token_ids"}:
                prompt = prompt["prompt_token_ids"]
            elif keys == {"prompt"}:
                prompt = prompt["prompt"]
            else:
                raise RequestError(f"a prompt has the keys {sorted(keys)}; give either 'prompt' or 'prompt_token_ids'")
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(f"{prompt[:40]!r} is a text, and this model has no tokenizer; give token ids")
            return prompt, self.tokenizer.encode(prompt)
        tokens: list[object] = list(prompt)
        for i, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
                raise RequestError(f"prompt token {i} is {token!r}; token ids are integers from 0 on")
        return None, cast("list[int]", tokens)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list, also where a single one was given: a text, a mapping, or one list of token ids."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


class _progress:
    """A progress bar over prompts on standard error; nothing where that is no terminal."""

    def __init__(self, total: int, wanted: bool) -> None:
        from rich.console import Console
        from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self._bar = Progress(
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (wanted and console.is_terminal),
        )
        self._task = self._bar.add_task("prompts", total=total)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
