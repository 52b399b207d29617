"""Clocks: the times at which each request arrived, ran, grew and ended, for metrics and traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from quire.cache.events import BlocksAllocated, BlocksForked, BlocksShared, CacheEvent
from quire.frontend.jobs import BeamSearchJob, EngineStep, Job
from quire.frontend.metrics import Metrics, Moments, RequestClock
from quire.request import FinishReason, Request

log = logging.getLogger("quire")
FIRST_BLOCKS = (BlocksAllocated, BlocksShared, BlocksForked)  # one of these is the first event of a running request


class Traces(Protocol):
    """A recorder of the requests' times."""

    def began(self, requests: Iterable[Request]) -> None:
        """Record that requests are queued, below the open span."""

    def ended(self, name: str, moments: Moments, reason: str, now: float) -> None:
        """Record the times of a request that ended with a value of FinishReason. now: s of time.monotonic()."""


class Clocks:
    """A clock for each open request. Call its methods on the engine's thread, except `clock` and `began`."""

    def __init__(self, metrics: Metrics, traces: Traces | None) -> None:
        self._metrics = metrics
        self._traces = traces
        self._clocks: dict[str, RequestClock] = {}  # by request id
        self._waiting: set[str] = set()  # requests that have never run

    @property
    def is_empty(self) -> bool:
        """True if all requests have ended."""
        return not self._clocks and not self._waiting

    def clock(self, request: Request) -> RequestClock:
        """Start a request's clock at its arrival, not when a step accepts it. Called on the event loop."""
        sampling = request.sampling
        return self._metrics.request(request.num_prompt, sampling.max_tokens, sampling.n)

    def began(self, requests: Sequence[Request]) -> None:
        """Record that requests are queued, below the open span. Called on the event loop."""
        if self._traces is not None:
            self._traces.began(requests)

    def add(self, clocks: Mapping[str, RequestClock]) -> None:
        """Add the clocks of new requests."""
        self._clocks.update(clocks)
        self._waiting.update(clocks)

    def drop(self, job: Job) -> None:
        """Drop the open requests of a job that could not be queued."""
        now = time.monotonic()
        for request in job.requests:
            clock = self._clocks.pop(request.id, None)
            self._waiting.discard(request.id)
            if clock is not None:
                self._trace(request.id, clock, FinishReason.ERROR.value, now)

    def hear(self, event: CacheEvent) -> None:
        """Record from a cache event that a request starts to run."""
        if self._waiting and isinstance(event, FIRST_BLOCKS) and event.request_id in self._waiting:
            self._waiting.discard(event.request_id)
            self._clocks[event.request_id].scheduled(event.time)

    def observe(self, step: EngineStep) -> None:
        """Count the results of a step."""
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

    def _count_search(self, search: BeamSearchJob) -> int:
        """Count a finished search, whose tokens all arrive at its end. Return their number."""
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
        """Trace a request that has ended."""
        if self._traces is None:
            return
        try:
            self._traces.ended(name, clock.moments, reason, now)
        except Exception:  # a failure of observation must not affect requests
            log.exception("a request could not be traced")
