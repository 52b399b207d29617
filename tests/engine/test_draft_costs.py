"""How many draft tokens pay: with measured costs of rows and drafts, and more requests than a few."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from quire import LLM, SamplingParams
from quire.engine.draft_costs import DraftCosts
from quire.engine.engine import Engine
from quire.engine.speculation import MAX_ROWS, Asked, Draft, Room, Speculation
from quire.request import Request
from tests.engine.fakes import FakeRunner, continuation, fake_engine, next_token, request

NUM_TOKENS = 120


class Clock:
    """Seconds that pass when something is computed."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Knowing:
    """A drafter that is right with a given probability, and takes a given time for a token, and for one it missed."""

    def __init__(self, clock: Clock, share: float, seconds: float, behind: float) -> None:
        self.clock, self.share, self.seconds, self.random = clock, share, seconds, random.Random(1)
        self.behind, self.known = behind, WeakKeyDictionary[Request, int]()
        self.asked: list[int] = []

    name = "knowing"

    def propose(self, asked: Sequence[Asked], _: Room) -> list[Draft]:
        drafts: list[Draft] = []
        for one, most in asked:
            after = continuation(list(one.tokens), most)
            drafts.append([t if self.random.random() < self.share else (t + 1) % 20 for t in after])
            self.clock.now += self.behind * (len(one.tokens) - self.known.get(one, 0))
            self.known[one] = len(one.tokens)
        self.asked.append(sum(map(len, drafts)))
        self.clock.now += self.seconds * self.asked[-1]
        return drafts

    def judge(self, request: Request, num_drafts: int, num_right: int) -> None: ...


def run(
    streams: int, a: float, b: float, share: float | None, draft: float = 0.0, behind: float = 0.0
) -> tuple[float, Any]:
    """Seconds until all of these requests end, where a step takes a + b * rows, and the drafter; share None: none."""
    clock = Clock()
    drafter = None if share is None else Knowing(clock, share, draft, behind)
    speculation = None if drafter is None else Speculation([drafter], 5, clock)
    made: Engine = fake_engine(
        num_blocks=streams * NUM_TOKENS // 2, max_num_seqs=streams, max_num_batched_tokens=400, speculation=speculation
    )
    made.scheduler.clock = clock
    assert isinstance(made.runner, FakeRunner)
    compute = made.runner.run

    def timed(batch: Any) -> Any:
        clock.now += a + b * len(batch.token_ids)
        return compute(batch)

    made.runner.run = timed  # type: ignore[method-assign]
    for i in range(streams):
        made.add(request(f"r{i}", [i % 20, 3], max_tokens=NUM_TOKENS))
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(streams)}
    while made.has_work:
        for event in made.step():
            if event.token is not None:
                tokens[event.request_id].append(event.token)
    assert tokens == {f"r{i}": continuation([i % 20, 3], NUM_TOKENS, model=next_token) for i in range(streams)}
    return clock.now, drafter


@pytest.mark.parametrize(
    ("streams", "a", "b", "share", "draft", "behind", "least"),
    [
        (8, 10.0, 0.1, 0.7, 0.1, 0.0, 1.4),  # a step that is bound by reading the weights
        (8, 10.0, 0.4, 0.8, 0.1, 0.0, 1.2),
        (32, 10.0, 0.1, 0.8, 0.05, 0.0, 1.15),
        (32, 1.0, 1.0, 0.8, 0.1, 0.0, 0.98),  # a step that is bound by its operations
        (32, 10.0, 0.4, 0.2, 0.3, 0.0, 0.98),  # a drafter that is mostly wrong
        (32, 10.0, 0.1, 0.8, 1.0, 0.0, 0.98),  # one that is slow
        (32, 5.0, 0.5, 0.5, 0.3, 0.2, 0.98),  # one that has much to catch up with after each rest
    ],
)
def test_drafts_of_many_requests_pay_or_are_left_out(
    streams: int, a: float, b: float, share: float, draft: float, behind: float, least: float
) -> None:
    plain, _ = run(streams, a, b, None)
    seconds, drafter = run(streams, a, b, share, draft, behind)
    assert plain / seconds >= least, f"{plain / seconds:.3f}"
    if least > 1:
        assert max(drafter.asked) > MAX_ROWS
    else:
        assert sum(drafter.asked) < NUM_TOKENS


def test_the_cost_of_a_row_is_learned_from_steps_of_different_sizes() -> None:
    costs, chance = DraftCosts(), random.Random(0)
    costs.observe(8, 2.0)
    assert costs.row == pytest.approx(2.0 / 20), "assumed: a twelfth of the part of a step that rows do not change"
    costs = DraftCosts()
    for _ in range(300):
        rows = chance.choice([8, 16, 24, 40])
        costs.observe(rows, (10 + 0.3 * rows) * chance.uniform(0.9, 1.1) * (30 if chance.random() < 0.01 else 1))
        costs.observe_drafts(10, 2.0)
    assert costs.row == pytest.approx(0.3, rel=0.4)
    assert costs.price == pytest.approx(costs.row + 0.2)
    assert costs.step(8) == pytest.approx(12.4, rel=0.1)


@pytest.mark.slow
def test_a_head_computes_nothing_while_it_is_not_asked() -> None:
    """And then all rows in one go: its drafts are as good as if it had computed each at once."""
    shares = []
    for others in (0, 6):
        llm = LLM(num_blocks=300, draft="head", num_speculative_tokens=3, max_num_seqs=8)
        speculation = llm.engine.scheduler.speculation
        assert speculation is not None
        drafter: Any = speculation.drafters[0]
        speculation._rest = 10_000  # no drafts with more than a few requests
        prompt = llm.tokenizer.encode("class Stack:\n    def ") if llm.tokenizer else []
        params = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
        llm.engine.add(Request("long", array("i", prompt), len(prompt), params))
        for i in range(others):
            short = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
            llm.engine.add(Request(f"{i}", array("i", [i + 5, 9]), 2, short))
        while llm.engine.has_work:
            llm.engine.step()
            if len(llm.engine.scheduler.running) > 4:
                assert drafter.num_computed == 0
        assert drafter.num_computed < 2.2 * (len(prompt) + 120)
        shares.append(speculation.num_right / speculation.num_draft_tokens)
    assert shares[1] > shares[0] - 0.1 > 0.4
