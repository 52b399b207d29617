"""The rates of a replica's steps: found under noise, followed when they change, and sane whatever is observed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import BadValue
from quire.fleet.rates import STEP_IN_PROMPT_TOKENS, WARM_UP, StepRates

STEP, PROMPT_TOKEN, SEQUENCE = 0.006, 0.0002, 0.0003  # seconds


def observe(rates: StepRates, seed: int, steps: int, factor: float = 1.0, noise: float = 0.05) -> None:
    """Steps of all kinds: half of them only decode, the others compute a prompt or a part of one, too."""
    rng = random.Random(seed)
    for _ in range(steps):
        tokens, sequences = rng.choice([0, 0, 256, rng.randrange(1, 257)]), rng.randrange(32)
        seconds = factor * (STEP + PROMPT_TOKEN * tokens + SEQUENCE * sequences)
        rates.observe(tokens, sequences, seconds * max(0.5, rng.gauss(1, noise)))


def relative(rates: StepRates) -> tuple[float, float, float]:
    """The three rates over the true ones."""
    return (
        rates.seconds_a_step / STEP,
        rates.seconds_a_prompt_token / PROMPT_TOKEN,
        rates.seconds_a_sequence / SEQUENCE,
    )


@pytest.mark.parametrize("seed", range(10))
def test_noisy_steps_give_the_rates(seed: int) -> None:
    rates = StepRates()
    observe(rates, seed, 1_000)
    assert relative(rates) == pytest.approx((1, 1, 1), rel=0.1)


@pytest.mark.parametrize("factor", [0.5, 2.0, 5.0])
def test_a_change_is_followed(factor: float) -> None:
    rates = StepRates()
    observe(rates, 1, 1_000)
    observe(rates, 2, 1_000, factor)
    assert relative(rates) == pytest.approx((factor, factor, factor), rel=0.15)


@pytest.mark.parametrize("at", [0, 3, WARM_UP - 1, 500, 999])
def test_a_step_that_took_4_s_hardly_matters(at: int) -> None:
    plain, disturbed = StepRates(), StepRates()
    observe(plain, 3, 1_000)
    observe(disturbed, 3, at)
    disturbed.observe(100, 10, 4.0)
    rng = random.Random(3)  # the same steps after it
    for i in range(1_000):
        tokens, sequences = rng.choice([0, 0, 256, rng.randrange(1, 257)]), rng.randrange(32)
        seconds = (STEP + PROMPT_TOKEN * tokens + SEQUENCE * sequences) * max(0.5, rng.gauss(1, 0.05))
        if i >= at:
            disturbed.observe(tokens, sequences, seconds)
    assert relative(disturbed) == pytest.approx(relative(plain), rel=0.1)


def test_prompts_among_steps_that_only_decode_are_no_outliers() -> None:
    rates = StepRates()
    for i in range(1_000):
        tokens = 256 if i % 50 == 49 else 0
        rates.observe(tokens, 4 + i % 3, STEP + PROMPT_TOKEN * tokens + SEQUENCE * (4 + i % 3))
    assert rates.seconds_a_prompt_token == pytest.approx(PROMPT_TOKEN, rel=0.1)


@pytest.mark.slow
def test_what_is_known_of_prompts_outlives_steps_that_only_decode() -> None:
    rates = StepRates()
    observe(rates, 4, 1_000)
    known = rates.seconds_a_prompt_token
    for i in range(20_000):
        rates.observe(0, 1 + i % 8, STEP + SEQUENCE * (1 + i % 8))
    assert rates.seconds_a_prompt_token == pytest.approx(known, rel=0.01)


def test_nothing_is_known_before_a_few_steps() -> None:
    rates = StepRates()
    for _ in range(WARM_UP - 1):
        rates.observe(10, 1, 0.01)
    assert (rates.seconds_a_step, rates.seconds_a_prompt_token, rates.seconds_a_sequence) == (0.0, 0.0, 0.0)
    for _ in range(100):
        rates.observe(0, 0, 99.0)  # computed nothing
    assert rates.seconds_a_step == 0.0
    rates.observe(10, 1, 0.01)
    assert rates.seconds_a_step > 0.0


def test_steps_that_only_decode_take_a_prompt_token_for_a_sequence() -> None:
    rates = StepRates()
    for i in range(500):
        rates.observe(0, 1 + i % 32, STEP + SEQUENCE * (1 + i % 32))
    assert rates.seconds_a_step == pytest.approx(STEP, rel=0.1)
    assert rates.seconds_a_sequence == pytest.approx(SEQUENCE, rel=0.1)
    assert rates.seconds_a_prompt_token == rates.seconds_a_sequence


def test_steps_that_only_compute_prompts_take_a_sequence_for_a_prompt_token() -> None:
    rates = StepRates()
    for i in range(500):
        rates.observe(16 + 16 * (i % 16), 0, STEP + PROMPT_TOKEN * (16 + 16 * (i % 16)))
    assert rates.seconds_a_step == pytest.approx(STEP, rel=0.1)
    assert rates.seconds_a_prompt_token == pytest.approx(PROMPT_TOKEN, rel=0.1)
    assert rates.seconds_a_sequence == rates.seconds_a_prompt_token


@pytest.mark.parametrize(("tokens", "sequences"), [(0, 1), (0, 8), (256, 0), (64, 16)])
def test_steps_that_do_not_vary_are_shared_out(tokens: int, sequences: int) -> None:
    """Their seconds are right in sum, and a step's fixed part costs as much as 256 prompt tokens."""
    rates = StepRates()
    for _ in range(300):
        rates.observe(tokens, sequences, 0.02)
    step, token, sequence = rates.seconds_a_step, rates.seconds_a_prompt_token, rates.seconds_a_sequence
    assert step + token * tokens + sequence * sequences == pytest.approx(0.02, rel=0.05)
    assert min(step, token, sequence) > 0.0
    if tokens:
        assert step == pytest.approx(STEP_IN_PROMPT_TOKENS * token, rel=0.5)


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 10_000), st.floats(0.0, 1e6)),
        max_size=60,
    )
)
def test_rates_are_never_negative_and_always_finite(steps: list[tuple[int, int, float]]) -> None:
    rates = StepRates()
    for step in steps:
        rates.observe(*step)
        for rate in (rates.seconds_a_step, rates.seconds_a_prompt_token, rates.seconds_a_sequence):
            assert math.isfinite(rate)
            assert rate >= 0.0


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ((-1, 0, 0.1), "prompt_tokens is -1; it must be at least 0"),
        ((0, 1.5, 0.1), "sequences is 1.5; it must be an integer"),
        ((0, 1, math.nan), "seconds is nan; it must be finite and at least 0"),
        ((0, 1, -0.1), "seconds is -0.1; it must be finite and at least 0"),
    ],
)
def test_a_step_that_cannot_be_is_refused(step: tuple[int, int, float], sentence: str) -> None:
    with pytest.raises(BadValue, match=sentence):
        StepRates().observe(*step)
