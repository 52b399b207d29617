"""Whatever fails: an allocation, a copy, a swap. Nothing leaks, nothing hangs, the others get their tokens."""

import random
from collections.abc import Callable

import pytest

from quire.engine.engine import Engine
from quire.engine.plan import INVALID_TOKEN, StepOutput
from quire.errors import BadValue
from quire.models.batch import Batch
from quire.request import FinishReason, Request
from tests.engine.fakes import VOCAB, FakeRunner, continuation, fake_engine, forget_free_blocks, request, run, siblings
from tests.marks import quick

LIMIT = 20_000  # steps


class Faults:
    """Raises in every k-th call that goes through it."""

    def __init__(self, every: int) -> None:
        self.every, self.calls, self.raised = every, 0, 0

    def wrap(self, call: Callable) -> Callable:  # type: ignore[type-arg]
        def wrapped(*arguments: object) -> object:
            self.calls += 1
            if self.calls % self.every == 0:
                self.raised += 1
                raise MemoryError("injected")
            return call(*arguments)

        return wrapped


def busy_engine(rng: random.Random) -> Engine:
    return fake_engine(
        num_blocks=24, block_size=4, num_host_blocks=rng.choice([0, 12, 40]), max_num_batched_tokens=16, max_num_seqs=6
    )


def load(engine: Engine, rng: random.Random) -> list[Request]:
    """Prompts with common stems, some with siblings; more than the pool holds at a time."""
    stems = [[rng.randrange(VOCAB) for _ in range(14)] for _ in range(3)]
    requests = []
    for i in range(14):
        prompt = [*rng.choice(stems)[: rng.randint(1, 14)], *(rng.randrange(9) for _ in range(rng.randint(0, 6)))]
        count = rng.choice([1, 1, 3])
        requests += (
            siblings(f"r{i}", prompt, count, max_tokens=18) if count > 1 else [request(f"r{i}", prompt, max_tokens=18)]
        )
    for r in requests:
        engine.add(r)
    return requests


def drain(engine: Engine, requests: list[Request]) -> int:
    """Run to the end. How many requests ended with an error; the others have all of their tokens."""
    for _ in range(LIMIT):
        if not engine.has_work:
            break
        engine.step()
        engine.scheduler.audit()
        forget_free_blocks(engine)
    assert not engine.has_work
    manager = engine.scheduler.manager
    assert all(pool.num_free == pool.num_blocks for pool in (*manager.pools, *manager.host_pools))
    for r in requests:
        tokens = r.tokens.tolist()
        assert tokens[r.num_prompt :] == continuation(tokens[: r.num_prompt], r.num_generated)
        assert r.finish_reason is FinishReason.ERROR or r.num_generated == 18
    return sum(r.finish_reason is FinishReason.ERROR for r in requests)


@pytest.mark.parametrize("every", quick([3, 11, 1, 23, 2, 5, 7, 50], 2, 3))
@pytest.mark.parametrize("seed", quick(range(8), 1, 1))
@pytest.mark.parametrize("what", ["allocate", "host allocate", "match", "grow", "swap_out", "swap_in"])
def test_planning(what: str, every: int, seed: int) -> None:
    """A request that cannot be planned ends with an error, one that cannot be swapped is computed again."""
    rng, faults = random.Random(seed), Faults(every)
    engine = busy_engine(rng)
    requests = load(engine, rng)
    manager = engine.scheduler.manager
    if what.endswith("allocate"):
        for pool in manager.host_pools if what.startswith("host") else manager.pools:
            pool.allocate = faults.wrap(pool.allocate)
    else:
        owner = manager.lookup if what == "match" else manager
        setattr(owner, what, faults.wrap(getattr(owner, what)))
    failed = drain(engine, requests)
    assert failed <= faults.raised
    if what in ("host allocate", "swap_out"):
        assert failed == 0  # it is computed again instead
    else:
        assert (failed > 0) == (faults.raised > 0)
    assert faults.raised > 0 or every > 20 or what in ("host allocate", "swap_in", "swap_out")
    if every == 1 and what in ("allocate", "match"):
        assert failed == len(requests)


class FaultyRunner(FakeRunner):
    """Fails in every k-th step that swaps or copies, before, between or after the moves."""

    faults = Faults(1)
    moved = 0

    def move(self, batch: Batch) -> None:
        moves = any(group.swap_out.src or group.swap_in.src or group.copies for group in batch.moves)
        if not moves:
            return
        self.moved += 1
        if self.moved % 2:
            super().move(batch)
        self.faults.wrap(super().move)(batch)


@pytest.mark.parametrize("every", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("seed", quick(range(12), 1, 2))
def test_moving(every: int, seed: int) -> None:
    """What a failed step should have moved is not trusted: preempted requests are computed again."""
    rng = random.Random(seed)
    engine = busy_engine(rng)
    runner = FaultyRunner(24, 4, engine.scheduler.manager.groups, engine.scheduler.manager.host_pools[0].num_blocks)
    runner.faults = Faults(every)
    engine.runner = runner
    requests = load(engine, rng)
    failed = drain(engine, requests)
    assert (failed > 0) == (runner.faults.raised > 0)
    assert runner.faults.raised > 0 or every > 2


def test_a_step_that_cannot_swap_out_loses_nothing_of_the_one_that_gave_way() -> None:
    engine = fake_engine(num_blocks=4, block_size=4, num_host_blocks=4)
    old, young = request("old", [5, 6, 7, 8], max_tokens=9), request("young", [1, 2, 3, 4], max_tokens=9)
    runner = FaultyRunner(4, 4, engine.scheduler.manager.groups, 4)
    engine.runner = runner
    for r in (old, young):
        engine.add(r)
    drained = 0
    while engine.has_work:
        engine.step()
        drained += 1
        assert drained < 100
    assert runner.faults.raised == 1
    assert (old.finish_reason, young.finish_reason) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert young.tokens.tolist()[4:] == continuation([1, 2, 3, 4], 9)


def test_a_step_is_under_way_while_it_is_computed() -> None:
    """And not after it, however it ends."""
    engine = fake_engine(block_size=4)
    engine.add(request("r", [1, 2, 3], max_tokens=3))
    run, seen = engine.runner.run, []

    def look(batch: Batch) -> StepOutput:
        assert engine.under_way is not None
        seen.append(engine.under_way.num_tokens)
        return run(batch)

    engine.runner.run = look
    engine.step()
    assert (seen, engine.under_way) == ([3], None)
    engine.runner.fail_next = True
    engine.step()
    assert (seen, engine.under_way) == ([3, 1], None)


def test_an_interrupted_step_ends_its_requests_and_is_raised_again() -> None:
    """Its copies were not made, so nobody may go on as if they had been."""
    engine = fake_engine(block_size=4)
    waiting = request("waiting", [9, 9], max_tokens=3)
    for r in siblings("s", [1, 2, 3, 4, 5, 6], 3, max_tokens=9):
        engine.add(r)
    engine.step()
    move = engine.runner.move

    def interrupted(batch: Batch) -> None:
        assert any(group.copies for group in batch.moves)
        raise KeyboardInterrupt

    engine.runner.move = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.move = move
    assert not engine.has_work
    engine.scheduler.audit()
    engine.add(waiting)
    assert run(engine)["waiting"][0] == continuation([9, 9], 3)


def test_a_salt_that_is_no_unicode_is_as_good_as_another() -> None:
    engine = fake_engine(block_size=4)
    for i, salt in enumerate(["\ud800", "\ud800", "\udfff"]):
        r = request(f"r{i}", list(range(12)), max_tokens=2)
        r.cache_salt = salt
        engine.add(r)
        run(engine)
    assert (engine.scheduler.manager.hits.hits, engine.scheduler.manager.hits.misses) == (1, 2)


def test_nothing_without_a_finite_logit_is_shared() -> None:
    engine = fake_engine(block_size=4)
    real = engine.runner.run

    def without_logits(batch: Batch) -> StepOutput:
        return StepOutput(dict.fromkeys(real(batch).tokens, INVALID_TOKEN))

    engine.runner.run = without_logits
    for r in siblings("s", list(range(12)), 3, max_tokens=2):
        engine.add(r)
    [event] = engine.step()
    assert event.error == "the model gave no finite logit at position 12"
    assert not engine.scheduler.manager.indexes[0].by_block
    engine.runner.run = real
    results = run(engine)
    assert results["s-1"][0] == results["s-2"][0] == continuation(list(range(12)), 2)


def test_the_audit_sees_requests_that_stand_in_the_wrong_list() -> None:
    def engine() -> Engine:
        made = fake_engine(num_blocks=4, block_size=4, num_host_blocks=8, max_num_seqs=2)
        for i in range(4):
            made.add(request(f"r{i}", [i] * 6, max_tokens=9))
        while not made.scheduler.swapped:
            made.step()
        made.scheduler.audit()
        return made

    lost = engine()
    lost.scheduler.waiting.pop()
    with pytest.raises(BadValue, match="4 requests are 3 times in the scheduler's lists"):
        lost.scheduler.audit()
    wrong = engine()
    wrong.scheduler.running += wrong.scheduler.swapped
    wrong.scheduler.swapped.clear()
    with pytest.raises(BadValue, match="has blocks elsewhere than the scheduler believes"):
        wrong.scheduler.audit()
    unsorted = engine()
    unsorted.add(request("r4", [4], max_tokens=1))
    unsorted.scheduler.swapped.append(unsorted.scheduler.running[0])
    del unsorted.scheduler.running[0]
    with pytest.raises(BadValue):
        unsorted.scheduler.audit()
    forgotten = engine()
    forgotten.scheduler.waiting._heap.clear()
    with pytest.raises(BadValue, match="the first of the waiting requests is not known as such"):
        forgotten.scheduler.audit()
