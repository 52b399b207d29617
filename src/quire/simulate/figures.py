"""Figures of simulated runs: durations by how often they occurred, and what a run of one engine came to."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

RESOLUTION = math.log(1.01)  # of a Histogram: its classes are 1 % wide
MANY = 40  # moments: from here on it is faster to compute with all of them at once
SHORTEST = 1e-9  # seconds that a Histogram tells from none


class Histogram:
    """How often which duration occurred, to 1 %: room for any number of them."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.max = 0.0
        self._classes: Counter[int] = Counter()

    def add(self, value: float, count: int = 1) -> None:
        """Take in a duration that occurred so often."""
        self.count += count
        self.sum += value * count
        self.max = max(self.max, value)
        self._classes[_class_of(value)] += count

    def add_between(self, moments: Sequence[float], count: int) -> None:
        """Take in the times from each moment to the next, so often each; as `add` of one after the other."""
        if len(moments) < MANY:
            values, total = [after - before for before, after in pairwise(moments)], self.sum
            for value in values:
                total += value * count
        else:
            ends = np.array(moments)
            at_once = ends[1:] - ends[:-1]
            values = at_once.tolist()
            at_once *= count
            at_once[0] += self.sum
            total = float(np.add.accumulate(at_once)[-1])
        self.sum = total
        self.count += count * len(values)
        values.sort()
        self.max = max(self.max, values[-1])
        at, last = 0, _class_of(values[-1])
        while at < len(values):
            number = _class_of(values[at])
            end = len(values) if number == last else bisect_right(values, number, at, key=_class_of)
            self._classes[number] += count * (end - at)
            at = end

    def merge(self, other: Histogram) -> None:
        """Take in all that another one has."""
        self.count += other.count
        self.sum += other.sum
        self.max = max(self.max, other.max)
        self._classes.update(other._classes)

    def percentile(self, percent: float) -> float:
        """What so many percent lie below, on the line between the two neighbours; 0 where there is nothing."""
        place, seen, low = percent / 100 * max(0, self.count - 1), 0, self.max
        is_found = False
        for number in sorted(self._classes):
            seen += self._classes[number]
            here = min(self.max, math.exp((number + 0.5) * RESOLUTION))
            if is_found:
                return low + (here - low) * (place - int(place))
            if seen > place:
                if seen > int(place) + 1 or place == int(place):
                    return here
                low, is_found = here, True
        return low

    @property
    def mean(self) -> float:
        """Of all of them; 0 where there is none."""
        return self.sum / self.count if self.count else 0.0

    def as_dict(self) -> dict[str, float]:
        """Mean, percentiles and maximum."""
        shown = {f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)}
        return {"mean": self.mean, **shown, "max": self.max}


def _class_of(value: float) -> int:
    """The number of a duration's class."""
    return math.floor(math.log(max(value, SHORTEST)) / RESOLUTION)


@dataclass(frozen=True)
class SimulationResult:
    """What a simulated run came to. Seconds are those of the virtual clock."""

    requests: int
    finished: int  # with all of their tokens
    refused: int  # could never run
    ended_early: int  # aborted, or failed
    first_refusal: str | None
    steps: int
    seconds: float  # from the first arrival to the last step
    prompt_tokens: int  # of all requests but the refused ones
    new_tokens: int  # drawn
    computed_tokens: int  # those of preempted requests each time
    new_tokens_per_second: float
    total_tokens_per_second: float  # prompt tokens and new ones
    ttft: dict[str, float]  # seconds from arrival to the first token
    itl: dict[str, float]  # seconds from a token to the next
    preemptions: int
    swapped_blocks: int  # both ways
    copied_blocks: int
    evicted_blocks: int  # were reusable, and their memory was needed
    hit_rate: float  # share of the prompt tokens that were found in the prefix cache
    waste: float  # share of the owned slots of attention that hold nothing, over the looks at the cache
    most_used_blocks: int  # of attention, between two steps
    row_waste: float  # of layers that keep a state: the same share of the rows of pieces in progress
    most_used_states: int  # between two steps
    trace_hash: str | None  # of every plan; None if not asked for

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self)
