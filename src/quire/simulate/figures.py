"""Figures of simulated runs: histograms of durations, and the result of one engine's run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

RESOLUTION = math.log(1.01)  # of a Histogram: its classes are 1 % wide
MANY = 40  # moments, from which on array operations are faster
SHORTEST = 1e-9  # seconds; shorter durations are in one class of a Histogram


class Histogram:
    """A histogram of any number of durations, with a resolution of 1 %."""

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.max = 0.0
        self._classes: Counter[int] = Counter()

    def add(self, value: float, count: int = 1) -> None:
        """Add a duration that occurred `count` times."""
        self.count += count
        self.sum += value * count
        self.max = max(self.max, value)
        self._classes[_class_of(value)] += count

    def add_between(self, moments: Sequence[float], count: int) -> None:
        """Add the time from each moment to the next, `count` times each. The result is that of `add` one by one."""
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
        """Add all durations of another histogram."""
        self.count += other.count
        self.sum += other.sum
        self.max = max(self.max, other.max)
        self._classes.update(other._classes)

    def percentile(self, percent: float) -> float:
        """Return a percentile, interpolated between the two neighbours; 0 if the histogram is empty."""
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
        """The mean of all durations; 0 without any."""
        return self.sum / self.count if self.count else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return mean, percentiles and maximum."""
        shown = {f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)}
        return {"mean": self.mean, **shown, "max": self.max}


def _class_of(value: float) -> int:
    """Return the number of a duration's class."""
    return math.floor(math.log(max(value, SHORTEST)) / RESOLUTION)


@dataclass(frozen=True)
class SimulationResult:
    """The result of a simulated run. Seconds are those of the virtual clock."""

    requests: int
    finished: int  # with all of their tokens
    refused: int  # could never run
    ended_early: int  # aborted, or failed
    first_refusal: str | None
    steps: int
    seconds: float  # from the first arrival to the last step
    prompt_tokens: int  # of all requests except the refused ones
    new_tokens: int  # drawn
    computed_tokens: int  # including the recomputed ones of preempted requests
    new_tokens_per_second: float
    total_tokens_per_second: float  # prompt tokens and new ones
    ttft: dict[str, float]  # seconds from arrival to the first token
    itl: dict[str, float]  # seconds from a token to the next
    preemptions: int
    swapped_blocks: int  # both ways
    copied_blocks: int
    evicted_blocks: int  # reusable blocks whose memory was needed
    hit_rate: float  # share of the prompt tokens that were found in the prefix cache
    waste: float  # share of attention's owned token slots that are empty, over the samples of the cache
    most_used_blocks: int  # of attention, between two steps
    row_waste: float  # the same share for the rows of recurrent layers' unfinished chunks
    most_used_states: int  # between two steps
    trace_hash: str | None  # of all plans; None if not requested

    def as_dict(self) -> dict[str, object]:
        """Return the figures for JSON."""
        return asdict(self)
