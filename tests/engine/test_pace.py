"""Pace: prompts are computed in shorter pieces while others wait for their next token."""

from __future__ import annotations

import random

import pytest

from quire.engine.prefill_budget import LEAST, LONGEST_STEP, PrefillBudget
from tests.engine.fakes import Engine, continuation, fake_engine, request, run


def test_a_step_is_as_long_as_what_steps_took_lets_it_be() -> None:
    pace = PrefillBudget(1e-3)
    assert pace.most(1) == 500  # by what was expected
    pace.observe(LEAST - 1, 100.0)  # too few tokens to tell
    assert pace.most(1) == 500
    pace.observe(1000, 4.0)  # the first one that was measured is believed
    assert pace.most(1) == 125
    for _ in range(40):
        pace.observe(500, 0.5)
    assert pace.most(1) == pytest.approx(LONGEST_STEP / 1e-3, rel=0.01)
    pace.observe(500, 60.0)  # the machine slept; afterwards that is forgotten
    for _ in range(40):
        pace.observe(100, 0.1)
    assert pace.most(1) == pytest.approx(LONGEST_STEP / 1e-3, rel=0.01)
    for _ in range(40):
        pace.observe(100, 1e5)
    assert pace.most(30) == 30 + LEAST  # those that decode, and a piece of a prompt
    pace.observe(100, 0.0)
    assert PrefillBudget(0.0).most(1) > 10**6


def test_it_holds_whole_steps_to_their_length_whatever_a_step_costs() -> None:
    """a + b * tokens, with a fixed part that is no prompt's."""
    for fixed, each in ((0.05, 2e-3), (0.2, 5e-3), (0.0, 1e-4)):
        pace = PrefillBudget(1e-6)
        for _ in range(60):
            count = min(2048, pace.most(1))
            pace.observe(count, seconds := fixed + each * count)
        assert count == 2048 or count == 1 + LEAST or seconds == pytest.approx(LONGEST_STEP, rel=0.1)


def planned(engine: Engine) -> list[int]:
    """How many tokens each step computes until nothing is left."""
    found, before = [], engine.scheduler.num_planned
    while engine.has_work:
        engine.step()
        before, count = engine.scheduler.num_planned, engine.scheduler.num_planned - before
        found.append(count)
    return found


def test_prompts_are_cut_shorter_while_others_decode_and_say_the_same() -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(250) for _ in range(size)] for size in (5, 300, 250)]

    def engine(pace: PrefillBudget | None) -> Engine:
        made = fake_engine(num_blocks=400, max_model_len=400, max_num_batched_tokens=256)
        made.scheduler.pace = pace
        return made

    slow = PrefillBudget(LONGEST_STEP / 70)  # 70 tokens take as long as a step may
    slow.observe = lambda num_tokens, seconds: None  # type: ignore[method-assign]
    steps = {}
    for name, pace in (("plain", None), ("paced", slow)):
        one = engine(pace)
        one.add(request("a", prompts[0], max_tokens=40))
        one.step()  # from here on it decodes
        for i, prompt in enumerate(prompts[1:]):
            one.add(request(str(i), prompt, max_tokens=5))
        steps[name] = planned(one)
    assert max(steps["plain"]) == 256
    assert max(steps["paced"]) == 70
    assert sum(steps["paced"]) == sum(steps["plain"])
    alone = engine(slow)
    alone.add(request("a", prompts[1], max_tokens=2))
    assert planned(alone)[0] == 256  # no other waits
    both = engine(slow)
    for i, prompt in enumerate(prompts):
        both.add(request(str(i), prompt, max_tokens=30))
    texts = run(both)
    assert [texts[str(i)][0] for i in range(3)] == [continuation(prompt, 30) for prompt in prompts]
