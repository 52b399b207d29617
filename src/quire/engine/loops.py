"""The two ways to run steps: sequential or overlapped.

A step is planned, computed by the device and committed. An asynchronous device such as a GPU is idle while the host
plans and commits, unless the next step has already been launched.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.cache.storage import KVCache
from quire.engine.plan import Launched, Plan, StepOutput
from quire.engine.scheduler import Scheduler
from quire.models.batch import Batch
from quire.models.model import Model
from quire.request import Event

log = logging.getLogger("quire")


class StepRunner(Protocol):
    """The interface of a runner that an engine needs. Steps are computed in the order in which they are launched."""

    @property
    def cache(self) -> KVCache:
        """The memory of the blocks."""

    def use(self, model: Model) -> None:
        """Run this model from now on, with no block of earlier steps: the same one with other weights or memory."""

    def run(self, batch: Batch) -> StepOutput:
        """Compute one step."""

    def launch(self, batch: Batch) -> Launched:
        """Launch one step. The one before it may still be computing; tokens that it draws can be inputs of this one."""

    def is_lost(self) -> bool:
        """Return whether no further step can be computed. Called when a step has failed."""


class LoopParts(Protocol):
    """The parts of an engine that a loop drives."""

    scheduler: Scheduler
    runner: StepRunner
    under_way: Plan | None

    def flatten(self, plan: Plan) -> Batch:
        """Return the plan as tensors."""


class Loop(Protocol):
    """Runs an engine step by step."""

    def step(self, parts: LoopParts) -> Sequence[Event]:
        """Return the events of the next step. An exception of the step ends only its requests, see `Engine.step`."""

    def settle(self, parts: LoopParts) -> Sequence[Event]:
        """Return the events of a step that was launched ahead, if there is one, and launch no other."""


class SequentialLoop:
    """Finishes each step before it plans the next: the host waits for the device, and the device for the host."""

    def step(self, parts: LoopParts) -> Sequence[Event]:
        """Run one step, see `Loop.step`."""
        plan = parts.scheduler.plan()
        parts.under_way = plan
        try:
            output = StepOutput({}) if plan.is_empty else parts.runner.run(parts.flatten(plan))
        except BaseException as error:
            return _failed(parts, plan, error)
        finally:
            parts.under_way = None
        return parts.scheduler.commit(plan, output)

    def settle(self, parts: LoopParts) -> Sequence[Event]:  # noqa: ARG002  # nothing is launched ahead
        """Return no events."""
        return ()


@dataclass(frozen=True)
class _Flight:
    """A step that was launched, or whose launch failed."""

    plan: Plan
    wait: Launched
    is_launched: bool = True


class OverlappedLoop:
    """Plans and launches step n + 1 while the device computes step n, then commits n while n + 1 runs.

    A call of `step` returns the events of one step and leaves the next one running if the scheduler could plan it
    ahead. The caller's work between two calls, such as detokenization, thus overlaps with the device's. If the next
    plan needs the results of the current step, the loop falls back to the sequential order.

    Step n + 1 has a row for each request that may continue. If step n, or the caller after it, ends the request, that
    row is computed in vain, and its commit skips it. Blocks that are freed meanwhile may be reallocated at once: the
    device computes steps in order, so their new owner writes to them later.
    """

    def __init__(self) -> None:
        self._ahead: _Flight | None = None  # launched by the previous call

    def settle(self, parts: LoopParts) -> Sequence[Event]:
        """Commit the step that was launched ahead, see `Loop.settle`."""
        self._drop_unneeded(parts)
        return () if self._ahead is None else self._step(parts, plans_ahead=False)

    def step(self, parts: LoopParts) -> Sequence[Event]:
        """Run one step, see `Loop.step`."""
        self._drop_unneeded(parts)  # the caller may have ended its requests
        return self._step(parts, plans_ahead=True)

    def _step(self, parts: LoopParts, *, plans_ahead: bool) -> Sequence[Event]:
        flight = self._ahead or _launched(parts, parts.scheduler.plan())
        self._ahead = flight  # kept in case planning the next one raises
        plan = parts.under_way = flight.plan
        following = parts.scheduler.plan_ahead(plan) if plans_ahead and flight.is_launched else None
        self._ahead = None
        try:
            if following is not None:
                self._ahead = _launched(parts, following)
            output = flight.wait()
        except BaseException as error:
            return _failed(parts, plan, error)
        finally:
            parts.under_way = None if self._ahead is None else self._ahead.plan
        try:
            events = parts.scheduler.commit(plan, output)
        except BaseException:
            if self._ahead is not None and self._ahead.is_launched:  # its inputs assume this step's tokens
                self._ahead = parts.under_way = None
            raise
        self._drop_unneeded(parts)
        return events

    def _drop_unneeded(self, parts: LoopParts) -> None:
        """Drop a launched step that no request needs. A failed launch is kept, so that its error is reported."""
        ahead = self._ahead
        if ahead is not None and ahead.is_launched and not parts.scheduler.is_needed(ahead.plan):
            self._ahead = parts.under_way = None


def _launched(parts: LoopParts, plan: Plan) -> _Flight:
    """Launch a step. Defer an exception until the step is waited for, because the step before is committed first."""
    if plan.is_empty:
        return _Flight(plan, lambda: StepOutput({}))
    try:
        return _Flight(plan, parts.runner.launch(parts.flatten(plan)))
    except BaseException as error:
        return _Flight(plan, _raising(error), is_launched=False)


def _raising(error: BaseException) -> Launched:
    def wait() -> StepOutput:
        raise error

    return wait


def _failed(parts: LoopParts, plan: Plan, error: BaseException) -> Sequence[Event]:
    """End the requests of a step that raised. Called in its except block; re-raises if the engine is unusable."""
    ended = parts.scheduler.fail(plan, error)
    if not isinstance(error, Exception) or parts.runner.is_lost():
        raise error
    log.exception("a step failed; its %d requests end with an error", len(plan.items))
    return ended
