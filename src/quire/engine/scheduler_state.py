"""SchedulerState: the requests of an engine, by their state."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from itertools import pairwise

from quire.cache.audit import audit
from quire.cache.manager import BlockManager
from quire.cache.usage import CacheUsage, cache_usage, state_usage
from quire.engine.admission_backoff import Shortage
from quire.engine.decode_rows import DecodeRows
from quire.engine.plan import GENERATE, Plan
from quire.engine.policy import Order, first_come_first_served
from quire.engine.prefetch import Prefetch
from quire.engine.prefill_budget import PrefillBudget
from quire.engine.queue import SORT_KEY, RankedList, WaitingQueue
from quire.engine.speculation import Speculation
from quire.errors import BadValue, RequestError
from quire.request import FinishReason, Request

log = logging.getLogger("quire")


class SchedulerState:
    """The state that planning a step and applying its results share.

    A request is in one of three lists: it waits, runs (it owns blocks), or is swapped out (it owns blocks on the host).
    """

    def __init__(
        self,
        manager: BlockManager,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        order: Order = first_come_first_served,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.order = order
        self.speculation = speculation  # if set, proposes draft tokens where that is worthwhile
        self.clock = clock
        self.pace: PrefillBudget | None = None  # if set, steps in which sequences decode are shorter
        self.prefetch: Prefetch | None = None  # if set, requests may wait for blocks from other sources
        self.rows: DecodeRows | None = None  # if set, requests that merely decode are planned and committed as arrays
        self.running = RankedList()
        self.swapped = RankedList()
        self.waiting = WaitingQueue()
        self.requests: dict[str, Request] = {}  # all of these, by id
        self.num_preemptions = 0
        self.num_planned = 0  # tokens computed in all committed steps
        self.budget = max_num_batched_tokens  # of the last planned step
        self.longest_run = 0  # most rows of an image that one step had to compute, of all requests so far
        self.marked: list[Request] = []  # to be ended by the next commit
        self.num_plans = 0
        self._num_added = 0
        self.shortage = Shortage()

    @property
    def is_ending(self) -> bool:
        """True if the next commit ends requests, whatever its step computes for them."""
        return bool(self.marked)

    @property
    def has_work(self) -> bool:
        """True if any request has not ended."""
        return bool(self.requests)

    def usage(self) -> CacheUsage:
        """Return the current usage of the blocks of attention."""
        return cache_usage(self.manager, self.running)

    def state_usage(self) -> tuple[CacheUsage, CacheUsage]:
        """Return the current usage of the states, and of the rows of pieces in progress."""
        return state_usage(self.manager, self.running)

    def audit(self) -> None:
        """Verify the lists of requests and the cache's bookkeeping. Raises BadValue for an inconsistency."""
        listed = [*self.running, *self.swapped, *self.waiting]
        if sorted(r.schedule.ordinal for r in listed) != sorted(r.schedule.ordinal for r in self.requests.values()):
            raise BadValue(f"{len(self.requests)} requests are {len(listed)} times in the scheduler's lists")
        for name, one in (("running", self.running), ("swapped", self.swapped)):
            if any(a.schedule.sort_key >= b.schedule.sort_key for a, b in pairwise(one)):
                raise BadValue(f"the {name} requests are not in the order of their ranks")
        for r in listed:
            if bool(r.cache.block_ids) != (r in self.running) or bool(r.cache.host_block_ids) != (r in self.swapped):
                raise BadValue(f"request {r.id} has blocks elsewhere than the scheduler believes")
        if self.waiting and self.waiting.first() is not min(self.waiting, key=SORT_KEY):
            raise BadValue("the first of the waiting requests is not known as such")
        if self.rows is not None:
            self.rows.audit(self.running)
        audit(self.manager, list(self.requests.values()))

    def longest(self, request: Request) -> int:
        """Return the number of tokens, prompt included, at which the request ends at the latest."""
        asked = request.sampling.max_tokens if request.task is GENERATE else 0
        return self.max_model_len if asked is None else min(self.max_model_len, request.num_prompt + asked)

    def register(self, request: Request) -> None:
        """Give a new request its place in the order. Raises RequestError if its id is taken."""
        if request.id in self.requests:
            raise RequestError(f"request id {request.id!r} is taken by a request that has not ended")
        request.schedule.ordinal = self._num_added
        self._num_added += 1
        first = request.group.members[0] if request.group else request
        request.schedule.sort_key = (self.order(request), request.schedule.ordinal, request.schedule.ordinal)
        if first is not request:  # siblings are adjacent
            request.schedule.sort_key = (*first.schedule.sort_key[:2], request.schedule.ordinal)
        self.requests[request.id] = request

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """Mark a request to be ended by the next commit; an unknown or ended one is left alone."""
        request = self.requests.get(request_id)
        if request is not None and request.finish_reason is None:
            request.finish_reason = reason
            self.marked.append(request)
            if self.rows is not None:
                self.rows.drop(request)

    def others(self, rows: DecodeRows) -> list[Request]:
        """Return the running requests that have no row."""
        if len(rows) == len(self.running):
            return []
        return [request for request in self.running if request not in rows]

    def leave(self, request: Request) -> None:
        """Remove the request from its list, and free all of its blocks."""
        if self.rows is not None:
            self.rows.drop(request)
        if request.cache.block_ids:
            self.running.take_out(request)
        elif request.cache.host_block_ids:
            self.swapped.take_out(request)
        else:
            self.waiting.remove(request)
        self.manager.release(request)

    def keep_states(self, plan: Plan) -> None:
        """Make the step store states for later reuse, now that all of its requests have their blocks."""
        if self.manager.state_groups:
            for item in plan.items:
                try:
                    self.manager.keep_states(item.request, item.start, item.start + item.num_new)
                except Exception:  # nothing was allocated
                    log.exception("request %s stores no states for reuse", item.request.id)
