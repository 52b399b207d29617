"""Leap: simulate steps that only decode without planning and committing each of them.

While nothing waits and there are enough blocks, only time passes between the steps in which a request needs its next
block or ends. The results are bitwise those of planning each step, including all times.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from quire.engine.cost import CostModel
from quire.engine.scheduler import Scheduler
from quire.request import Event, Request
from quire.simulate.decoders import Decoders

MOST_STEPS = 4096  # planned ahead


class Leaper(Protocol):
    """The interface that a leap needs: a Simulation, which counts the results of steps."""

    scheduler: Scheduler
    decoders: Decoders
    cost: CostModel
    num_steps: int
    sample_every: int

    @property
    def now(self) -> float:
        """The virtual time in seconds."""

    def decoded(self, times: Sequence[float], start: int, stop: int) -> None:
        """Count a token of each decoder in each of the steps that end at times[start + 1 .. stop]."""

    def ended(self, event: Event) -> None:
        """Count a request that ended."""

    def look(self) -> None:
        """Sample the waste of the cache."""

    def note_blocks(self, now: float) -> None:
        """Record the number of used blocks after a step that ends at `now`."""

    def leapt(self, now: float) -> None:
        """Set the clock to the end of a leap."""


class Leap:
    """The steps of decoders that run alone, from now on. Call `plan_ahead` and `apply` in turns, then `close`."""

    def __init__(self, simulation: Leaper) -> None:
        """simulation: its decoders must be alone."""
        self._simulation = simulation
        self._decoders = simulation.decoders
        self._manager = simulation.scheduler.manager
        self._cost = simulation.cost
        self._before = simulation.decoders.step  # the decoders' steps before the leap
        self.seconds = 0.0  # of the first step in the latest `plan_ahead`
        self.times = [simulation.now]  # the start of the leap and the ends of the planned steps
        self.num_applied = 0  # steps
        self._most_taken = 0  # upper bound of the blocks of each group that the planned steps allocate
        every = simulation.sample_every  # steps between samples of the cache
        self._next_look = -simulation.num_steps % every + 1 if every else math.inf

    @property
    def num_planned(self) -> int:
        """The number of steps whose ends are known."""
        return len(self.times) - 1

    def plan_ahead(self, until: float = math.inf) -> bool:
        """Compute the ends of the next steps, up to the first one in which a request ends.

        Return False if the scheduler must plan instead. All planned steps must have been applied. until: the first step
        that ends at that time or later is the last one.
        """
        times, count = self.times, self._decoders.count
        if not count or len(times) > MOST_STEPS:
            return False
        # A request allocates at most one block in `size` steps.
        size, free = self._manager.block_size, min([pool.num_free for pool in self._manager.pools])
        to_end = self._decoders.next_end - self._decoders.step
        steps = min(to_end, free // count * size, MOST_STEPS)
        if steps < 1:
            return False
        self._most_taken = min(free, count * (-(-steps // size) + 1))
        keys = self._decoders.keys
        self.seconds = self._cost.decoder(count)(keys + count)
        while steps > 0 and times[-1] < until:
            some = min(steps, max(1, math.ceil(min(steps, (until - times[-1]) / self.seconds)) + 1))
            times += self._cost.decode_ends(count, keys, times[-1], some)
            keys += some * count
            steps -= some
        if times[-1] >= until:
            stop = max(self.num_applied + 1, bisect_left(times, until, self.num_applied + 1))
            del times[stop + 1 :]
        return True

    def cut(self, moment: float) -> None:
        """Drop the planned steps that begin at `moment` or later. The current step continues."""
        del self.times[bisect_right(self.times, moment) + 1 :]

    def evicts_by(self, moment: float) -> bool:
        """Return whether blocks may be evicted in unapplied steps that end by `moment`."""
        at = self._decoders.next_taker - self._before
        if at >= len(self.times) or self.times[at] > moment:
            return False
        free = min([pool.num_free for pool in self._manager.pools])
        return self._manager.evicts(min(free, self._most_taken))

    def blocks_by(self, step: int) -> tuple[int, int]:
        """Return the numbers of blocks allocated and of blocks that became reusable by the end of a planned step.

        They are the same in every group. The block manager does not count them yet.
        """
        step += self._before
        taken, filled = self._decoders.taken_blocks(step), self._decoders.unpublished_blocks(step)
        reusable, blocks = self._manager.indexes[0].by_block, self._manager.pools[0].next_free(taken)
        empty = next((i for i, block in enumerate(blocks) if block in reusable), taken)  # empty ones come first
        return taken, filled - (taken - empty)

    def blocks_taken(self, moment: float) -> list[set[int]]:
        """Return, for each group, the blocks of steps begun by `moment` that the manager does not count yet."""
        under_way = min(self.num_done(moment) + 1, self.num_planned)
        taken = self._decoders.taken_blocks(self._before + under_way)
        return [set(pool.next_free(taken)) for pool in self._manager.pools]

    def num_done(self, moment: float) -> int:
        """Return the number of planned steps that end by `moment`."""
        return bisect_right(self.times, moment) - 1

    def apply(self, stop: int) -> list[Event]:
        """Execute the planned steps up to number `stop`. Return the events of ended requests."""
        ended: list[Event] = []
        if stop <= self.num_applied:
            return ended
        while self._next_look <= stop:
            ended += self._go_on(int(self._next_look))
            self._simulation.look()
            self._next_look += self._simulation.sample_every
        return ended + self._go_on(stop)

    def _go_on(self, stop: int) -> list[Event]:
        """Execute steps in which no request ends, except in the last one."""
        begin, decoders = self.num_applied, self._decoders
        if stop <= begin:
            return []
        self._simulation.decoded(self.times, begin, stop)
        self.num_applied = stop
        decoders.go_on(stop - begin)
        self._simulation.scheduler.num_planned += (stop - begin) * decoders.count
        if decoders.next_end <= decoders.step:
            self._take_blocks(stop - 1)
        self._take_blocks(stop)
        ended = decoders.end()
        for event in ended:
            self._simulation.ended(event)
        self._simulation.note_blocks(self.times[stop])
        return ended

    def _take_blocks(self, stop: int) -> None:
        """Allocate the blocks that requests need in the steps up to `stop`."""
        wanted = self._decoders.blocks_wanted(self._before + stop)
        if not wanted:
            return
        if not (self._manager.listeners and self._manager.evicts(len(wanted))):
            self._take(wanted)
            return
        for _, those in groupby(wanted, itemgetter(0)):  # one step at a time, since events carry their time
            self._take(list(those))

    def _take(self, wanted: Sequence[tuple[int, Request]]) -> None:
        """Allocate blocks for requests that need them in these steps."""
        times, first, last = self.times, self._before + 1, wanted[-1][0] - self._before
        self._manager.now = times[last - 1]
        self._decoders.take([request for _, request in wanted], [times[step - first] for step, _ in wanted])
        if last < self.num_applied:
            self._simulation.note_blocks(times[last])

    def delay(self, seconds: float) -> None:
        """Delay the end of the last planned step."""
        self.times[-1] += seconds

    def close(self) -> None:
        """Set the clock to the end of the last applied step."""
        self._simulation.leapt(self.times[self.num_applied])
