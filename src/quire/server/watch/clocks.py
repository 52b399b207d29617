"""Clocks: when each request came, ran, grew and ended, for metrics and traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from quire.aio import Step
from quire.cache.events import BlocksAllocated, BlocksForked, BlocksShared, CacheEvent
from quire.jobs import Job, Search
from quire.request import FinishReason, Request
from quire.server.watch.metrics import Metrics, RequestClock

if TYPE_CHECKING:  # its packages are an extra
    from quire.server.watch.traces import Traces

log = logging.getLogger("quire.server")
FIRST_BLOCKS = (BlocksAllocated, BlocksShared, BlocksForked)  # one of these comes first when a request begins to run


class Clocks:
    """A clock for each request that has not ended. Methods are the engine thread's, but for `clock` and `began`."""

    def __init__(self, metrics: Metrics, traces: Traces | None) -> None:
        self._metrics = metrics
        self._traces = traces
        self._clocks: dict[str, RequestClock] = {}  # by request id
        self._waiting: set[str] = set()  # requests that have never run

    @property
    def is_empty(self) -> bool:
        """Whether all requests have ended."""
        return not self._clocks and not self._waiting

    def clock(self, request: Request) -> RequestClock:
        """A request's clock starts when it comes, not when a step has time for it. The event loop's."""
        sampling = request.sampling
        return self._metrics.request(request.num_prompt, sampling.max_tokens, sampling.n)

    def began(self, requests: Sequence[Request]) -> None:
        """These requests are queued now, below the span that is open. The event loop's."""
        if self._traces is not None:
            self._traces.began(requests)

    def add(self, clocks: Mapping[str, RequestClock]) -> None:
        """These requests come now."""
        self._clocks.update(clocks)
        self._waiting.update(clocks)

    def drop(self, job: Job) -> None:
        """Those of its requests that have not ended never will: it could not be queued."""
        now = time.monotonic()
        for request in job.requests:
            clock = self._clocks.pop(request.id, None)
            self._waiting.discard(request.id)
            if clock is not None:
                self._trace(request.id, clock, FinishReason.ERROR.value, now)

    def hear(self, event: CacheEvent) -> None:
        """What happens in the cache says which request begins to run."""
        if self._waiting and isinstance(event, FIRST_BLOCKS) and event.request_id in self._waiting:
            self._waiting.discard(event.request_id)
            self._clocks[event.request_id].scheduled(event.time)

    def observe(self, step: Step) -> None:
        """Count what a step brought."""
        num_new = sum(self._count_search(search) for search in step.searches)
        for event, _ in step.texts:
            clock = self._clocks.get(event.request_id)
            if clock is None:
                continue
            if event.token is not None and event.drawn is None:
                num_new += 1
                clock.tokens(1, step.end)
            if event.hidden_state is not None:
                clock.computed(step.end)
            if event.finish_reason is not None:
                clock.ended(event.finish_reason.value, step.end)
                self._trace(event.request_id, clock, event.finish_reason.value, step.end)
                del self._clocks[event.request_id]
                self._waiting.discard(event.request_id)
        self._metrics.step(num_new, step.seconds)

    def _count_search(self, search: Search) -> int:
        """Its tokens are known at its end, all at once."""
        driver, clock = search.driver, self._clocks.pop(search.driver.request.id)
        reason, num_tokens = FinishReason.ERROR.value, 0
        self._waiting.discard(driver.request.id)
        found, now = driver.results(), time.monotonic()
        if driver.error is None and found:
            lengths = [len(hypothesis.tokens) for hypothesis in found]
            num_tokens = sum(lengths)
            clock.found(lengths, now)
            reason = found[0].finish_reason.value
        clock.ended(reason, now)
        self._trace(driver.request.id, clock, reason, now)
        return num_tokens

    def _trace(self, name: str, clock: RequestClock, reason: str, now: float) -> None:
        """A request has ended."""
        if self._traces is None:
            return
        try:
            self._traces.ended(name, clock.moments, reason, now)
        except Exception:  # who watches must not hurt who is served
            log.exception("a request could not be traced")
