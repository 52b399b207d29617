"""A model of lm_eval's registry, by the name quire.

Releases of lm_eval with plugins find it by its entry point. Earlier ones, 0.4.13 among them, have no such mechanism:
for these `python -m quire.integrations.lm_eval` is their command line with the model registered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("the package lm_eval is missing: pip install 'quire[eval]'") from error

from quire import LLM, SamplingParams
from quire.errors import RequestError

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # names of one argument in tasks


@register_model("quire")
class QuireLM(LM):
    """Answers lm_eval's requests with an `LLM`. Texts that are too long lose their beginning, as in other models.

    Args:
        model: see `LLM`; also by the name `pretrained`.
        pretrained: the same as model.
        max_gen_toks: maximum number of new tokens, for tasks that set none.
        add_bos_token: False leaves out the tokens with which the tokenizer begins a text.
        batch_size: ignored, since the engine forms the batches, and no score depends on them.
        max_batch_size: ignored.
        device: see `LLM`. Without a GPU it is the CPU, since lm_eval's command line gives cuda:0 by default.
        **options: see `LLM`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        pretrained: str | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool = True,
        batch_size: int | str | None = None,  # noqa: ARG002
        max_batch_size: int | None = None,  # noqa: ARG002
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        has_gpu = torch.cuda.is_available()
        self.llm = LLM(model or pretrained, device=device if has_gpu else "cpu", **options)
        self._tokenizer = self.llm.get_tokenizer()
        self._max_gen_toks = max_gen_toks
        self._longest = self.llm.engine.scheduler.max_model_len
        self._leading = self._tokenizer.leading_tokens if add_bos_token else []
        self._first = self._tokenizer.leading_tokens or [min(self.llm.engine.eos_token_ids)]  # before an empty text

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would generate it."""
        pairs = [self._pair(*request.args) for request in requests]
        found = self._scored([(before, after) for before, after in pairs], disable_tqdm)
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, one)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, whose tokens are scored once, with as much context as fits."""
        windows = [self._windows(request.args[0]) for request in requests]
        found = iter(self._scored([window for each in windows for window in each], disable_tqdm))
        sums = [math.fsum(value for value, _ in islice(found, len(each))) for each in windows]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text after each prompt, without the stop string. It is greedy unless the task sets do_sample."""
        prompts = [self._with_first(request.args[0]) for request in requests]
        params = [self._sampling(request.args[1]) for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = [self._text(output) for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation with the model's template."""
        return self._tokenizer.render(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:  # noqa: ARG002
        """Return the source of the model's template, by which lm_eval caches its requests."""
        found = self.llm.text_files.template()
        return None if found is None else found[1]

    @property
    def tokenizer_name(self) -> str:
        """The name by which lm_eval caches its requests."""
        return str(self.llm.text_files.path).replace("/", "__")

    def _sampling(self, given: dict[str, Any]) -> SamplingParams:
        """Return the sampling parameters of a task's arguments. Raises RequestError for those that Quire lacks."""
        given = dict(given)
        draws = given.pop("do_sample", given.get("temperature", 0.0) > 0.0)
        given["temperature"] = given.get("temperature", 1.0) if draws else 0.0
        counts = [given.pop(name) for name in LENGTHS if name in given]
        stop = given.pop("until", None)
        most = counts[0] if counts else self._max_gen_toks
        return SamplingParams(max_tokens=most, stop=stop or None, truncate_prompt_tokens=-1, **given)

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]], disable_tqdm: bool) -> list[tuple[float, bool]]:
        for number, (_, after) in enumerate(pairs):
            if len(after) >= self._longest:
                message = f"continuation {number} has {len(after)} tokens; the model takes {self._longest - 1} at most"
                raise RequestError(message)
        kept = [(before[max(0, len(before) + len(after) - self._longest) :], after) for before, after in pairs]
        found = self.llm.loglikelihood(*map(list, zip(*kept, strict=True)), use_tqdm=not disable_tqdm) if kept else []
        for output in found:
            if output.error is not None:
                raise RequestError(f"request {output.request_id} failed: {output.error}")
        return [(output.cumulative_logprob, output.is_greedy) for output in found]

    def _windows(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Return the pairs that score each token of a text once."""
        tokens = [*self._first[:1], *self._tokenizer.encode(text, add_special_tokens=False)]
        step = self._longest - 1
        ends = [(start, min(start + step, len(tokens))) for start in range(1, len(tokens), step)]
        return [(tokens[max(0, end - self._longest) : start], tokens[start:end]) for start, end in ends]

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of both texts. White space at the context's end belongs to the continuation."""
        kept = context.rstrip()
        before = self._with_first(kept)
        whole = self._with_first(context + continuation)
        if not kept:
            return (before or self._first), whole[len(before) :]
        return before, whole[len(before) :]

    def _with_first(self, text: str) -> list[int]:
        """Return a text's tokens after the model's leading ones, which a chat template may have written."""
        tokens, leading = self._tokenizer.encode(text, add_special_tokens=False), self._leading
        return tokens if tokens[: len(leading)] == leading else [*leading, *tokens]

    def _text(self, output: Any) -> str:
        sample = output.outputs[0]
        if sample.error is not None:
            raise RequestError(f"request {output.request_id} failed: {sample.error}")
        return str(sample.text)
