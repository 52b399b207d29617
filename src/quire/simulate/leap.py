"""Leap: steps that only decode, computed without planning and committing each of them.

While nothing waits and blocks suffice, a plan is known beforehand: every running request gets one token. What changes
is when a request needs its next block, when it fills one and when it ends; between these steps only time passes. The
results are those of planning each step, to the last bit of every time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Protocol

from quire.engine.cost import CostModel
from quire.engine.pace import LEAST
from quire.engine.plan import Plan, StepOutput
from quire.engine.scheduler import Scheduler
from quire.errors import BadValue
from quire.request import Event, FinishReason, Request, Task
from quire.simulate.prompts import NamedTokens

NUM_FAKE_TOKENS = 65_521  # a prime, so that requests of neighbouring ordinals draw different tokens
MOST_STEPS = 4096  # that are planned ahead
GROW, ADVANCE = 0, 1  # in the order of a step


def fake_token(request: Request, position: int) -> int:
    """What a request draws for that position."""
    return (40_503 * request.schedule.ordinal + 30_011 * position) % NUM_FAKE_TOKENS


def can_leap(scheduler: Scheduler) -> bool:
    """Whether the next steps decode all running requests and do nothing else."""
    running = scheduler.running
    if not running or scheduler.waiting or scheduler.swapped or scheduler.manager.frees_early:
        return False
    if scheduler.lookup is not None or len(running) > scheduler.max_num_batched_tokens:
        return False
    if scheduler.pace is not None and len(running) >= LEAST:  # else it learns nothing from these steps
        return False
    return all(
        len(one.tokens) - one.cache.num_computed == 1
        and one.num_generated > 0
        and one.finish_reason is None
        and one.group is None
        and one.guide is None
        and not one.driven
        and not one.to_check
        and not one.ending_tokens
        and one.task is Task.GENERATE
        and one.sampling.prompt_logprobs is None
        for one in running
    )


class Leaper(Protocol):
    """What leaps: a Simulation, which counts what its steps come to."""

    scheduler: Scheduler
    cost: CostModel
    num_steps: int
    sample_every: int

    @property
    def now(self) -> float:
        """The time."""

    def decoded(self, times: Sequence[float], start: int, stop: int, count: int) -> None:
        """So many requests got a token in each of the steps that end at times[start + 1 .. stop]."""

    def ended(self, event: Event) -> None:
        """A request has ended."""

    def look(self) -> None:
        """Look at how much of the cache is wasted."""

    def note_blocks(self, now: float) -> None:
        """Note how many blocks are used after a step, which ends at that time."""

    def leapt(self, now: float) -> None:
        """A leap is over, and all that run have got a token at this moment."""


class Leap:
    """The steps from one moment on. `plan_ahead` and `apply` in turns, then `close`."""

    def __init__(self, simulation: Leaper) -> None:
        """simulation: one for whose scheduler `can_leap` is true."""
        self._simulation = simulation
        self._scheduler = simulation.scheduler
        self._manager = simulation.scheduler.manager
        self._cost = simulation.cost
        self.seconds = 0.0  # of the first step that was planned last
        self.times = [simulation.now]  # when it began, and the ends of the steps that are planned
        self.num_applied = 0  # steps
        every = simulation.sample_every  # of the steps from the first one on
        self._next_look = -simulation.num_steps % every + 1 if every else math.inf
        running = self._scheduler.running
        self._keys = sum(request.cache.num_computed for request in running)  # after the last planned step
        self._known: dict[Request, int] = {}  # steps of each request that it has been told of
        # What comes in later steps: the step, what of it, by rank.
        self._coming: list[tuple[int, int, tuple[float, int, int], Request]] = []
        self._ends: list[tuple[int, tuple[float, int, int], Request]] = []  # heap, by the step
        size = self._manager.block_size
        for request in running:
            rank, computed = request.schedule.rank, request.cache.num_computed
            self._known[request] = 0
            # Step s computes the token at computed + s - 1, and needs room for computed + s.
            self._coming.append((max(1, request.cache.room - computed + 1), GROW, rank, request))
            if self._manager.lookup.shares(request):
                self._coming.append((size - computed % size, ADVANCE, rank, request))
            left = self._scheduler.longest(request) - len(request.tokens)
            self._ends.append((left, rank, request))
        heapq.heapify(self._coming)
        heapq.heapify(self._ends)

    @property
    def num_planned(self) -> int:
        """Steps whose ends are known."""
        return len(self.times) - 1

    def plan_ahead(self) -> bool:
        """Find when the next steps end, as far as the first one after which a request ends. False: a plan is needed.

        All steps that are planned have been applied.
        """
        count = len(self._scheduler.running)
        if not count or self.num_planned >= MOST_STEPS:
            return False
        # A request takes a block at most in so many steps as a block has tokens.
        room = min(pool.num_free for pool in self._manager.pools) // count * self._manager.block_size
        steps = min(self._ends[0][0] - self.num_planned, room, MOST_STEPS)
        if steps < 1:
            return False
        times, keys, decode, now = self.times, self._keys, self._cost.decoder(count), self.times[-1]
        self.seconds = decode(keys + count)
        for _ in range(steps):
            keys += count
            now += decode(keys)
            times.append(now)
        self._keys = keys
        return True

    def num_until(self, moment: float) -> int:
        """Planned steps up to the first one that ends then or later."""
        return min(self.num_planned, bisect_left(self.times, moment, 1))

    def is_cut_at(self, moment: float) -> bool:
        """Whether the last applied step ends then or later."""
        return self.times[self.num_applied] >= moment

    def cut(self, moment: float) -> None:
        """Plan no step that begins then or later; the one under way goes on."""
        stop = bisect_right(self.times, moment)
        lost = len(self.times) - 1 - stop
        if lost > 0:
            self._keys -= lost * len(self._scheduler.running)
            del self.times[stop + 1 :]

    def num_done(self, moment: float) -> int:
        """Planned steps that have ended by then."""
        return bisect_right(self.times, moment) - 1

    def apply(self, stop: int) -> list[Event]:
        """Let the steps happen up to that number. The ends of requests."""
        simulation, manager, coming, times = self._simulation, self._manager, self._coming, self.times
        ended: list[Event] = []
        begin = self.num_applied
        if stop <= begin:
            return ended
        count = len(self._scheduler.running)
        simulation.decoded(times, begin, stop, count)
        while coming and coming[0][0] <= stop:
            step, what, rank, request = heapq.heappop(coming)
            self._look(step - 1)
            manager.now = times[step - 1]
            if what == GROW:
                self._tell(request, step - 1)
                if not manager.grow(request, len(request.tokens), []):
                    raise BadValue(f"request {request.id} finds no block in a step that was to have enough of them")
                following = step + max(1, request.cache.room - len(request.tokens) + 1)
            else:
                self._tell(request, step)
                following = step + manager.block_size
            heapq.heappush(coming, (following, what, rank, request))
            coming = self._coming
            if coming[0][0] > step:
                if self._ends[0][0] <= step:
                    ended += self._end(step)
                    coming = self._coming
                simulation.note_blocks(times[step])
        if self._scheduler.running and self._ends[0][0] <= stop:
            self._look(stop - 1)
            manager.now = times[stop - 1]
            ended += self._end(stop)
            simulation.note_blocks(times[stop])
        self._look(stop)
        self.num_applied = stop
        self._scheduler.num_planned += (stop - begin) * count
        return ended

    def _look(self, step: int) -> None:
        """Look at the cache after those of the steps up to that one after which it is time to."""
        while self._next_look <= step:
            for request in self._scheduler.running:
                self._tell(request, int(self._next_look))
            self._simulation.look()
            self._next_look += self._simulation.sample_every

    def _tell(self, request: Request, step: int) -> None:
        """Let a request have the tokens of all steps up to that one."""
        new = step - self._known[request]
        if new > 0:
            self._known[request] = step
            start = len(request.tokens)
            if isinstance(request.tokens, NamedTokens):
                request.tokens.extend(range(new))
            else:
                request.tokens.extend([fake_token(request, at) for at in range(start, start + new)])
            self._manager.advance(request, new)

    def _end(self, step: int) -> list[Event]:
        """End the requests that draw their last token in that step."""
        gone: set[Request] = set()
        while self._ends and self._ends[0][0] <= step:
            _, _, request = heapq.heappop(self._ends)
            self._tell(request, step)
            self._keys -= request.cache.num_computed
            self._scheduler.finish(request.id, FinishReason.LENGTH)
            gone.add(request)
        self._coming = [one for one in self._coming if one[3] not in gone]
        heapq.heapify(self._coming)
        for request in gone:
            del self._known[request]
        events = self._scheduler.commit(Plan(), StepOutput({}))
        for event in events:
            self._simulation.ended(event)
        return events

    def delay(self, seconds: float) -> None:
        """Let the last planned step end so much later."""
        self.times[-1] += seconds

    def sync(self) -> None:
        """Let all requests have the tokens of the steps that were applied."""
        for request in self._scheduler.running:
            self._tell(request, self.num_applied)

    def close(self) -> None:
        """Let all requests have their tokens, so that the next step can be planned."""
        self.sync()
        self._simulation.leapt(self.times[self.num_applied])
