"""Loads: the requests of a simulation, from a trace or drawn at random."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from quire.engine.trace import TraceRow
from quire.simulate.prompts import NamedTokens, part_name, parts_of
from quire.simulate.spec import FleetSpec, Lengths, LoadSpec
from quire.simulate.traces import read_rows


@dataclass(slots=True, eq=False)
class Job:
    """A request of a client."""

    name: str
    arrival: float  # seconds
    names: Sequence[bytes]  # names of the prompt's parts; generated tokens extend the last part
    ends: Sequence[int]  # ends of all parts except the last one
    prompt_tokens: int
    new_tokens: int
    unshared_tokens: int  # tokens of the prompt that no earlier request has
    think: float = 0.0  # seconds from its answer to the next turn
    then: Job | None = None  # the next turn

    def tokens(self) -> NamedTokens:
        """Return the prompt."""
        return NamedTokens(self.names, self.ends, self.prompt_tokens)


def jobs_of(spec: FleetSpec, cell: int, num_cells: int, share: float) -> Iterator[Job]:
    """Return the jobs of one cell in the order of arrival, without later turns.

    share: of the fleet's requests, for random loads. A trace's rows are assigned to cells at random.
    """
    if spec.load.arrivals == "trace":
        return _of_trace(spec, cell, num_cells)
    return _drawn(spec, cell, share)


def _of_trace(spec: FleetSpec, cell: int, num_cells: int) -> Iterator[Job]:
    rng = random.Random(f"{spec.seed}/cells")
    for number, row in enumerate(rows_of(spec.load, spec.directory)):
        if rng.randrange(num_cells) == cell:
            names, ends = parts_of(row, number, spec.seed)
            yield Job(
                f"{number}",
                row.arrival / spec.load.speed,
                names,
                ends,
                row.prompt_tokens,
                max(1, row.new_tokens),
                row.prompt_tokens - row.prefix_tokens,
            )


def _drawn(spec: FleetSpec, cell: int, share: float) -> Iterator[Job]:
    load, seed = spec.load, f"{spec.seed}/{cell}"
    lengths, pauses = random.Random(f"{seed}/lengths"), random.Random(f"{seed}/thoughts")
    weights = list(accumulate(1 / (i + 1) for i in range(load.prefixes)))
    for number, arrival in enumerate(arrivals(load, load.rate * share, f"{seed}/arrivals")):
        names: list[bytes] = []
        ends: list[int] = []
        if weights:
            at = bisect_left(weights, lengths.random() * weights[-1])
            names, ends = [part_name(spec.seed, "prefix", at)], [load.prefix_tokens]
        talk: list[Job] = []
        said = load.prefix_tokens if weights else 0
        for turn in range(load.turns):
            asked, new = drawn(lengths, load.prompt_tokens), drawn(lengths, load.new_tokens)
            own = part_name(seed, number, turn)
            name = f"{cell}-{number}" if load.turns == 1 else f"{cell}-{number}.{turn}"
            job = Job(name, arrival, [*names, own], ends[:], said + asked, new, asked)
            if talk:
                talk[-1].then, talk[-1].think = job, pauses.expovariate(1 / load.think) if load.think else 0.0
            talk.append(job)
            said += asked + new
            names.append(own)
            ends.append(said)
        yield talk[0]


def rows_of(load: LoadSpec, directory: Path) -> list[TraceRow]:
    """Return the rows of a load's trace. Raises ConfigError."""
    return read_rows(directory / load.trace)


def drawn(rng: random.Random, lengths: Lengths) -> int:
    """Draw a number of tokens."""
    value = lengths.median if lengths.spread == 0 else rng.lognormvariate(math.log(lengths.median), lengths.spread)
    return max(lengths.least, min(lengths.most, round(value)))


def arrivals(load: LoadSpec, rate: float, seed: str) -> Iterator[float]:
    """Yield the arrival times up to the load's duration."""
    rng, now = random.Random(seed), 0.0
    if load.arrivals == "bursts":
        yield from _bursts(load, rate, rng)
        return
    shape = 1 / load.variation**2
    while True:
        now += rng.expovariate(rate) if load.arrivals == "poisson" else rng.gammavariate(shape, 1 / (rate * shape))
        if now >= load.duration:
            return
        yield now


def _bursts(load: LoadSpec, rate: float, rng: random.Random) -> Iterator[float]:
    """Yield the arrivals of a Poisson process that alternates between two rates, whose mean is the load's rate."""
    share = min(1.0, load.burst_seconds / load.burst_every)
    usual = rate / (1 + share * (load.burst_factor - 1))
    now, in_burst = 0.0, False
    change = rng.expovariate(1 / max(1e-9, load.burst_every - load.burst_seconds))
    while now < load.duration:
        step = rng.expovariate(usual * (load.burst_factor if in_burst else 1.0))
        if now + step >= change:
            now, in_burst = change, not in_burst
            mean = load.burst_seconds if in_burst else max(1e-9, load.burst_every - load.burst_seconds)
            change = now + rng.expovariate(1 / mean)
            continue
        now += step
        if now < load.duration:
            yield now
