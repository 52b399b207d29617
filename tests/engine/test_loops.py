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

from quire.cache.events import BlockStored, CacheEvent
from quire.cache.groups import CacheGroup
from quire.engine.engine import Engine
from quire.engine.loops import Loop, OverlappedLoop, SequentialLoop
from quire.engine.plan import INVALID_TOKEN, Plan, PlanItem, StepOutput
from quire.engine.sampler import sample
from quire.models.batch import Batch
from quire.request import Event, FinishReason, Request, Task
from tests.engine.fakes import (
    VOCAB,
    LaterRunner,
    continuation,
    fake_engine,
    forget_free_blocks,
    request,
    siblings,
)
from tests.engine.test_guides import Residues
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
    for listed in (engine.scheduler.running, engine.scheduler.waiting, engine.scheduler.swapped):
        assert not listed
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
    assert counts == {False: 5 + 1, True: 12 - 6}  # the last step of each, too; next to it no request is planned ahead
    assert tokens_of(found, "plain") == continuation([1, 2], 12)


# ---------------------------------------------------------------------------------------- equal in every step


class DrawingRunner(LaterRunner):
    """Draws with the real sampler, from logits that fall from the fake model's token on upwards, and round."""

    def compute(self, batch: Batch, number: int) -> StepOutput:
        found = super().compute(batch, number)
        after = {name: [token, *found.tokens_after_drafts.get(name, ())] for name, token in found.tokens.items()}
        said = torch.tensor([after[name].pop(0) for name in batch.logit_ids], dtype=torch.int64)
        drawn = []
        if len(said):
            logits = -((torch.arange(VOCAB) - said[:, None]) % VOCAB).float()
            drawn = sample(logits, batch.sampling, OPS).tolist()
        found.tokens, found.tokens_after_drafts = {}, {}
        for name, token in zip(batch.logit_ids, drawn, strict=True):
            if name not in found.tokens:
                found.tokens[name] = token
            else:
                found.tokens_after_drafts.setdefault(name, []).append(token)
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


def options_of(rng: random.Random) -> dict[str, Any]:
    """Of an engine: roomy or tight, one that swaps or one that computes anew, one that guesses or not."""
    size = rng.choice([1, 2, 4, 8])
    enough = -(-40 // size) + 1
    return {
        "groups": rng.choice(GROUPS),
        "block_size": size,
        "num_blocks": rng.choice([enough, enough + 2, 12 * enough]),
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
            asked += siblings(f"{i}", prompt, rng.randint(2, 3), **params | {"prompt_logprobs": None})
        else:
            asked.append(request(f"{i}", prompt, **params))
        if rng.random() < 0.1 and asked[-1].group is None:
            asked[-1].task = rng.choice([Task.EMBED, Task.LOGLIKELIHOOD])
            asked[-1].sampling = replace(asked[-1].sampling, prompt_logprobs=0)
        if rng.random() < 0.15 and asked[-1].task is Task.GENERATE and sampling is not SAMPLING:
            asked[-1].guide = Residues(rng.randint(1, 12))
    return asked


def both(seed: int) -> tuple[list[list[Event]], list[list[Event]], int]:
    """A load that is there at the start, with both loops: their events by step, and steps planned ahead."""
    found = []
    for loop in LOOPS:
        rng = random.Random(seed)
        options = options_of(rng)
        if options["groups"][-1].window is not None:
            options["num_blocks"] = (
                500  # what is planned ahead takes blocks before windows free some: others are evicted
            )
        engine = later_engine(loop, **options)
        counts = ahead(engine)
        for r in load(rng):
            engine.add(r)
        found.append(steps(engine))
    return found[0], found[1], counts[True]


SHARDS, NUM_SEEDS, LONG_SEEDS = 5, 50, 100


@pytest.mark.parametrize("shard", quick(range(SHARDS), 0, 1))
def test_the_same_events_in_the_same_steps(shard: int, long: bool) -> None:
    """Where requests end when their tokens are all there, each step is the one that would have been planned later."""
    num_ahead = num_steps = 0
    for seed in range(shard, LONG_SEEDS if long else NUM_SEEDS // 2, SHARDS):
        sequential, overlapped, count = both(seed)
        assert overlapped == sequential, seed
        num_ahead, num_steps = num_ahead + count, num_steps + len(overlapped)
    assert num_ahead > num_steps / 3


# -------------------------------------------------------------------------------------- equal for each request


# ------------------------------------------------------------------------------------------ what ends a step too late


def late(end: Callable[[Engine, Request], object], expected: FinishReason | None, **sampling: Any) -> Engine:
    """Let a request end after its seventh token, when the row of that one is under way, which would fill a block.

    The row in vain publishes nothing, tells nothing and keeps no block. Another request notices nothing of it.
    """
    engine = later_engine(block_size=4)
    log, stored = watch(engine), []

    def hear(event: CacheEvent) -> None:
        if isinstance(event, BlockStored) and event.request_id == "r":
            stored.extend(event.token_ids)

    engine.listen(hear)
    engine.add(r := request("r", PROMPT, max_tokens=20, **sampling))
    engine.add(request("other", [1, 2, 3], max_tokens=12))
    got: list[int | None] = []

    def between(events: list[Event]) -> None:
        mine = [event for event in events if event.request_id == "r"]
        got.extend(event.token for event in mine if event.token is not None)
        if len(got) == 7 and mine and mine[-1].finish_reason is None:
            assert log[-3:] == ["launch 7", "compute 6", "commit 6"]
            end(engine, r)

    found = steps(engine, between)
    events = by_request(found)
    assert got == AFTER[:7]
    assert [event.finish_reason for event in events["r"] if event.finish_reason is not None] == [expected]
    assert tokens_of(found, "other") == continuation([1, 2, 3], 12)
    assert r.tokens.tolist() == PROMPT + AFTER[:7]
    assert stored == PROMPT + AFTER[:3]
    return engine


def test_a_stop_token_is_seen_a_step_late() -> None:
    late(lambda engine, r: None, FinishReason.STOP, stop_token_ids=[AFTER[6]])


def test_a_stop_string_is_seen_between_two_steps() -> None:
    late(lambda engine, r: engine.finish("r", FinishReason.STOP), FinishReason.STOP)


def test_an_abort_comes_between_two_steps() -> None:
    late(lambda engine, r: engine.abort("r"), FinishReason.ABORT)


def test_a_length_is_known_in_time() -> None:
    """No row is computed in vain."""
    engine = later_engine()
    counts = ahead(engine)
    for i in range(3):
        engine.add(request(f"{i}", [i, *PROMPT], max_tokens=4 + 3 * i))
    steps(engine)
    drawn = [batch.logit_ids for batch in engine.runner.batches]
    assert [len(ids) for ids in drawn] == [3] * 4 + [2] * 3 + [1] * 3
    assert counts == {True: 9, False: 1}


def test_a_row_without_a_finite_logit_is_seen_a_step_late() -> None:
    engine = later_engine()
    runner = engine.runner
    assert isinstance(runner, LaterRunner)
    compute = runner.compute

    def overflowing(batch: Batch, number: int) -> StepOutput:
        found = compute(batch, number)
        if number == 2:
            runner.drawn["r"] = found.tokens["r"] = INVALID_TOKEN
        return found

    runner.compute = overflowing  # type: ignore[method-assign]
    engine.add(request("r", PROMPT, max_tokens=9))
    engine.add(request("other", [1, 2, 3], max_tokens=9))
    found = steps(engine)
    assert by_request(found)["r"][-1].error == "the model gave no finite logit at position 7"
    assert tokens_of(found, "r") == AFTER[:2]
    assert tokens_of(found, "other") == continuation([1, 2, 3], 9)


def test_what_is_computed_in_vain_is_not_waited_for() -> None:
    engine = later_engine()
    log = watch(engine)
    engine.add(request("r", PROMPT, max_tokens=9, stop_token_ids=[AFTER[1]]))
    steps(engine)
    assert log[-3:] == ["launch 2", "compute 1", "commit 1"]
    assert not engine.has_work
    assert engine.under_way is None
    engine.add(request("again", PROMPT, max_tokens=3))
    assert tokens_of(steps(engine), "again") == AFTER[:3]


def test_an_id_may_be_taken_again_while_its_last_row_is_computed_in_vain() -> None:
    engine = later_engine()
    engine.add(request("other", [1, 2, 3], max_tokens=9))
    engine.add(request("r", PROMPT, max_tokens=9, stop_token_ids=[AFTER[1]]))
    engine.step()
    assert [event.finish_reason for event in engine.step() if event.request_id == "r"] == [FinishReason.STOP]
    engine.add(request("r", PROMPT, max_tokens=4))
    found = steps(engine)
    assert tokens_of(found, "r") == AFTER[:4]
    assert tokens_of(found, "other") == continuation([1, 2, 3], 9)[2:]


# ---------------------------------------------------------------------------------------------------------- failures


def failing(at: int, when: str) -> tuple[dict[str, list[Event]], Engine]:
    """Two requests, of which one comes after the step that fails, in its launch or when it is computed."""
    engine = later_engine()
    runner = engine.runner
    assert isinstance(runner, LaterRunner)
    real = getattr(runner, when)

    def broken(batch: Batch, *number: int) -> object:
        if (number[0] if number else runner.count) == at:
            runner.count += when == "launch"
            raise RuntimeError("injected")
        return real(batch, *number)

    setattr(runner, when, broken)
    engine.add(request("r", PROMPT, max_tokens=9))
    waiting = [request("later", [1, 2, 3], max_tokens=5)]

    def between(events: list[Event]) -> None:
        if waiting and any(event.error for event in events):
            engine.add(waiting.pop())

    found = steps(engine, between)
    return by_request(found), engine


@pytest.mark.parametrize("when", ["launch", "compute"])
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_step_that_fails_ends_its_requests_after_what_came_before(at: int, when: str) -> None:
    found, engine = failing(at, when)
    assert [event.token for event in found["r"]] == [*AFTER[:at], None]
    assert found["r"][-1].error == "RuntimeError: injected"
    assert [event.token for event in found["later"]] == continuation([1, 2, 3], 5)
    assert engine.under_way is None


def test_an_allocation_that_fails_ends_its_request_alone() -> None:
    for loop in LOOPS:
        engine = later_engine(loop, block_size=2)
        [pool] = engine.scheduler.manager.pools
        engine.add(request("r", PROMPT, max_tokens=9))
        engine.add(request("other", [1, 2, 3], max_tokens=9))
        allocate, calls = pool.allocate, iter(range(100))

        def broken(count: int, allocate: Any = allocate, calls: Any = calls) -> array[int]:
            if count and next(calls) in (3, 4):  # blocks of all requests, then those of the first
                raise MemoryError("injected")
            return allocate(count)

        pool.allocate = broken  # type: ignore[method-assign]
        events = by_request(steps(engine))
        errors = {name: its[-1].error for name, its in events.items()}
        assert sorted(map(str, errors.values())) == ["MemoryError: injected", "None"]


@pytest.mark.slow
def test_a_commit_that_raises_leaves_nobody_waiting() -> None:
    """Whoever was not committed is computed again at once, with both loops: others go on for long."""
    for loop in LOOPS:
        engine = later_engine(loop)
        engine.add(request("long", [1, 2, 3], max_tokens=100))
        engine.add(r := request("r", PROMPT, max_tokens=6, logprobs=0))
        for _ in range(2):
            engine.step()
        commit_item = engine.scheduler.committer._commit_item

        def broken(item: PlanItem, output: StepOutput, real: Any = commit_item) -> Event | None:
            if item.request.id == "r":
                raise MemoryError("injected")
            return real(item, output)

        engine.scheduler.committer._commit_item = broken  # type: ignore[method-assign]
        with pytest.raises(MemoryError, match="injected"):
            engine.step()
        engine.scheduler.committer._commit_item = commit_item  # type: ignore[method-assign]
        for _ in range(4):
            engine.step()
        assert r.tokens.tolist() == PROMPT + AFTER[:6]
        assert r.finish_reason is FinishReason.LENGTH
        engine.scheduler.audit()
        steps(engine)


def test_nothing_is_planned_ahead_of_a_step_that_resumes_somebody() -> None:
    """It swaps siblings in, with budget left for one of them, and fails: the other one is computed anew, not ahead."""
    engine = later_engine(num_host_blocks=40, enable_prefix_caching=False)
    scheduler, runner = engine.scheduler, engine.runner
    assert isinstance(runner, LaterRunner)
    engine.add(first := request("first", [1, 2, 3], max_tokens=5))
    unit = siblings("s", PROMPT, 2, max_tokens=8)
    for r in unit:
        engine.add(r)
    engine.loop = SequentialLoop()
    while first.num_generated < 3:
        engine.step()
    engine.loop = OverlappedLoop()
    keep_running, compute = scheduler._keep_running, runner.compute

    def without_unit(plan: Plan) -> list[int]:
        scheduler._keep_running = keep_running  # type: ignore[method-assign]
        lacking = keep_running(plan)
        plan.items = [item for item in plan.items if item.request is first]
        plan.num_tokens = 1
        scheduler._preempt(unit, scheduler._swap_out(unit), plan)
        return lacking

    def broken(batch: Batch, number: int) -> StepOutput:
        compute(batch, number)
        runner.compute = compute  # type: ignore[method-assign]
        raise RuntimeError("injected")

    scheduler._keep_running = without_unit  # type: ignore[method-assign]
    engine.step()
    assert list(scheduler.swapped) == unit
    scheduler.max_num_batched_tokens = 2  # of the first one's last token, and one of the unit
    runner.compute = broken  # type: ignore[method-assign]
    assert sorted(event.request_id for event in engine.step()) == ["first", "s-0"]
    engine.scheduler.audit()
    steps(engine)
    assert unit[1].tokens.tolist() == PROMPT + AFTER[:8]


def test_an_interrupt_of_a_launch_in_vain_is_raised() -> None:
    engine = later_engine()
    engine.add(request("r", PROMPT, max_tokens=9, stop_token_ids=[AFTER[1]]))
    engine.step()
    launch = engine.runner.launch

    def interrupted(batch: Batch) -> object:
        raise KeyboardInterrupt

    engine.runner.launch = interrupted  # type: ignore[method-assign, assignment]
    assert [event.finish_reason for event in engine.step()] == [FinishReason.STOP]
    engine.runner.launch = launch  # type: ignore[method-assign]
    engine.add(request("again", PROMPT, max_tokens=3))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert tokens_of(steps(engine), "again") == AFTER[:3]


def test_planning_ahead_that_raises_loses_nothing() -> None:
    engine = later_engine()
    engine.add(request("r", PROMPT, max_tokens=5))
    found = [engine.step()]
    plan_ahead = engine.scheduler.plan_ahead

    def broken(before: Plan) -> Plan | None:
        raise MemoryError("injected")

    engine.scheduler.plan_ahead = broken  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(MemoryError, match="injected"):
            engine.step()
    engine.scheduler.plan_ahead = plan_ahead  # type: ignore[method-assign]
    found += steps(engine)
    assert tokens_of(found, "r") == AFTER[:5]
    engine.scheduler.audit()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_lost_device_is_told(loop: type[Loop]) -> None:
    """After an illegal address, say, every call of CUDA fails: the step's requests end, and the caller hears of it."""
    engine = later_engine(loop)
    engine.add(request("r", PROMPT, max_tokens=9))
    engine.step()
    engine.runner.lost = engine.runner.fail_next = True
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
    assert not engine.has_work
    engine.scheduler.audit()
