"""Both loops: the same events, the same bits, the same books at the end; and in the overlapped one the host works while
the device computes.

The device is one that computes as late as can be, or a thread. What overlaps is read off the order of what happens,
never off a clock.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.batch import Batch
from quire.cache.events import BlockStored
from quire.cache.manager import CacheGroup
from quire.engine.engine import Engine
from quire.engine.loops import Loop, OverlappedLoop, SequentialLoop
from quire.engine.plan import INVALID_TOKEN, Plan, StepOutput
from quire.engine.sampler import sample
from quire.engine.speculation import PromptLookup
from quire.request import Event, FinishReason, Request, Task
from tests.engine.fakes import (
    CIRCLE,
    VOCAB,
    LaterRunner,
    circling,
    continuation,
    fake_engine,
    forget_free_blocks,
    next_token,
    request,
    siblings,
)
from tests.engine.test_guides import Residues, constrained
from tests.engine.test_waits import OPS
from tests.marks import quick

LOOPS: tuple[type[Loop], ...] = (SequentialLoop, OverlappedLoop)
LIMIT = 5_000  # steps
PROMPT = [5, 6, 7, 8, 9]
AFTER = continuation(PROMPT, 30)  # what comes after it


def later_engine(loop: type[Loop] = OverlappedLoop, **options: Any) -> Engine:
    return fake_engine(**({"runner": LaterRunner, "loop": loop()} | options))


def steps(engine: Engine, between: Callable[[list[Event]], object] = lambda events: None) -> list[list[Event]]:
    """The events of each step to the end, with an audit after each. between: gets the events of a step after it."""
    found = []
    while engine.has_work:
        assert len(found) < LIMIT
        found.append(engine.step())
        engine.scheduler.audit()
        forget_free_blocks(engine)
        between(found[-1])
    manager = engine.scheduler.manager
    assert all(pool.num_free == pool.num_blocks for pool in (*manager.pools, *manager.host_pools))
    assert not (engine.scheduler.running or engine.scheduler.waiting or engine.scheduler.swapped)
    return found


def by_request(found: list[list[Event]]) -> dict[str, list[Event]]:
    each: dict[str, list[Event]] = {}
    for event in (event for events in found for event in events):
        each.setdefault(event.request_id, []).append(event)
    return each


def tokens_of(found: list[list[Event]], name: str) -> list[int | None]:
    return [event.token for event in by_request(found)[name] if event.token is not None]


def watch(engine: Engine) -> list[str]:
    """A log of plans, launches, computed steps and commits, in the order in which they happen."""
    runner, scheduler = engine.runner, engine.scheduler
    assert isinstance(runner, LaterRunner)
    log, plan_ahead, commit = runner.log, scheduler.plan_ahead, scheduler.commit
    commits = iter(range(LIMIT))

    def planned(before: Plan) -> Plan | None:
        found = plan_ahead(before)
        log.append("plan ahead" if found else "no plan ahead")
        return found

    def committed(plan: Plan, output: StepOutput) -> list[Event]:
        events = commit(plan, output)
        log.append(f"commit {next(commits)}")
        return events

    scheduler.plan_ahead = planned  # type: ignore[method-assign]
    scheduler.commit = committed  # type: ignore[method-assign]
    return log


# ---------------------------------------------------------------------------------------------------- what overlaps


def test_the_next_step_is_launched_before_one_is_computed_and_committed_after() -> None:
    engine = later_engine()
    log = watch(engine)
    engine.add(request("r", PROMPT, max_tokens=3))
    assert tokens_of(steps(engine, lambda events: log.append("text")), "r") == AFTER[:3]
    assert log == [
        *("launch 0", "plan ahead", "launch 1", "compute 0", "commit 0", "text"),
        *("plan ahead", "launch 2", "compute 1", "commit 1", "text"),
        *("no plan ahead", "compute 2", "commit 2", "text"),
    ]


def test_the_sequential_loop_has_one_step_at_a_time() -> None:
    engine = later_engine(SequentialLoop)
    log = watch(engine)
    engine.add(request("r", PROMPT, max_tokens=2))
    steps(engine)
    assert log == ["launch 0", "compute 0", "commit 0", "launch 1", "compute 1", "commit 1"]


class ThreadRunner(LaterRunner):
    """A device that is a thread. It ends step n + 1 only when the host has committed step n."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.thread = ThreadPoolExecutor(1)
        self.committed = threading.Semaphore(1)  # the first step waits for no commit
        self.in_time = True

    def later(self, action: Callable[[], Any]) -> Callable[[], Any]:
        return self.thread.submit(action).result

    def compute(self, batch: Batch, number: int) -> StepOutput:
        self.in_time &= self.committed.acquire(timeout=20)
        return super().compute(batch, number)


def test_a_step_is_committed_while_a_thread_computes_the_next_one() -> None:
    engine = later_engine(runner=ThreadRunner)
    runner, commit = engine.runner, engine.scheduler.commit
    assert isinstance(runner, ThreadRunner)

    def committed(plan: Plan, output: StepOutput) -> list[Event]:
        events = commit(plan, output)
        runner.committed.release()
        return events

    engine.scheduler.commit = committed  # type: ignore[method-assign]
    asked = [request(f"{i}", [i, 3, i], max_tokens=9) for i in range(5)]
    for r in asked:
        engine.add(r)
    found = steps(engine)
    runner.thread.shutdown()
    assert runner.in_time
    for i in range(5):
        assert tokens_of(found, f"{i}") == continuation([i, 3, i], 9)


# ------------------------------------------------------------------------------------------------- what must wait


def ahead(engine: Engine) -> Counter[bool]:
    """Whether each step was planned ahead."""
    counts: Counter[bool] = Counter()
    plan_ahead = engine.scheduler.plan_ahead

    def counted(before: Plan) -> Plan | None:
        found = plan_ahead(before)
        counts[found is not None] += 1
        return found

    engine.scheduler.plan_ahead = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_needs_the_token(penalty: str) -> None:
    engine = later_engine()
    counts = ahead(engine)
    engine.add(request("plain", [1, 2], max_tokens=12))
    engine.add(request("r", PROMPT, max_tokens=6, **{penalty: 1.5}))
    found = steps(engine)
    assert counts == {False: 5 + 1, True: 12 - 6}  # the last step of each, too; beside it nobody is planned ahead
    assert tokens_of(found, "plain") == continuation([1, 2], 12)


# ---------------------------------------------------------------------------------------- equal in every step

class DrawingRunner(LaterRunner):
    """Draws with the real sampler, from logits that fall from the fake model's token on upwards, and round."""

    def compute(self, batch: Batch, number: int) -> StepOutput:
        found = super().compute(batch, number)
        after = {name: [token, *found.tokens_after_guesses.get(name, ())] for name, token in found.tokens.items()}
        said = torch.tensor([after[name].pop(0) for name in batch.logit_ids], dtype=torch.int64)
        drawn = []
        if len(said):
            logits = -((torch.arange(VOCAB) - said[:, None]) % VOCAB).float()
            drawn = sample(logits, batch.sampling, OPS).tolist()
        found.tokens, found.tokens_after_guesses = {}, {}
        for name, token in zip(batch.logit_ids, drawn, strict=True):
            if name not in found.tokens:
                found.tokens[name] = token
            else:
                found.tokens_after_guesses.setdefault(name, []).append(token)
        self.drawn = dict(found.tokens)
        return found


GROUPS = (
    (CacheGroup((0,)),),
    (CacheGroup((0,)), CacheGroup((1,), window=6)),
    (CacheGroup((0,), window=9),),
)
# Of a request: each as often as it stands here.
SAMPLING: tuple[dict[str, Any], ...] = (
    *({}, {}, {}, {"logprobs": 1}, {"prompt_logprobs": 0}),
    *({"temperature": 1.5}, {"temperature": 4.0, "top_k": 9, "min_tokens": 3}, {"temperature": 9.0, "seed": 3}),
)
NEEDING: tuple[dict[str, Any], ...] = ({"repetition_penalty": 1.3}, {"frequency_penalty": 0.4, "temperature": 2.0})


def options_of(rng: random.Random) -> dict[str, Any]:
    """Of an engine: roomy or tight, one that swaps or one that computes anew, one that guesses or not."""
    size = rng.choice([1, 2, 4, 8])
    enough = -(-40 // size) + 1
    return {
        "groups": rng.choice(GROUPS),
        "block_size": size,
        "num_blocks": rng.choice([enough, 2 * enough, 12 * enough]),
        "max_num_seqs": rng.choice([1, 3, 8]),
        "max_num_batched_tokens": rng.choice([3, 8, 32]),
        "num_host_blocks": rng.choice([0, 0, 40]),
        "enable_prefix_caching": rng.random() < 0.7,
        "max_model_len": 40,
        "runner": DrawingRunner,
    }


def load(rng: random.Random, sampling: tuple[dict[str, Any], ...] = SAMPLING) -> list[Request]:
    """Requests with stems in common; some with siblings, some that draw nothing."""
    stems = [[rng.randrange(9) for _ in range(12)] for _ in range(2)]
    asked: list[Request] = []
    for i in range(rng.randint(2, 9)):
        prompt = [*rng.choice(stems)[: rng.randint(1, 12)], *(rng.randrange(9) for _ in range(rng.randint(0, 5)))]
        params = {"max_tokens": rng.randint(3, 20)} | rng.choice(sampling)
        if rng.random() < 0.2:
            asked += siblings(f"{i}", prompt, rng.randint(2, 3), **params)
        else:
            asked.append(request(f"{i}", prompt, **params))
        if rng.random() < 0.1 and asked[-1].group is None:
            asked[-1].task = rng.choice([Task.EMBED, Task.SCORE])
            asked[-1].sampling = replace(asked[-1].sampling, prompt_logprobs=0)
        if rng.random() < 0.15 and asked[-1].task is Task.GENERATE and sampling is not SAMPLING:
            asked[-1].guide = Residues(rng.randint(1, 12))
    return asked


def both(seed: int, **changes: Any) -> tuple[list[list[Event]], list[list[Event]], int]:
    """A load that is there at the start, with both loops: their events by step, and steps planned ahead."""
    found = []
    for loop in LOOPS:
        rng = random.Random(seed)
        engine = later_engine(loop, **(options_of(rng) | changes))
        counts = ahead(engine)
        for r in load(rng):
            engine.add(r)
        found.append(steps(engine))
    return found[0], found[1], counts[True]


@pytest.mark.parametrize("seed", quick(range(200), 20))
def test_the_same_events_in_the_same_steps(seed: int) -> None:
    """Where requests end when their tokens are all there, each step is the one that would have been planned later."""
    sequential, overlapped, num_ahead = both(seed)
    assert overlapped == sequential
    assert num_ahead > 0
