"""Leap: steps that only decode, computed without planning and committing each of them.

While nothing waits and blocks suffice, a plan is known beforehand: every running request gets one token. What changes
is when a request needs its next block and when it ends; between these steps only time passes. Where another request's
prompt is computed, too, the scheduler plans that one alone, with what the others leave of its bounds. The results are
those of planning every request in each step, to the last bit of every time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from quire.engine.cost import CostModel
from quire.engine.pace import LEAST
from quire.engine.plan import GENERATE, Plan, StepOutput
from quire.engine.queue import RankedList
from quire.engine.scheduler import Scheduler
from quire.errors import BadValue
from quire.request import Event, FinishReason, Request
from quire.simulate.prompts import NamedTokens

NUM_FAKE_TOKENS = 65_521  # a prime, so that requests of neighbouring ordinals draw different tokens
MOST_STEPS = 4096  # that are planned ahead
NO_PLAN, NO_OUTPUT = Plan(), StepOutput({})  # of a commit that only ends requests


def fake_token(request: Request, position: int) -> int:
    """What a request draws for that position."""
    return (40_503 * request.schedule.ordinal + 30_011 * position) % NUM_FAKE_TOKENS


class Decoders:
    """The requests that get a token in every step and need nothing else. One number counts the steps of all of them.

    They are the first ones that run. Each takes the blocks that it needs in time, but gets its tokens, and offers its
    full blocks to others, only when it ends or when it is told.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.step = 0  # that they have made
        self.latest = 0.0  # when they drew their latest tokens, in seconds
        self.keys = 0  # tokens that all of them have computed
        self._scheduler = scheduler
        self._manager = scheduler.manager
        self._told: dict[Request, int] = {}  # the step as of which each has its tokens
        # Heaps, whose first numbers are steps. Who needs its next block there, or needed it if it had not ended; and
        # who draws its last token there.
        self._takers: list[tuple[int, tuple[float, int, int], Request]] = []
        self._ends: list[tuple[int, tuple[float, int, int], Request]] = []

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self._told)

    @property
    def next_end(self) -> int:
        """The step in which the next of them draws its last token."""
        return self._ends[0][0]

    @property
    def next_taker(self) -> int:
        """The step in which the next of them needs a block."""
        takers, told = self._takers, self._told
        while takers[0][2] not in told:
            heapq.heappop(takers)
        return takers[0][0]

    # ----------------------------------------------------------------------------------------------- who they are

    def gather(self, latest: Mapping[str, float]) -> None:
        """Take in the next ones that run, as far as they only decode. latest: when each drew its latest token."""
        running, told, step = self._scheduler.running, self._told, self.step
        if self._manager.frees_early or self._scheduler.lookup is not None:
            return
        while len(told) < len(running):
            request = running[len(told)]
            cache, length = request.cache, len(request.tokens)
            if length - cache.num_computed != 1 or length == request.num_prompt or cache.room < cache.num_computed:
                return
            if request.finish_reason is not None or request.to_check or not _is_plain(request):
                return
            if told and latest[request.id] != self.latest:
                return
            self.latest = latest[request.id]
            told[request] = step
            self.keys += cache.num_computed
            rank = request.schedule.rank
            # In the step after this one it computes the token at num_computed.
            heapq.heappush(self._takers, (step + cache.room - cache.num_computed + 1, rank, request))
            heapq.heappush(self._ends, (step + self._scheduler.longest(request) - length, rank, request))

    def scatter(self) -> list[Request]:
        """Tell them all, and be none: the scheduler plans each of them again. Who they were."""
        requests = list(self._told)
        self.tell_all()
        self._told.clear()
        self._takers.clear()
        self._ends.clear()
        self.keys = 0
        return requests

    def tell_all(self) -> None:
        """Let all of them have their tokens."""
        for request in self._told:
            self.tell(request)

    def tell(self, request: Request) -> None:
        """Let a request have the tokens of its steps, if it is one of these, and others find its full blocks."""
        new = self.step - self._told.get(request, self.step)
        if new > 0:
            self._told[request] = self.step
            tokens = request.tokens
            if isinstance(tokens, NamedTokens):
                tokens.grow(new)
            else:
                start = len(tokens)
                tokens.extend([fake_token(request, at) for at in range(start, start + new)])
            self._manager.advance(request, new)

    def untold_blocks(self, step: int) -> int:
        """Blocks that they will have filled by that step, and have not offered to others."""
        if not self._manager.enable_prefix_caching:
            return 0
        size = self._manager.block_size
        return sum(
            [
                (one.cache.num_computed + step - told) // size - one.cache.num_published
                for one, told in self._told.items()
            ]
        )

    def taken_blocks(self, step: int) -> int:
        """Blocks that they will have taken by that step, and have not taken yet."""
        size, told = self._manager.block_size, self._told
        return sum([(step - at) // size + 1 for at, _, one in self._takers if at <= step and one in told])

    # --------------------------------------------------------------------------------------------- what they do

    def are_alone(self) -> bool:
        """Whether the next step decodes them and does nothing else, nor has the scheduler anything to learn of it."""
        scheduler, count = self._scheduler, len(self._told)
        if not count or count < len(scheduler.running) or scheduler.waiting or scheduler.swapped:
            return False
        return count <= scheduler.max_num_batched_tokens and (scheduler.pace is None or count < LEAST)

    def leave_enough(self) -> bool:
        """Whether each of them gets its token in the next step, whatever the others get in it.

        Then there are blocks for all, and nobody who ranks before one of these takes part.
        """
        scheduler, manager, count = self._scheduler, self._manager, len(self._told)
        first = scheduler.waiting.first()
        if not count or scheduler.swapped or count >= scheduler.max_num_batched_tokens:
            return False
        if first is not None and first.schedule.rank < scheduler.running[count - 1].schedule.rank:
            return False
        free = min([pool.num_free for pool in manager.pools]) - self.taken_blocks(self.step + 1)
        for one in scheduler.running[count:]:
            free -= max(manager.lacking(one))
            if free < 0 or one.group is not None:
                return False
        for one in scheduler.waiting:
            free -= max([manager.most_blocks(len(one.tokens), len(one.tokens), g) for g in range(len(manager.groups))])
            if free < 0 or one.group is not None:
                return False
        return free >= 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let the scheduler plan the others: with the seats, and of a step's tokens those, that these leave."""
        scheduler, count = self._scheduler, len(self._told)
        running, seats, most, pace = (
            scheduler.running, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.pace
        )  # fmt: skip
        others = RankedList(running[count:])
        del running[count:]
        budget = most
        if pace is not None:
            singles = sum([len(one.tokens) - one.cache.num_computed == 1 for one in others])
            budget = min(most, pace.most(count + singles))
        scheduler.running, scheduler.max_num_seqs, scheduler.pace = others, seats - count, None
        scheduler.max_num_batched_tokens = budget - count
        try:
            yield
        finally:
            running += scheduler.running
            scheduler.running, scheduler.max_num_seqs, scheduler.pace = running, seats, pace
            scheduler.max_num_batched_tokens = most

    def go_on(self, steps: int) -> None:
        """Count so many steps in which they got a token each."""
        self.step += steps
        self.keys += steps * len(self._told)

    def blocks_wanted(self, stop: int) -> list[tuple[int, Request]]:
        """Who needs a block in the steps up to that one, in their order, and when. Each is asked for once."""
        takers, told, size = self._takers, self._told, self._manager.block_size
        wanted: list[tuple[int, Request]] = []
        while takers and takers[0][0] <= stop:
            step, rank, request = takers[0]
            if request in told:
                heapq.heapreplace(takers, (step + size, rank, request))
                wanted.append((step, request))
            else:
                heapq.heappop(takers)
        return wanted

    def take(self, requests: list[Request]) -> None:
        """Let each of these have its next block."""
        if requests and not self._manager.grow_each(requests):
            raise BadValue(f"{len(requests)} requests find no blocks in steps that were to have enough of them")

    def end(self) -> list[Event]:
        """End those that have drawn their last token."""
        scheduler, ends = self._scheduler, self._ends
        if not ends or ends[0][0] > self.step:
            return []
        while ends and ends[0][0] <= self.step:
            _, _, request = heapq.heappop(ends)
            self.tell(request)
            del self._told[request]
            self.keys -= request.cache.num_computed
            scheduler.finish(request.id, FinishReason.LENGTH)
        return scheduler.commit(NO_PLAN, NO_OUTPUT)


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
        taken, filled = self._decoders.taken_blocks(step), self._decoders.untold_blocks(step)
        reusable = self._manager.indexes[0].by_block
        return taken, filled - sum([block in reusable for block in self._manager.pools[0].next_free(taken)])

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
