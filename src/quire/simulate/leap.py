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
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from quire.engine.cost import CostModel
from quire.engine.pace import LEAST
from quire.engine.plan import GENERATE, Plan, StepOutput
from quire.engine.scheduler import Scheduler
from quire.errors import BadValue
from quire.request import Event, FinishReason, Request
from quire.simulate.prompts import NamedTokens

NUM_FAKE_TOKENS = 65_521  # a prime, so that requests of neighbouring ordinals draw different tokens
MOST_STEPS = 4096  # that are planned ahead


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
    for one in running:
        cache, length = one.cache, len(one.tokens)
        if length - cache.num_computed != 1 or length == one.num_prompt or cache.room < cache.num_computed:
            return False
        if one.finish_reason is not None or one.to_check or not _is_plain(one):
            return False
    return True


def _is_plain(one: Request) -> bool:
    """Whether a request only gets token after token, up to a number of them."""
    return (
        one.group is None
        and one.guide is None
        and not one.driven
        and not one.ending_tokens
        and one.task is GENERATE
        and one.sampling.prompt_logprobs is None
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
        self._evicts = False  # the steps that are planned
        every = simulation.sample_every  # of the steps from the first one on
        self._next_look = -simulation.num_steps % every + 1 if every else math.inf
        running = self._scheduler.running
        self._keys = sum(request.cache.num_computed for request in running)  # after the last planned step
        self._known: dict[Request, int] = {}  # steps of each request that it has been told of
        # Heaps, of all that run. A step, and who needs its next block there; the step, and who draws its last token.
        self._takers: list[tuple[int, tuple[float, int, int], Request]] = []
        self._ends: list[tuple[int, tuple[float, int, int], Request]] = []
        longest = self._scheduler.longest
        for request in running:
            rank, cache = request.schedule.rank, request.cache
            self._known[request] = 0
            # Step s computes the token at num_computed + s - 1.
            self._takers.append((cache.room - cache.num_computed + 1, rank, request))
            self._ends.append((longest(request) - len(request.tokens), rank, request))
        heapq.heapify(self._takers)
        heapq.heapify(self._ends)

    @property
    def num_planned(self) -> int:
        """Steps whose ends are known."""
        return len(self.times) - 1

    def plan_ahead(self, until: float = math.inf) -> bool:
        """Find when the next steps end, as far as the first one after which a request ends. False: a plan is needed.

        All steps that are planned have been applied. until: the first one that ends then or later is the last one.
        """
        count = len(self._scheduler.running)
        if not count or self.num_planned >= MOST_STEPS:
            return False
        # A request takes a block at most in so many steps as a block has tokens.
        size, free = self._manager.block_size, min([pool.num_free for pool in self._manager.pools])
        steps = min(self._ends[0][0] - self.num_planned, free // count * size, MOST_STEPS)
        if steps < 1:
            return False
        self._evicts = self._manager.evicts(min(free, count * (-(-steps // size) + 1)))
        times, keys = self.times, self._keys
        self.seconds = self._cost.decoder(count)(keys + count)
        while steps > 0 and times[-1] < until:
            some = min(steps, max(1, math.ceil(min(steps, (until - times[-1]) / self.seconds)) + 1))
            times += self._cost.decode_ends(count, keys, times[-1], some)
            keys += some * count
            steps -= some
        if times[-1] >= until:
            stop = max(self.num_applied + 1, bisect_left(times, until, self.num_applied + 1))
            keys -= (len(times) - 1 - stop) * count
            del times[stop + 1 :]
        self._keys = keys
        return True

    def cut(self, moment: float) -> None:
        """Plan no step that begins then or later; the one under way goes on."""
        stop = bisect_right(self.times, moment)
        lost = len(self.times) - 1 - stop
        if lost > 0:
            self._keys -= lost * len(self._scheduler.running)
            del self.times[stop + 1 :]

    def evicts_by(self, moment: float) -> bool:
        """Whether blocks may be evicted in steps that have ended by then and are not applied."""
        at = self._takers[0][0] if self._evicts else len(self.times)
        return at < len(self.times) and self.times[at] <= moment

    def blocks_by(self, step: int) -> tuple[int, int]:
        """Blocks that requests have taken by the end of a planned step, and that became reusable, if none is evicted.

        In every group, since the steps that were applied.
        """
        size, known = self._manager.block_size, self._known
        taken = sum([(step - at) // size + 1 for at, _, _ in self._takers if at <= step])
        if not self._manager.enable_prefix_caching:
            return taken, 0
        published = sum(
            [
                (one.cache.num_computed + step - known[one]) // size - one.cache.num_published
                for one in self._scheduler.running
            ]
        )
        return taken, published

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
            self.sync()
            self._simulation.look()
            self._next_look += self._simulation.sample_every
        return ended + self._go_on(stop)

    def _go_on(self, stop: int) -> list[Event]:
        """Let steps happen that end no request but in the last one of them."""
        begin, times = self.num_applied, self.times
        ended: list[Event] = []
        if stop <= begin:
            return ended
        count = len(self._scheduler.running)
        self._simulation.decoded(times, begin, stop, count)
        self._scheduler.num_planned += (stop - begin) * count
        self.num_applied = stop
        is_end = self._ends[0][0] <= stop
        if is_end:
            self._take_blocks(stop - 1)
        self._take_blocks(stop)
        self._publish(stop)
        if is_end:
            ended = self._end(stop)
        self._simulation.note_blocks(times[stop])
        return ended

    def _take_blocks(self, stop: int) -> None:
        """Let requests take the blocks that they need in the steps up to that one."""
        takers, size = self._takers, self._manager.block_size
        taken: list[tuple[int, Request]] = []
        while takers[0][0] <= stop:
            step, rank, request = takers[0]
            heapq.heapreplace(takers, (step + size, rank, request))
            taken.append((step, request))
        if not taken:
            return
        if not self._manager.evicts(len(taken)):
            self._take(taken[-1][0], [request for _, request in taken])
            return
        for step, those in groupby(taken, itemgetter(0)):  # the others hear of them when
            self._take(step, [request for _, request in those])

    def _take(self, step: int, requests: list[Request]) -> None:
        manager, times = self._manager, self.times
        manager.now = times[step - 1]
        if not manager.grow_each(requests):
            raise BadValue(f"{len(requests)} requests find no blocks in steps that were to have enough of them")
        if step < self.num_applied:
            self._simulation.note_blocks(times[step])

    def _publish(self, stop: int) -> None:
        """Let requests have the tokens of the steps up to that one, where others may find a full block of them."""
        size, known = self._manager.block_size, self._known
        for request in self._scheduler.running:
            cache = request.cache
            if (cache.num_computed + stop - known[request]) // size > cache.num_published:
                self._tell(request, stop)

    def _tell(self, request: Request, step: int) -> None:
        """Let a request have the tokens of all steps up to that one."""
        new = step - self._known[request]
        if new > 0:
            self._known[request] = step
            tokens = request.tokens
            if isinstance(tokens, NamedTokens):
                tokens.grow(new)
            else:
                start = len(tokens)
                tokens.extend([fake_token(request, at) for at in range(start, start + new)])
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
        self._takers = [one for one in self._takers if one[2] not in gone]
        heapq.heapify(self._takers)
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
