"""Leaps: what comes out is what stepping gives, to the last bit."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import engine_config
from quire.engine.cost import DEVICES, Device
from quire.engine.prefill_budget import PrefillBudget
from quire.engine.trace import TraceRow
from quire.simulate.device import Rates, ReplicaCost, ServerFit, StepFit
from quire.simulate.simulation import Simulation
from tests.simulate.test_simulation import SLOW, TOY, TWO_GROUPS

FIT = StepFit(step=0.01, sequence=1e-4, token=2e-4, drawn=1e-5, weight_byte=1e-6, cache_byte=3e-8, linear_flop=1e-9,
              attention_flop=1e-9, context_flop=1e-9, exponent=3, rows=((1, 1.1), (3, 0.7), (12, 1.3)))  # fmt: skip

SERVER = ServerFit(step=1e-3, drawn=1e-4, arrival=3e-3, mixed_row=2e-5, loaded=5e-5, host_step=2e-3, host_token=3e-5)


def rows_of(seed: int, count: int, rate: float, longest: int) -> list[TraceRow]:
    rng, now, rows = random.Random(seed), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate) * rng.choice([0, 1, 1])
        prompt = rng.randint(1, longest)
        shared = rng.choice([0, 0, min(prompt, 40)])
        prefix = f"p{rng.randrange(3)}" if shared else ""
        rows.append(TraceRow(now, prompt, rng.randint(0, longest), prefix, shared))
    return rows


@pytest.mark.slow
def test_leaps_give_what_steps_give(long: bool) -> None:
    @settings(max_examples=60 if long else 10, deadline=None)
    @given(
        st.integers(0, 2**30),
        st.sampled_from([12, 30, 100, 1000]),
        st.sampled_from([1, 3, 16]),
        st.sampled_from(["recompute", "swap"]),
        st.booleans(),
        st.sampled_from([0, 1, 7, 61]),
        st.sampled_from([0.01, 0.2, 2.0]),
    )
    def compare(seed: int, blocks: int, slots: int, preemption: str, caching: bool, every: int, rate: float) -> None:
        assert_leaps_give_what_steps_give(seed, blocks, slots, preemption, caching, every, rate)

    compare()


def assert_leaps_give_what_steps_give(
    seed: int, blocks: int, slots: int, preemption: str, caching: bool, every: int, rate: float
) -> None:
    rows = rows_of(seed, 25, rate, 120)
    options = {"num_blocks": blocks, "max_num_seqs": slots, "max_num_batched_tokens": 32, "preemption": preemption}
    config = engine_config(**options, enable_prefix_caching=caching)
    hosts = 40 if preemption == "swap" else 0
    found = []
    for leaps in (False, True):
        cost = ReplicaCost(TOY, FIT, config.cache.block_size, SERVER) if seed % 2 else None
        if cost is not None:
            cost.rates = Rates(full=seed % 4 == 1)
        one = Simulation(
            TOY, SLOW, config, num_host_blocks=hosts, hashed=True, sample_every=every, leaps=leaps, cost=cost
        )
        found.append(one.run(rows))
        one.scheduler.audit()
    assert found[0] == found[1]
    assert found[0].finished + found[0].refused == 25


@pytest.mark.long
@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**30), st.sampled_from([400, 4000]), st.sampled_from([2.0, 20.0]))
def test_leaps_keep_the_pace_of_steps(seed: int, blocks: int, rate: float) -> None:
    """With so many that decode, the pace learns from each step, and bounds the prompts that are computed with them."""
    rows = rows_of(seed, 120, rate, 200)
    found = []
    for leaps in (False, True):
        config = engine_config(num_blocks=blocks, max_num_seqs=100, max_num_batched_tokens=256)
        one = Simulation(TOY, SLOW, config, hashed=True, leaps=leaps)
        one.scheduler.pace = PrefillBudget(3e-3)
        found.append(one.run(rows))
    assert found[0] == found[1]


def test_a_prompt_is_planned_without_those_that_decode() -> None:
    one = Simulation(TOY, SLOW, engine_config(num_blocks=300))
    planned = []
    real = one.scheduler.commit
    one.scheduler.commit = lambda plan, output: planned.append(len(plan.items)) or real(plan, output)  # type: ignore[method-assign, func-returns-value]
    found = one.run([TraceRow(at, 100, 500) for at in (0.0, 500.0, 1000.0)])
    assert (found.finished, found.new_tokens) == (3, 1500)
    assert sum(planned) == 3
    assert max(planned) == 1


def test_a_leap_makes_few_plans() -> None:
    """One request alone: a plan for its prompt, and the rest in one leap."""
    one = Simulation(TOY, SLOW, engine_config(num_blocks=100))
    plans = []
    real = one.scheduler.plan
    one.scheduler.plan = lambda: plans.append(0) or real()  # type: ignore[method-assign, func-returns-value]
    assert one.run([TraceRow(0.0, 100, 500)]).steps == 500
    assert len(plans) == 1


@pytest.mark.parametrize("device", [SLOW, DEVICES["h200"]])
def test_windows_are_stepped_through(device: Device) -> None:
    rows = rows_of(5, 20, 1.0, 60)
    config = engine_config(num_blocks=50, max_num_seqs=4)
    one, other = (Simulation(TWO_GROUPS, device, config, hashed=True, leaps=leaps).run(rows) for leaps in (False, True))
    assert one == other
