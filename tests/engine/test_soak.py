"""The real engine with a fake model and a byte tokenizer through 100,000 adds, aborts and ends, audited every step.

Half of them with guesses at the next tokens. With --long only: the random runs check the scheduler in `make test`.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from quire.cache.groups import CacheGroup
from quire.engine.plan import StepOutput
from quire.engine.speculation import PromptLookup, Speculation
from quire.errors import RequestError
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.tokenizer import Tokenizer
from quire.models.batch import Batch
from quire.request import Request, SamplingParams
from tests.engine.fakes import (
    CIRCLE,
    VOCAB,
    FakeRunner,
    circling,
    continuation,
    fake_engine,
    forget_free_blocks,
    next_token,
)
from tests.test_text import byte_level

SHARDS = 10  # each with its own pool, budget and groups
EVENTS = 10_000  # adds, aborts and ends of a shard

pytestmark = pytest.mark.long

GROUPS = (
    (CacheGroup((0,)),),
    (CacheGroup((0,)), CacheGroup((1,), window=6)),
    (CacheGroup((0,), window=9),),
)


class FailingRunner(FakeRunner):
    """Raises in every k-th step, and then has forgotten what the failed requests had stored."""

    every, steps, num_draft_tokens = 1, 0, 0

    def run(self, batch: Batch) -> StepOutput:
        self.steps += 1
        self.fail_next = self.steps % self.every == 0
        self.batches.clear()
        output = super().run(batch)
        self.num_draft_tokens += sum(map(len, output.tokens_after_drafts.values()))
        return output


@dataclass
class Soak:
    """One engine under abuse, and what is known of each request."""

    seed: int
    rng: random.Random = field(init=False)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    events: int = 0
    refused: int = 0
    guessed: int = 0  # tokens

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)


def soak(seed: int, tokenizer: Tokenizer, events: int) -> Soak:
    state = Soak(seed)
    rng = state.rng
    block_size = rng.choice([1, 2, 4, 16])
    num_blocks = (1, 2, 3, 5, 8, 13, 21, 40, 80, 200)[seed % SHARDS]  # from one block up
    groups = GROUPS[seed % len(GROUPS)]
    drafts = seed % 2 == 1
    model = circling if drafts else next_token
    engine = fake_engine(
        num_blocks=num_blocks,
        block_size=block_size,
        groups=groups,
        max_model_len=36,
        max_num_seqs=rng.choice([1, 2, 3] if drafts else [1, 3, 8]),  # where few decode
        max_num_batched_tokens=rng.choice([8, 16] if drafts else [1, 4, 16, 64]),
        eos=frozenset({rng.randrange(VOCAB)}),
        speculation=Speculation([PromptLookup()], rng.randint(1, 7)) if drafts else None,
    )
    runner = FailingRunner(num_blocks, block_size, groups, model=model)
    runner.every = rng.choice([11, 17, 31])
    engine.runner = runner
    processor = OutputProcessor(engine, tokenizer)
    while state.events < events or engine.has_work:
        arrivals = rng.randrange(3) if state.events < events and len(engine.scheduler.requests) < 30 else 0
        for _ in range(arrivals):
            add(state, engine, processor)
        if engine.scheduler.requests and rng.random() < 0.1:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
            state.events += 1
        for event, output in processor.process(engine.step()):
            sample = output.outputs[0]
            assert sample.finish_reason == (event.finish_reason and event.finish_reason.value)
            if sample.finished:
                assert sample.error in (None, "RuntimeError: injected")  # not an assertion of the runner's
                assert output.request_id not in state.reasons
                state.reasons[output.request_id] = sample.finish_reason or ""
                state.events += 1
        engine.scheduler.audit()
        forget_free_blocks(engine)
    assert engine.scheduler.usage().used_blocks == 0
    assert all(pool.num_free == num_blocks for pool in engine.scheduler.manager.pools)
    check_tokens(state, groups, model)
    state.guessed = runner.num_draft_tokens
    return state


def add(state: Soak, engine, processor: OutputProcessor) -> None:
    rng = state.rng
    name = str(len(state.prompts) + state.refused)
    start, length = rng.randrange(VOCAB), rng.randint(1, 20)
    prompt = rng.choice([[(start + i) % CIRCLE for i in range(length)], rng.choices(range(VOCAB), k=length)])
    sampling = SamplingParams(
        max_tokens=rng.choice([None, 1, 3, 12]),
        stop=rng.choice([None, "a", ["zq", "~"], ["$%&", "!"]]),  # the last ones in the model's circle
        stop_token_ids=rng.choice([None, [rng.randrange(VOCAB)]]),
        ignore_eos=rng.random() < 0.5,
        include_stop_str_in_output=rng.random() < 0.5,
    )
    request = Request(name, array("i", prompt), len(prompt), sampling)
    output = RequestOutput(name, None, prompt, [CompletionOutput(0)])
    try:
        processor.add(request, output, deque())
    except RequestError:  # it can never fit
        state.refused += 1
        return
    state.events += 1
    state.prompts[name], state.outputs[name] = prompt, output


def check_tokens(state: Soak, groups: tuple[CacheGroup, ...], model: Callable[[list[int]], int]) -> None:
    """Every request ended with a reason, and what it got until then is what it would have got alone."""
    assert state.reasons.keys() == state.prompts.keys()
    window = 0 if groups[0].window is None else groups[0].window
    for name, prompt in state.prompts.items():
        tokens = state.outputs[name].outputs[0].token_ids
        assert tokens == continuation(prompt, len(tokens), window, model)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("bytes")
    byte_level().save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.mark.parametrize("shard", range(SHARDS))
def test_soak(shard: int, tokenizer: Tokenizer) -> None:
    state = soak(shard, tokenizer, EVENTS)
    assert state.events >= EVENTS
    assert {"stop", "length", "abort", "error"} <= set(state.reasons.values())
    assert state.guessed > EVENTS // 10 or shard not in (5, 7, 9)  # the larger pools of those with drafts
