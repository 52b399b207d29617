"""How many replicas a fleet should have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import BadValue
from quire.fleet.scaling import BACKLOG_SECONDS, DOWN_AFTER, TARGET_BATCH, UTILISATION, Load, Meter, Target, target

IDLE = Load(
    prompt_tokens_a_second=0.0,
    decoded_tokens_a_second=0.0,
    waiting_tokens=0.0,
    seconds_a_prompt_token=0.001,
    seconds_a_token=0.002,
)
STATE = {
    "prompt_tokens": 0,
    "decoded_tokens": 0,
    "waiting_tokens": 0,
    "max_running": 256,
    "seconds_a_step": 0.064,
    "seconds_a_prompt_token": 0.001,
    "seconds_a_sequence": 0.0005,
}

amounts = st.floats(0.0, 1e6)
seconds = st.floats(0.0, 0.1)
loads = st.builds(
    Load,
    prompt_tokens_a_second=amounts,
    decoded_tokens_a_second=amounts,
    waiting_tokens=amounts,
    seconds_a_prompt_token=seconds,
    seconds_a_token=seconds,
)
fleets = st.lists(st.one_of(st.none(), loads), max_size=8)
bounds = st.tuples(st.integers(1, 8), st.integers(0, 8)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def busy(demand: float) -> Load:
    """A load that keeps so many replicas busy."""
    return replace(IDLE, prompt_tokens_a_second=demand / IDLE.seconds_a_prompt_token)


# ------------------------------------------------------------------------------------------------- what is needed


def test_demand_is_what_is_computed_and_what_waits() -> None:
    load = Load(
        prompt_tokens_a_second=300.0,
        decoded_tokens_a_second=100.0,
        waiting_tokens=2000.0,
        seconds_a_prompt_token=0.001,
        seconds_a_token=0.002,
    )
    assert load.demand == pytest.approx(0.3 + 0.2 + 2000 / BACKLOG_SECONDS * 0.001)


@pytest.mark.parametrize(("demand", "replicas"), [(0.0, 1), (0.69, 1), (0.71, 2), (1.39, 2), (1.41, 3), (6.9, 10)])
def test_as_many_come_at_once_as_leave_room_for_bursts(demand: float, replicas: int) -> None:
    assert target([busy(demand)], 5.0, Target(1, 0.0), 1, 100).replicas == replicas


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_load_that_cannot_be_is_refused(wrong: float) -> None:
    with pytest.raises(BadValue, match="waiting_tokens is"):
        replace(IDLE, waiting_tokens=wrong)


@pytest.mark.parametrize(("least", "most"), [(0, 4), (3, 2)])
def test_bounds_that_are_none_are_refused(least: int, most: int) -> None:
    with pytest.raises(BadValue, match=f"the bounds are {least} and {most} replicas"):
        target([IDLE], 0.0, Target(1, 0.0), least, most)


# ------------------------------------------------------------------------------------------------ what always holds


@pytest.mark.slow
@given(fleets, st.floats(0.0, 1e6), st.integers(0, 20), st.floats(0.0, 1e6), bounds)
def test_the_answer_lies_within_the_bounds(
    fleet: list[Load | None], now: float, replicas: int, since: float, bounds: tuple[int, int]
) -> None:
    found = target(fleet, now, Target(replicas, since), *bounds)
    assert bounds[0] <= found.replicas <= bounds[1]
    assert found.since <= now


@pytest.mark.slow
@given(fleets, loads, st.floats(0.0, 1e6), st.integers(1, 20), st.floats(0.0, 1e6), bounds)
def test_more_load_never_means_fewer_replicas(
    fleet: list[Load | None], more: Load, now: float, replicas: int, since: float, bounds: tuple[int, int]
) -> None:
    last = Target(replicas, since)
    for i, load in enumerate(fleet):
        if load is not None:
            heavier = replace(
                load,
                prompt_tokens_a_second=load.prompt_tokens_a_second + more.prompt_tokens_a_second,
                decoded_tokens_a_second=load.decoded_tokens_a_second + more.decoded_tokens_a_second,
                waiting_tokens=load.waiting_tokens + more.waiting_tokens,
            )
            changed = [*fleet[:i], heavier, *fleet[i + 1 :]]
            assert target(changed, now, last, *bounds).replicas >= target(fleet, now, last, *bounds).replicas


@pytest.mark.slow
@given(fleets, st.integers(1, 20))
def test_while_a_state_is_missing_none_goes(fleet: list[Load | None], replicas: int) -> None:
    for missing in ([*fleet, None], []):
        found = target(missing, 1e9, Target(replicas, 0.0), 1, 100)
        assert found.replicas >= replicas
        assert found.since == 1e9  # nor soon after that


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.1, 60.0), st.floats(0.0, 10.0)), max_size=80), st.integers(1, 8))
def test_a_demand_that_swings_brings_no_replica_twice(steps: list[tuple[float, float]], replicas: int) -> None:
    """Between going up and going down, and between two that go, there are DOWN_AFTER seconds."""
    now, last, changed = 0.0, Target(replicas, 0.0), 0.0
    for pause, demand in steps:
        now += pause
        found = target([busy(demand)], now, last, 1, 100)
        if found.replicas < last.replicas:
            assert found.replicas == last.replicas - 1
            assert now - changed >= DOWN_AFTER
        if found.replicas != last.replicas:
            changed = now
        last = found


@pytest.mark.slow
@given(st.floats(0.0, 60.0), st.integers(1, 20))
def test_a_steady_demand_ends_in_a_steady_number(demand: float, replicas: int) -> None:
    last = Target(replicas, 0.0)
    history = []
    for tick in range(500):
        last = target([busy(demand)], 10.0 * tick, last, 1, 100)
        history.append(last.replicas)
    assert history[-1] == max(1, math.ceil(busy(demand).demand / UTILISATION))
    assert history[1:] == sorted(history[1:], reverse=True)  # after the first step up, only down


def test_one_goes_at_a_time_after_two_minutes_each() -> None:
    last, gone = Target(4, 0.0), []
    for tick in range(60):
        found = target([IDLE] * last.replicas, 10.0 * tick, last, 2, 8)
        if found.replicas != last.replicas:
            gone.append((10.0 * tick, found.replicas))
        last = found
    assert gone == [(120.0, 3), (240.0, 2)]


def test_a_clock_that_is_set_back_delays_nothing_for_ever() -> None:
    last = target([IDLE], 100.0, Target(2, 1e9), 1, 4)
    assert last == Target(2, 100.0)
    assert target([IDLE], 100.0 + DOWN_AFTER, last, 1, 4).replicas == 1


# --------------------------------------------------------------------------------------------------- the counters


def test_rates_are_what_the_counters_gained() -> None:
    meter = Meter()
    assert meter.read(STATE, 10.0) is None  # there is nothing to compare with
    load = meter.read(STATE | {"prompt_tokens": 400, "decoded_tokens": 80, "waiting_tokens": 7}, 14.0)
    assert load == Load(
        prompt_tokens_a_second=100.0,
        decoded_tokens_a_second=20.0,
        waiting_tokens=7.0,
        seconds_a_prompt_token=0.001,
        seconds_a_token=0.064 / TARGET_BATCH + 0.0005,
    )


def test_a_small_replica_shares_its_steps_among_fewer() -> None:
    meter = Meter()
    meter.read(STATE, 0.0)
    load = meter.read(STATE | {"max_running": 4}, 1.0)
    assert load is not None
    assert load.seconds_a_token == pytest.approx(0.064 / 4 + 0.0005)


def test_before_a_step_was_measured_the_load_is_unknown() -> None:
    meter = Meter()
    meter.read(STATE | {"seconds_a_step": 0.0}, 0.0)
    assert meter.read(STATE | {"seconds_a_step": 0.0}, 1.0) is None
    assert meter.read(STATE, 1.0) is None  # no time went by
    assert meter.read(STATE, 2.0) is not None
