"""Leap: steps that only decode, computed without planning and committing each of them.

While nothing waits and blocks suffice, only time passes between the steps in which a request needs its next block or
ends. The results are those of planning each step, to the last bit of every time.
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

MOST_STEPS = 4096  # that are planned ahead


class Leaper(Protocol):
    """What leaps: a Simulation, which counts what its steps come to."""

    scheduler: Scheduler
    decoders: Decoders
    cost: CostModel
    num_steps: int
    sample_every: int

    @property
    def now(self) -> float:
        """The time."""

    def decoded(self, times: Sequence[float], start: int, stop: int) -> None:
        """The decoders got a token in each of the steps that end at times[start + 1 .. stop]."""

    def ended(self, event: Event) -> None:
        """A request has ended."""

    def look(self) -> None:
        """Look at how much of the cache is wasted."""

    def note_blocks(self, now: float) -> None:
        """Note how many blocks are used after a step, which ends at that time."""

    def leapt(self, now: float) -> None:
        """A leap is over."""


class Leap:
    """The steps of decoders that are alone, from one moment on. `plan_ahead` and `apply` in turns, then `close`."""

    def __init__(self, simulation: Leaper) -> None:
        """simulation: one whose decoders are alone."""
        self._simulation = simulation
        self._decoders = simulation.decoders
        self._manager = simulation.scheduler.manager
        self._cost = simulation.cost
        self._before = simulation.decoders.step  # steps of theirs before the first one
        self.seconds = 0.0  # of the first step that was planned last
        self.times = [simulation.now]  # when it began, and the ends of the steps that are planned
        self.num_applied = 0  # steps
        self._most_taken = 0  # blocks of each group that the steps take which are planned
        every = simulation.sample_every  # of the steps from the first one on
        self._next_look = -simulation.num_steps % every + 1 if every else math.inf

    @property
    def num_planned(self) -> int:
        """Steps whose ends are known."""
        return len(self.times) - 1

    def plan_ahead(self, until: float = math.inf) -> bool:
        """Find when the next steps end, as far as the first one after which a request ends. False: a plan is needed.

        All steps that are planned have been applied. until: the first one that ends then or later is the last one.
        """
        times, count = self.times, self._decoders.count
        if not count or len(times) > MOST_STEPS:
            return False
        # A request takes a block at most in so many steps as a block has tokens.
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
        """Plan no step that begins then or later; the one under way goes on."""
        del self.times[bisect_right(self.times, moment) + 1 :]

    def evicts_by(self, moment: float) -> bool:
        """Whether blocks may be evicted in steps that have ended by then and are not applied."""
        at = self._decoders.next_taker - self._before
        if at >= len(self.times) or self.times[at] > moment:
            return False
        free = min([pool.num_free for pool in self._manager.pools])
        return self._manager.evicts(min(free, self._most_taken))

    def blocks_by(self, step: int) -> tuple[int, int]:
        """Blocks that requests have taken by the end of a planned step, and how many more are reusable.

        In every group, and not in the books yet.
        """
        step += self._before
        taken, filled = self._decoders.taken_blocks(step), self._decoders.unpublished_blocks(step)
        reusable, blocks = self._manager.indexes[0].by_block, self._manager.pools[0].next_free(taken)
        empty = next((i for i, block in enumerate(blocks) if block in reusable), taken)  # empty blocks are taken first
        return taken, filled - (taken - empty)

    def blocks_taken(self, moment: float) -> list[set[int]]:
        """The blocks of each group that the steps take which have begun by then, and that are not in the books yet."""
        under_way = min(self.num_done(moment) + 1, self.num_planned)
        taken = self._decoders.taken_blocks(self._before + under_way)
        return [set(pool.next_free(taken)) for pool in self._manager.pools]

    def num_done(self, moment: float) -> int:
        """Planned steps that have ended by then."""
        return bisect_right(self.times, moment) - 1

    def apply(self, stop: int) -> list[Event]:
        """Let the steps happen up to that number. The ends of requests."""
        ended: list[Event] = []
        if stop <= self.num_applied:
            return ended
        while self._next_look <= stop:
            ended += self._go_on(int(self._next_look))
            self._simulation.look()
            self._next_look += self._simulation.sample_every
        return ended + self._go_on(stop)

    def _go_on(self, stop: int) -> list[Event]:
        """Let steps happen that end no request but in the last one of them."""
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
        """Let requests take the blocks that they need in the steps up to that one."""
        wanted = self._decoders.blocks_wanted(self._before + stop)
        if not wanted:
            return
        if not self._manager.evicts(len(wanted)):
            self._take(wanted[-1][0], [request for _, request in wanted])
            return
        for step, those in groupby(wanted, itemgetter(0)):  # the others hear of them when
            self._take(step, [request for _, request in those])

    def _take(self, step: int, requests: list[Request]) -> None:
        times, at = self.times, step - self._before
        self._manager.now = times[at - 1]
        self._decoders.take(requests)
        if at < self.num_applied:
            self._simulation.note_blocks(times[at])

    def delay(self, seconds: float) -> None:
        """Let the last planned step end so much later."""
        self.times[-1] += seconds

    def close(self) -> None:
        """Let the next step begin when the last one that was applied has ended."""
        self._simulation.leapt(self.times[self.num_applied])
