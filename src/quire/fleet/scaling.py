"""How many replicas a fleet should have, from what its replicas compute and from what waits for them.

`target` is a pure function: `quire.ray.scaling` brings it to Ray Serve, `quire.simulate` runs it on a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import BadValue, check_number

UTILISATION = 0.7  # share of its time that a replica should compute, so that bursts find room
BACKLOG_SECONDS = 10.0  # in which what waits should be computed
DOWN_AFTER = 120.0  # seconds in which fewer replicas would have done, before one goes
TARGET_BATCH = 32  # sequences among which a step's fixed part is shared, where a replica may run as many


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a replica did lately, and what waits for it. Raises BadValue for a number that is negative or not finite."""

    prompt_tokens_a_second: float  # those that were computed; what came from the cache is none
    decoded_tokens_a_second: float
    waiting_tokens: float  # of prompts, still to be computed
    seconds_a_prompt_token: float
    seconds_a_token: float  # decoded, in a batch of TARGET_BATCH

    def __post_init__(self) -> None:
        for one in fields(self):
            check_number(BadValue, one.name, getattr(self, one.name), 0.0)

    @property
    def demand(self) -> float:
        """Replicas like this one that this load would keep busy all the time."""
        prompts = (self.prompt_tokens_a_second + self.waiting_tokens / BACKLOG_SECONDS) * self.seconds_a_prompt_token
        return prompts + self.decoded_tokens_a_second * self.seconds_a_token


@dataclass(frozen=True, slots=True)
class Target:
    """A decision, and all that the next one has to know of it."""

    replicas: int
    since: float  # seconds: when so many were last needed or a state was missing, or when their number changed


def target(loads: Sequence[Load | None], now: float, last: Target, least: int, most: int) -> Target:
    """How many replicas there should be.

    More come at once, as many as bring the replicas down to UTILISATION. They go one at a time, each after DOWN_AFTER
    seconds in which fewer would have done. So a demand that only swings brings no replica twice in that time.

    loads: of the replicas that run; None: it has reported nothing, so none goes. now: seconds, of the clock of
    last.since. last: the decision before, or Target(replicas that there are, now). least, most: replicas.
    Raises BadValue for bounds that are none.
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
    """Makes the Load of a replica out of its counters, from one reading to the next."""

    def __init__(self) -> None:
        self._at = self._prompt_tokens = self._decoded_tokens = math.nan

    def read(self, state: Mapping[str, Any], now: float) -> Load | None:
        """The load between the last reading and this one; None: it cannot be known yet.

        state: counters since the replica began, prompt_tokens (computed ones) and decoded_tokens, and as ReplicaState
        has them waiting_tokens, max_running, seconds_a_step, seconds_a_prompt_token and seconds_a_sequence.
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
