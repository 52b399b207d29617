"""The rows of requests that merely decode: which requests have one, and in which order.

The random runs compare each batch with one that is laid out request by request, and audit the rows.
"""

from __future__ import annotations

import gc
import random
from typing import Any
from weakref import WeakSet

import pytest

from quire.engine.decode_rows import DecodeRows
from quire.engine.engine import Engine
from quire.engine.loops import Loop, OverlappedLoop, SequentialLoop
from quire.engine.plan import Plan
from quire.engine.policy import by_priority
from quire.engine.speculation import PromptLookup, Speculation
from quire.errors import BadValue
from tests.engine.fakes import circling, continuation, fake_engine, forget_free_blocks, request, siblings


def rows_of(engine: Engine) -> DecodeRows:
    """The settled rows of an engine."""
    rows = engine.scheduler.rows
    assert rows is not None
    rows.settle()
    return rows


def test_requests_join_after_their_first_token_and_leave_at_their_end() -> None:
    engine = fake_engine()
    engine.add(request("a", [1, 2, 3], max_tokens=6))
    engine.add(request("long", [*range(1, 60)], max_tokens=3))
    engine.step()
    assert rows_of(engine).ids == ["a"]  # the other one's prompt takes two steps
    engine.add(request("b", [4], max_tokens=2))
    engine.step()
    assert rows_of(engine).ids == ["a", "long", "b"]
    engine.abort("long")
    assert rows_of(engine).ids == ["a", "b"]
    while engine.has_work:
        engine.step()
    assert rows_of(engine).ids == []


def test_rows_are_in_the_order_of_ranks() -> None:
    engine = fake_engine(order=by_priority)
    for name, priority in (("late", 2), ("early", 1), ("first", 0)):
        one = request(name, [1, 2, 3], max_tokens=9)
        one.priority = priority
        engine.add(one)
        engine.step()
    assert rows_of(engine).ids == ["first", "early", "late"]
    engine.scheduler.audit()


def test_a_request_whose_numbers_do_not_fit_any_more_loses_its_row() -> None:
    engine = fake_engine()
    engine.add(one := request("r", [1, 2, 3], max_tokens=9))
    engine.step()
    rows = rows_of(engine)
    one.tokens.append(5)  # its token before is not computed yet
    with pytest.raises(BadValue, match="length, last token"):
        rows.audit(engine.scheduler.running)
    rows.note(one)
    assert rows_of(engine).ids == []
    del one.tokens[-1]
    rows.note(one)
    assert rows_of(engine).ids == ["r"]


def test_the_random_numbers_of_a_row_do_not_depend_on_the_others() -> None:
    engine = fake_engine()
    engine.add(request("a", [1, 2, 3], max_tokens=60, seed=1))
    alone = []
    for _ in range(40):
        engine.step()
        alone.append(rows_of(engine).uniforms(0)[0])
    engine = fake_engine()
    engine.add(request("b", [7], max_tokens=60, seed=2))
    for _ in range(5):
        engine.step()
    engine.add(request("a", [1, 2, 3], max_tokens=60, seed=1))
    found = []
    for _ in range(40):
        engine.step()
        rows = rows_of(engine)
        found.append(rows.uniforms(0)[rows.ids.index("a")])
    assert found == alone
    assert len(set(found)) == 40


class AllowsAll:
    """A guide without restrictions: its request has no row."""

    done = False

    def allowed(self) -> None: ...
    def accept(self, token: int) -> None: ...


@pytest.mark.slow
def test_nothing_is_swapped_out_before_it_is_copied() -> None:
    """In scarce pools, samples that get their own copy of a block next to a request without a row, of earlier rank."""
    num_preemptions = 0
    for seed in [123, *range(60)]:
        rng = random.Random(seed)
        engine = fake_engine(
            num_blocks=rng.randint(6, 14), num_host_blocks=64, max_model_len=24, enable_prefix_caching=False
        )
        plan = engine.scheduler.plan

        def checked(plan: Any = plan) -> Plan:
            found: Plan = plan()
            copied = {(move.group, move.dst) for move in found.copies}
            assert copied.isdisjoint((move.group, move.src) for move in found.swap_out)
            return found

        engine.scheduler.plan = checked  # type: ignore[method-assign]
        guided = request("g", [rng.randrange(200) for _ in range(rng.randint(1, 9))], max_tokens=rng.randint(5, 14))
        guided.guide = AllowsAll()  # type: ignore[assignment]
        expected, found, at = {}, dict[str, list[int]](), rng.randint(0, 6)
        coming = [guided]
        for step in range(300):
            if step == at:
                prompt = [rng.randrange(200) for _ in range(rng.randint(2, 10))]
                coming += siblings("s", prompt, rng.randint(2, 3), max_tokens=rng.randint(2, 12))
            while coming:
                engine.add(one := coming.pop(0))
                expected[one.id] = continuation(one.tokens.tolist(), one.sampling.max_tokens or 0)
            if not engine.has_work and step > at:
                break
            for event in engine.step():
                if event.token is not None:
                    found.setdefault(event.request_id, []).append(event.token)
            forget_free_blocks(engine)
        assert found == expected, seed
        num_preemptions += engine.scheduler.num_preemptions
    assert num_preemptions > 10


@pytest.mark.parametrize("kind", ["plain", "to_check"])
def test_drafts_are_proposed_next_to_requests_without_a_row(kind: str) -> None:
    speculation = Speculation([PromptLookup()], 3)
    engine = fake_engine(speculation=speculation, model=circling, max_model_len=120)
    engine.add(request("a", [1, 2, 3, 4, 5, 0, 1, 2], max_tokens=60))
    other = request("b", [1, 2, 3], max_tokens=60)
    if kind == "to_check":
        other.resume(continuation([1, 2, 3], 50, model=circling), 50)
    engine.add(other)
    num_steps = 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert speculation.num_drafts > 20
    assert num_steps < 40


@pytest.mark.parametrize("name", ["_resize", "_widen", "_add_block", "_load_blocks", "_reorder"])
def test_rows_are_read_again_after_a_change_that_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {f"r{i}": [*range(i + 1, i + 4)] for i in range(3)}
    for when in (1, 2, 4, 6):
        engine, found = fake_engine(), {name: list[int]() for name in prompts}
        calls, real = [0], getattr(DecodeRows, name)

        def broken(*given: Any, calls: list[int] = calls, real: Any = real, when: int = when) -> Any:
            calls[0] += 1
            if calls[0] == when:
                raise MemoryError("injected")
            return real(*given)

        for one, prompt in prompts.items():
            engine.add(request(one, prompt, max_tokens=30 - 5 * len(found[one]) - 3 * prompt[0]))
        monkeypatch.setattr(DecodeRows, name, broken)
        while engine.has_work:
            try:
                events = engine.step()
            except MemoryError:
                continue
            for event in events:
                if event.token is not None:
                    found[event.request_id].append(event.token)
        monkeypatch.setattr(DecodeRows, name, real)
        for one, prompt in prompts.items():
            assert found[one] == continuation(prompt, len(found[one]))
            assert len(found[one]) == 30 - 3 * prompt[0]


def test_a_row_is_special_until_it_has_min_tokens() -> None:
    engine = fake_engine()
    engine.add(request("r", [1, 2, 3], max_tokens=8, min_tokens=4, stop_token_ids=(250,)))
    engine.add(request("penalty", [4, 5], max_tokens=8, min_tokens=2, presence_penalty=0.5))
    special = []
    while engine.has_work:
        engine.step()
        special.append([rows_of(engine).ids[row] for row in rows_of(engine).special])
        engine.scheduler.audit()
    assert special == [["r", "penalty"]] * 3 + [["penalty"]] * 4 + [[]]
    assert len(engine.runner.batches[1].sampling.banned_rows) == 1
    assert len(engine.runner.batches[5].sampling.banned_rows) == 0


@pytest.mark.parametrize("loop", [SequentialLoop, OverlappedLoop])
def test_an_idle_engine_refers_to_no_request(loop: type[Loop]) -> None:
    engine = fake_engine(loop=loop())
    for i in range(3):
        engine.add(request(str(i), [1, 2, i], max_tokens=3 + i))
    left = WeakSet(engine.scheduler.requests.values())
    while engine.has_work:
        engine.step()
    gc.collect()
    assert not left
