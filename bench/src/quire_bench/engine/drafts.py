"""Speculative decoding: that drafts change no token, and their speed."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams, models
from quire.engine import runner
from quire.engine.head_drafter import Chosen, HeadDrafter
from quire.engine.speculation import Speculation
from quire.errors import BadValue
from quire.models import Own
from quire.models.decoder import Decoder
from quire.models.decoder_config import weight_shapes
from quire.models.draft_head import DraftHead
from quire.models.quantisation.policy import ROUNDINGS
from quire.models.quantisation.stacking import Weight

# Few requests decode together, so that there are drafts, and not all of them have room.
SMALL = {"block_size": 16, "num_blocks": 12, "max_model_len": 192, "max_num_seqs": 2, "max_num_batched_tokens": 64}
# More of them than rows that are assumed to be cheap, so that measured costs decide.
MANY = SMALL | {"num_blocks": 64, "max_num_seqs": 12, "max_num_batched_tokens": 128}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace"]},
        "birth_year": {"type": "integer", "minimum": 1800, "maximum": 2000},
        "occupation": {"enum": ["mathematician", "programmer"]},
        "is_known": {"type": "boolean"},
        "languages": {"type": "array", "items": {"enum": ["english", "german"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "birth_year", "occupation", "is_known", "languages"],
    "additionalProperties": False,
}
SPECIAL: tuple[dict[str, Any], ...] = (
    {"structured_outputs": StructuredOutputsParams(regex=r"(def [a-z]{3,9}\(self\):\n    pass\n){2,4}")},
    {"structured_outputs": StructuredOutputsParams(choice=["import os, sys", "import os.path", "from os import path"])},
    {"repetition_penalty": 1.1, "frequency_penalty": 0.2},
    {"presence_penalty": 0.5, "logprobs": 2},
    {"bad_words": ["self", " in"], "min_tokens": 8},
    {"logprobs": 3, "logit_bias": {13: 1.5}, "stop": ["return"]},
)


def source(options: Mapping[str, Any], draft: str) -> dict[str, Any]:
    """Return the options with that source of drafts. The draft model is left out if it is not that source."""
    rest = {name: value for name, value in options.items() if name != "draft_model" or draft == "model"}
    return {**rest, "draft": draft}


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


def check(options: dict[str, Any], count: int, max_tokens: int = 48, share: float | None = None) -> Iterator[Checked]:
    """Compare requests with and without drafts, a thousand at a time, in a pool that is too small for all of them.

    Few and many requests decode together in turn.

    share: the tokens of a head, which may be random, are replaced by right ones with this probability; None: they stay.
    """
    with nullcontext() if share is None else mock.patch.object(runner, "HeadDrafter", KnowingDrafter):
        pairs = [(LLM(**source(options, "off") | sizes), LLM(**options | sizes)) for sizes in (SMALL, MANY)]
    prompts, params = asked(count, pairs[0][0].decoder.config.vocab_size, max_tokens)
    size = max(1, min(1000, count // 2))
    for start in range(0, count, size):
        part, (plain, drafting) = slice(start, start + size), pairs[start // size % 2]
        expected = plain.generate(prompts[part], params[part], use_tqdm=False)
        done = speculation_of(drafting)
        for drafter in done.drafters:
            if isinstance(drafter, KnowingDrafter):
                drafter.know(expected, share or 0.0)
        found = drafting.generate(prompts[part], params[part], use_tqdm=False)
        same = [(one.outputs[0], other.outputs[0]) for one, other in zip(expected, found, strict=True)]
        yield Checked(
            len(same),
            sum(len(one.token_ids) for one, _ in same),
            done.num_draft_tokens,
            done.num_right,
            sum(one != other for one, other in same),
            drafting.engine.scheduler.num_preemptions,
        )
        done.num_drafts = done.num_draft_tokens = done.num_right = 0


class Speed(NamedTuple):
    """The speed of one source of drafts."""

    draft: str
    rate: float  # new tokens a second, median
    ratio: float  # to that without drafts
    per_step: float  # tokens of a request in a step


# ------------------------------------------------------------------------------------------ a head that is right


class KnowingDrafter(HeadDrafter):
    """A drafter that runs the head, and replaces its tokens by right ones, each with the same probability.

    It stands in for the head of a model of random weights, for which none could be trained.
    """

    continuations: Mapping[tuple[int, ...], Sequence[int]] = MappingProxyType({})  # by prompt
    share = 0.0  # probability that a draft token is right, if those before it are

    def know(self, outputs: Sequence[RequestOutput], share: float) -> None:
        """Take the tokens of these outputs as right ones."""
        self.continuations = {tuple(one.prompt_token_ids): one.outputs[0].token_ids for one in outputs}
        self.share = share

    def _drafts(self, drafting: Sequence[Chosen], others: Sequence[Chosen]) -> NDArray[np.int64]:
        found = super()._drafts(drafting, others)
        for row, one in zip(found, drafting, strict=True):
            request, rng = one.request, random.Random(len(one.request.tokens))
            after = self.continuations[tuple(request.tokens[: request.num_prompt])][request.num_generated :]
            for k, token in enumerate(after[: one.count]):
                row[k] = token if rng.random() < self.share else (token + 1) % 2
        return found


def random_head(choice: Own, _: object, model: Decoder, *rest: Any) -> DraftHead:
    """Return a head of random weights, rounded as others are, whose layer is like the model's last one."""
    config = replace(choice.config, layers=choice.config.layers[-1:], joins_hidden=True, tied_embeddings=False)
    weights: dict[str, Weight] = {}
    for name, shape in weight_shapes(config).items():
        numbers = torch.randn(shape).mul_(0.02)
        is_matrix = name == "lm_head" or (name.startswith("layers.") and len(shape) == 2)
        weights[name] = ROUNDINGS["int4"].of(numbers, model.dtype, name) if is_matrix else numbers
        if name == "join":
            weights[name] = numbers.to(model.dtype)
    return DraftHead(config, weights, model, rest[-1]())


def accepted_speeds(
    options: dict[str, Any], shares: Sequence[float], prompts: Sequence[Sequence[int]], max_tokens: int, runs: int
) -> list[Speed]:
    """Measure a head of random weights whose tokens are right with each of these probabilities, and no drafts.

    All prompts run together, greedily.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
    plain = LLM(**options | {"draft": "off"})
    with (
        mock.patch.object(models, "_draft_head", random_head),
        mock.patch.object(runner, "HeadDrafter", KnowingDrafter),
    ):
        drafting = LLM(**options | {"draft": "head"})
    drafter = speculation_of(drafting).drafters[0]
    assert isinstance(drafter, KnowingDrafter)
    given = [list(prompt) for prompt in prompts]
    outputs = plain.generate(given, params, use_tqdm=False)
    drafter.know(outputs, 0.0)
    rates: dict[float | None, list[float]] = {share: [] for share in (None, *shares)}
    steps = dict.fromkeys(rates, 0)
    for _ in range(runs):
        for share in rates:
            llm = plain if share is None else drafting
            drafter.share = share or 0.0
            before, begin = llm.engine.scheduler.num_plans, time.perf_counter()
            again = llm.generate(given, params, use_tqdm=False)
            rates[share].append(len(given) * max_tokens / (time.perf_counter() - begin))
            steps[share] = llm.engine.scheduler.num_plans - before
            if [one.outputs[0].token_ids for one in again] != [one.outputs[0].token_ids for one in outputs]:
                raise BadValue("tokens differ with drafts")
    usual = statistics.median(rates[None])
    return [
        Speed(f"{share or 'off'}", rate := statistics.median(own), rate / usual, max_tokens / steps[share])
        for share, own in rates.items()
    ]


# -------------------------------------------------------------------------------------------------- real drafts


def speeds(
    options: dict[str, Any],
    drafts: Sequence[str],
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float,
    runs: int,
    structured: StructuredOutputsParams | None = None,
) -> list[Speed]:
    """Measure sources of drafts in alternation, one request at a time. `off` is measured too, first."""
    llms = {draft: LLM(**source(options, draft)) for draft in ("off", *drafts)}
    rates: dict[str, list[float]] = {draft: [] for draft in llms}
    per_step = dict.fromkeys(llms, 0.0)
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            repetition_penalty=1.0,
            seed=seed,
            ignore_eos=True,
            structured_outputs=structured,
        )
        for seed in range(len(prompts))
    ]
    for run in range(runs + 1):  # the first one does not count
        for draft, llm in llms.items():
            before, begin = llm.engine.scheduler.num_plans, time.perf_counter()
            outputs = [llm.generate(*one, use_tqdm=False)[0] for one in zip(prompts, params, strict=True)]
            seconds, count = time.perf_counter() - begin, sum(len(one.outputs[0].token_ids) for one in outputs)
            per_step[draft] = count / (llm.engine.scheduler.num_plans - before)
            if run:
                rates[draft].append(count / seconds)
    usual = statistics.median(rates["off"])
    return [Speed(draft, rate := statistics.median(own), rate / usual, per_step[draft]) for draft, own in rates.items()]


def speculation_of(llm: LLM) -> Speculation:
    """Return the source of an engine's drafts. Raises ValueError if it has none."""
    found = llm.engine.scheduler.speculation
    if found is None:
        raise ValueError("this engine makes no drafts")
    return found
