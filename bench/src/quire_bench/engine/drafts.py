"""Speculative decoding: that drafts change no token, and their speed."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.engine.speculation import Speculation

# Few requests decode together, so that there are drafts, and not all of them have room.
SMALL = {"block_size": 16, "num_blocks": 12, "max_model_len": 192, "max_num_seqs": 2, "max_num_batched_tokens": 64}
SPECIAL: tuple[dict[str, Any], ...] = (
    {"structured_outputs": StructuredOutputsParams(regex=r"(def [a-z]{3,9}\(self\):\n    pass\n){2,4}")},
    {"structured_outputs": StructuredOutputsParams(choice=["import os, sys", "import os.path", "from os import path"])},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"presence_penalty": 0.5, "logprobs": 2},
    {"bad_words": ["self", " in"], "min_tokens": 8},
    {"logprobs": 3, "logit_bias": {13: 1.5}, "stop": ["return"]},
)


class Checked(NamedTuple):
    """The comparison of requests with and without drafts."""

    requests: int
    tokens: int
    draft_tokens: int
    accepted: int
    different: int  # requests with another token, logprob or reason to end
    preemptions: int


def asked(count: int, vocab_size: int, max_tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return random prompts, half of which repeat themselves, and parameters, half of which look back at the text."""
    rng = random.Random(count)
    prompts, params = [], []
    for i in range(count):
        piece = [rng.randrange(1, vocab_size) for _ in range(rng.randint(4, 32))]
        prompts.append(piece * rng.randint(2, 4) if i % 4 < 2 else piece)
        special: dict[str, Any] = rng.choice(SPECIAL) if i % 2 else {}
        sampling: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.0, 0.5, 1.0]),
            "seed": i,
            "max_tokens": rng.randint(8, max_tokens),
        }
        params.append(SamplingParams(**sampling, **special))
    return prompts, params


def check(options: dict[str, Any], count: int, max_tokens: int = 48) -> Iterator[Checked]:
    """Compare requests with and without drafts, a thousand at a time, in a pool that is too small for all of them."""
    plain, drafting = LLM(**options | SMALL | {"draft": "off"}), LLM(**options | SMALL)
    prompts, params = asked(count, plain.decoder.config.vocab_size, max_tokens)
    for start in range(0, count, 1000):
        part = slice(start, start + 1000)
        outputs = [llm.generate(prompts[part], params[part], use_tqdm=False) for llm in (plain, drafting)]
        pairs = [(one.outputs[0], other.outputs[0]) for one, other in zip(*outputs, strict=True)]
        done = speculation_of(drafting)
        yield Checked(
            len(pairs),
            sum(len(one.token_ids) for one, _ in pairs),
            done.num_draft_tokens,
            done.num_right,
            sum(one != other for one, other in pairs),
            drafting.engine.scheduler.num_preemptions,
        )
        done.num_drafts = done.num_draft_tokens = done.num_right = 0


class Speed(NamedTuple):
    """The speed of one source of drafts."""

    draft: str
    rate: float  # new tokens a second, median
    ratio: float  # to that without drafts
    per_step: float  # tokens of a request in a step


def speeds(
    options: dict[str, Any],
    drafts: Sequence[str],
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float,
    runs: int,
) -> list[Speed]:
    """Measure sources of drafts in alternation, one request at a time. `off` is measured too, first."""
    llms = {draft: LLM(**options | {"draft": draft}) for draft in ("off", *drafts)}
    rates: dict[str, list[float]] = {draft: [] for draft in llms}
    steps = dict.fromkeys(llms, 0)
    for run in range(runs + 1):  # the first one does not count
        for draft, llm in llms.items():
            before, begin = llm.engine.scheduler.num_plans, time.perf_counter()
            for seed, prompt in enumerate(prompts):
                params = SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, repetition_penalty=1.0, seed=seed, ignore_eos=True
                )
                llm.generate(prompt, params, use_tqdm=False)
            steps[draft] = llm.engine.scheduler.num_plans - before
            if run:
                rates[draft].append(len(prompts) * max_tokens / (time.perf_counter() - begin))
    usual = statistics.median(rates["off"])
    return [
        Speed(draft, rate := statistics.median(own), rate / usual, len(prompts) * max_tokens / steps[draft])
        for draft, own in rates.items()
    ]


def speculation_of(llm: LLM) -> Speculation:
    """Return the source of an engine's drafts. Raises ValueError if it has none."""
    found = llm.engine.scheduler.speculation
    if found is None:
        raise ValueError("this engine makes no drafts")
    return found
