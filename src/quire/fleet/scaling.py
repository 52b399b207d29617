"""Autoscaling: the number of replicas for a fleet, from the load that they compute and the load that waits.

`target` is a pure function: `quire.ray.scaling` uses it in Ray Serve, `quire.simulate` runs it on a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import BadValue, check_number

UTILISATION = 0.7  # share of the time that a replica should compute, which leaves room for bursts
BACKLOG_SECONDS = 10.0  # seconds in which waiting tokens should be computed
DOWN_AFTER = 120.0  # seconds during which fewer replicas would have been enough, before one is removed
TARGET_BATCH = 32  # sequences that share a step's fixed part, if a replica may run that many


@dataclass(frozen=True, kw_only=True)
class Load:
    """A replica's recent and waiting load. Raises BadValue for a number that is negative or not finite."""

    prompt_tokens_a_second: float  # computed ones, without those from the cache
    decoded_tokens_a_second: float
    waiting_tokens: float  # prompt tokens still to be computed
    seconds_a_prompt_token: float
    seconds_a_token: float  # of a decoded token, in a batch of TARGET_BATCH

    def __post_init__(self) -> None:
        for one in fields(self):
            check_number(BadValue, one.name, getattr(self, one.name), 0.0)

    @property
    def demand(self) -> float:
        """The number of replicas like this one that this load would keep fully busy."""
        prompts = (self.prompt_tokens_a_second + self.waiting_tokens / BACKLOG_SECONDS) * self.seconds_a_prompt_token
        return prompts + self.decoded_tokens_a_second * self.seconds_a_token


@dataclass(frozen=True, slots=True)
class Target:
    """A decision, with the state that the next one needs."""

    replicas: int
    since: float  # seconds: when this number was last needed or changed, or when a load was last missing


def target(loads: Sequence[Load | None], now: float, last: Target, least: int, most: int) -> Target:
    """Return the number of replicas that there should be.

    Replicas are added at once, as many as bring the utilisation down to UTILISATION. They are removed one at a time,
    each after DOWN_AFTER seconds during which fewer would have been enough. So an oscillating demand does not start a
    replica twice in that time.

    loads: loads of the running replicas. A replica without a report has None; while there is one, no replica is
    removed. now: seconds, of the same clock as last.since. last: the previous decision, or Target(current number,
    now). least, most: bounds of the number.
    Raises BadValue for invalid bounds.
    """
    if not 0 < least <= most:
        raise BadValue(f"the bounds are {least} and {most} replicas; they must be at least 1, the smaller one first")
    replicas = min(max(last.replicas, least), most)
    wanted = math.ceil(sum(load.demand for load in loads if load is not None) / UTILISATION)
    if wanted >= replicas or not loads or None in loads:
        return Target(max(replicas, min(wanted, most)), now)
    since = min(last.since, now)  # a clock may be set back
    if replicas == least or now - since < DOWN_AFTER:
        return Target(replicas, since)
    return Target(replicas - 1, now)


class Meter:
    """Computes the Load of a replica from two successive readings of its counters."""

    def __init__(self) -> None:
        self._at = self._prompt_tokens = self._decoded_tokens = math.nan

    def read(self, state: Mapping[str, Any], now: float) -> Load | None:
        """Return the load between the last reading and this one; None if it is not known yet.

        state: counters since the replica's start, prompt_tokens (computed ones) and decoded_tokens, and these fields of
        ReplicaState: waiting_tokens, max_running, seconds_a_step, seconds_a_prompt_token and seconds_a_sequence.
        now: seconds of a clock that is never set back.
        Raises BadValue for a number that is negative or not finite.
        """
        seconds = now - self._at
        prompt_tokens = state["prompt_tokens"] - self._prompt_tokens
        decoded_tokens = state["decoded_tokens"] - self._decoded_tokens
        self._at, self._prompt_tokens, self._decoded_tokens = now, state["prompt_tokens"], state["decoded_tokens"]
        if not seconds > 0 or state["seconds_a_step"] == 0:  # the first reading, or no step was measured yet
            return None
        batch = min(TARGET_BATCH, state["max_running"])
        return Load(
            prompt_tokens_a_second=prompt_tokens / seconds,
            decoded_tokens_a_second=decoded_tokens / seconds,
            waiting_tokens=float(state["waiting_tokens"]),
            seconds_a_prompt_token=state["seconds_a_prompt_token"],
            seconds_a_token=state["seconds_a_step"] / batch + state["seconds_a_sequence"],
        )
