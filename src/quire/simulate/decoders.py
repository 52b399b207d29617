"""Decoders: the running requests that get a token in every step and need nothing else, tracked by one counter.

Their plan is known: each gets one token. Only the steps in which a request needs its next block or ends make a
difference. So steps that only decode need no plan. If a prompt is computed with them, the scheduler plans the prompt
alone, within the bounds that the decoders leave.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quire.engine.plan import GENERATE, Plan, StepOutput
from quire.engine.prefetch import LEAST_TOKENS
from quire.engine.prefill_budget import LEAST
from quire.engine.queue import RankedList
from quire.engine.scheduler import Scheduler
from quire.errors import BadValue
from quire.request import Event, FinishReason, Request
from quire.simulate.prompts import NamedTokens

NUM_FAKE_TOKENS = 65_521  # a prime, so that requests of neighbouring ordinals draw different tokens
NO_PLAN, NO_OUTPUT = Plan(), StepOutput({})  # for a commit that only ends requests


def fake_token(request: Request, position: int) -> int:
    """Return the token that a request draws for that position."""
    return (40_503 * request.schedule.ordinal + 30_011 * position) % NUM_FAKE_TOKENS


def drawn_token(request: Request, position: int) -> int:
    """Return the same; of tokens that are only named, always one token."""
    return 0 if isinstance(request.tokens, NamedTokens) else fake_token(request, position)


class Decoders:
    """The requests that get a token in every step and need nothing else. One counter counts the steps of all of them.

    They are the first running requests. Each allocates its blocks in time, but gets its tokens, and publishes its full
    blocks, only when it ends or is updated.
    """

    def __init__(self, scheduler: Scheduler, *, is_sparse: bool = False) -> None:
        """is_sparse: attention is to chosen keys, so the cost of a step depends on more than the number of keys."""
        self._is_sparse = is_sparse
        self.step = 0  # number of steps so far
        self.latest = 0.0  # time of their latest tokens, in seconds
        self.keys = 0  # tokens that all of them together have computed
        self._scheduler = scheduler
        self._manager = scheduler.manager
        self._as_of: dict[Request, int] = {}  # the step up to which each request has its tokens
        # Heaps, ordered by step. In _takers, the step in which a request needs its next block, or would if it had not
        # ended. In _ends, the step in which it draws its last token.
        self._takers: list[tuple[int, tuple[float, int, int], Request]] = []
        self._ends: list[tuple[int, tuple[float, int, int], Request]] = []

    @property
    def count(self) -> int:
        """The number of decoders."""
        return len(self._as_of)

    @property
    def next_end(self) -> int:
        """The step in which the next of them draws its last token."""
        return self._ends[0][0]

    @property
    def next_taker(self) -> int:
        """The step in which the next of them needs a block."""
        takers, as_of = self._takers, self._as_of
        while takers[0][2] not in as_of:
            heapq.heappop(takers)
        return takers[0][0]

    # ------------------------------------------------------------------------------------------------- membership

    def gather(self, latest: Mapping[str, float]) -> None:
        """Add the next running requests while they only decode. latest: time of each request's latest token."""
        running, as_of, step = self._scheduler.running, self._as_of, self.step
        if self._is_sparse or self._manager.frees_early or self._scheduler.speculation is not None:
            return
        while len(as_of) < len(running):
            request = running[len(as_of)]
            cache, length = request.cache, len(request.tokens)
            if length - cache.num_computed != 1 or length == request.num_prompt or cache.room < cache.num_computed:
                return
            if request.finish_reason is not None or request.to_check or not _is_plain(request):
                return
            if as_of and latest[request.id] != self.latest:
                return
            self.latest = latest[request.id]
            as_of[request] = step
            self.keys += cache.num_computed
            rank = request.schedule.sort_key
            # It computes the token at num_computed in the step after this one.
            heapq.heappush(self._takers, (step + cache.room - cache.num_computed + 1, rank, request))
            heapq.heappush(self._ends, (step + self._scheduler.longest(request) - length, rank, request))

    def scatter(self) -> list[Request]:
        """Update all decoders and remove them, so that the scheduler plans them again. Return them."""
        requests = list(self._as_of)
        self.update_all()
        self._as_of.clear()
        self._takers.clear()
        self._ends.clear()
        self.keys = 0
        return requests

    def update_all(self) -> None:
        """Give all decoders their tokens."""
        for request in self._as_of:
            self.update(request)

    def update(self, request: Request) -> None:
        """Give a request the tokens of its steps and publish its full blocks, if it is a decoder."""
        new = self.step - self._as_of.get(request, self.step)
        if new > 0:
            self._as_of[request] = self.step
            tokens = request.tokens
            if isinstance(tokens, NamedTokens):
                tokens.grow(new)
            else:
                start = len(tokens)
                tokens.extend([fake_token(request, at) for at in range(start, start + new)])
            self._manager.advance(request, new)

    def unpublished_blocks(self, step: int) -> int:
        """Return the number of blocks that are full by that step but not published."""
        if not self._manager.enable_prefix_caching:
            return 0
        size = self._manager.block_size
        return sum(
            [
                (one.cache.num_computed + step - as_of) // size - one.cache.num_published
                for one, as_of in self._as_of.items()
            ]
        )

    def taken_blocks(self, step: int) -> int:
        """Return the number of blocks that must be allocated by that step and are not yet."""
        size, as_of = self._manager.block_size, self._as_of
        return sum([(step - at) // size + 1 for at, _, one in self._takers if at <= step and one in as_of])

    # ------------------------------------------------------------------------------------------------------ steps

    def are_alone(self) -> bool:
        """Return whether the next step only decodes them and is irrelevant to the scheduler's pace and prefetch."""
        scheduler, count = self._scheduler, len(self._as_of)
        if not count or count < len(scheduler.running) or scheduler.waiting or scheduler.swapped or scheduler.is_ending:
            return False
        if scheduler.prefetch is not None and count >= LEAST_TOKENS:
            return False
        return count <= scheduler.max_num_batched_tokens and (scheduler.pace is None or count < LEAST)

    def leave_enough(self) -> bool:
        """Return whether each decoder gets its token in the next step, whatever the other requests get.

        Then there are blocks for all, and no other request ranks before a decoder.
        """
        scheduler, manager, count = self._scheduler, self._manager, len(self._as_of)
        first = scheduler.waiting.first()
        if not count or scheduler.swapped or scheduler.is_ending or count >= scheduler.max_num_batched_tokens:
            return False
        if first is not None and first.schedule.sort_key < scheduler.running[count - 1].schedule.sort_key:
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
    def offload_if_large(self) -> Iterator[None]:
        """Hide the decoders from the scheduler, which plans the others with the slots and tokens that are left."""
        scheduler, count = self._scheduler, len(self._as_of)
        running, slots, most, pace = (
            scheduler.running, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, scheduler.pace
        )  # fmt: skip
        others = RankedList(running[count:])
        del running[count:]
        budget = most
        if pace is not None:
            singles = sum([len(one.tokens) - one.cache.num_computed == 1 for one in others])
            budget = min(most, pace.most(count + singles))
        scheduler.running, scheduler.max_num_seqs, scheduler.pace = others, slots - count, None
        scheduler.max_num_batched_tokens = budget - count
        try:
            yield
        finally:
            running += scheduler.running
            scheduler.running, scheduler.max_num_seqs, scheduler.pace = running, slots, pace
            scheduler.max_num_batched_tokens = most

    def go_on(self, steps: int) -> None:
        """Count `steps` steps in which each decoder got a token."""
        self.step += steps
        self.keys += steps * len(self._as_of)

    def blocks_wanted(self, stop: int) -> list[tuple[int, Request]]:
        """Return the steps up to `stop` in which requests need a block, in order. Each is returned once."""
        takers, as_of, size = self._takers, self._as_of, self._manager.block_size
        wanted: list[tuple[int, Request]] = []
        while takers and takers[0][0] <= stop:
            step, rank, request = takers[0]
            if request in as_of:
                heapq.heapreplace(takers, (step + size, rank, request))
                wanted.append((step, request))
            else:
                heapq.heappop(takers)
        return wanted

    def take(self, requests: list[Request], times: list[float] | None = None) -> None:
        """Allocate the next block of each request. times: when each block is needed; None: now."""
        if requests and not self._manager.grow_each(requests, times):
            raise BadValue(f"{len(requests)} requests find no blocks in steps that should have enough of them")

    def end(self) -> list[Event]:
        """End the decoders that have drawn their last token."""
        scheduler, ends = self._scheduler, self._ends
        if not ends or ends[0][0] > self.step:
            return []
        while ends and ends[0][0] <= self.step:
            _, _, request = heapq.heappop(ends)
            self.update(request)
            del self._as_of[request]
            self.keys -= request.cache.num_computed
            scheduler.finish(request.id, FinishReason.LENGTH)
        return list(scheduler.commit(NO_PLAN, NO_OUTPUT))


def _is_plain(one: Request) -> bool:
    """Return whether a request simply generates tokens up to a maximum."""
    return (
        one.group is None
        and one.guide is None
        and not one.driven
        and not one.ending_tokens
        and one.task is GENERATE
        and one.sampling.prompt_logprobs is None
    )
