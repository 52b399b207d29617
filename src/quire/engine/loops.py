"""The two ways to go from step to step: one after the other, or overlapped.

A step is planned, computed by the device and committed. A device that computes by itself, as a GPU does, is idle while
the host plans and commits, unless the next step has been given to it by then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from quire.batch import Batch
from quire.engine.plan import Launched, Plan, StepOutput
from quire.engine.scheduler import Scheduler
from quire.request import Event

log = logging.getLogger("quire")


class StepRunner(Protocol):
    """What an engine needs of a runner. Steps are computed in the order in which they are launched."""

    def run(self, batch: Batch) -> StepOutput:
        """Compute one step."""

    def launch(self, batch: Batch) -> Launched:
        """Begin one step. The one before it may still be computed; what that draws can be among its tokens."""

    def is_lost(self) -> bool:
        """Whether no further step can be computed. Asked when one has failed."""


class Parts(Protocol):
    """What a loop drives: an engine's parts."""

    scheduler: Scheduler
    runner: StepRunner
    under_way: Plan | None

    def flatten(self, plan: Plan) -> Batch:
        """The plan as tensors."""


class Loop(Protocol):
    """From step to step."""

    def step(self, parts: Parts) -> list[Event]:
        """The events of the next step. An exception of it ends its requests, nothing else, see `Engine.step`."""


class SequentialLoop:
    """Plan, compute, commit, then the next step: the host waits for the device, and the device for the host."""

    def step(self, parts: Parts) -> list[Event]:
        """As `Loop.step`."""
        plan = parts.scheduler.plan()
        parts.under_way = plan
        try:
            output = StepOutput({}) if plan.is_empty else parts.runner.run(parts.flatten(plan))
        except BaseException as error:
            return _failed(parts, plan, error)
        finally:
            parts.under_way = None
        return parts.scheduler.commit(plan, output)


@dataclass(frozen=True)
class _Flight:
    """A step that was launched, or failed in that."""

    plan: Plan
    wait: Launched
    is_launched: bool = True


class OverlappedLoop:
    """While the device computes step n, the host plans and launches step n + 1; then it commits n, while n + 1 runs.

    A call of `step` returns the events of one step, and leaves the next one under way where the scheduler could plan it
    ahead. So what the caller does between two calls, such as making text, is done while the device computes. Where the
    next plan needs what the step finds, the loop goes on as the sequential one does.

    Step n + 1 has a row for each request that may go on. Where step n, or the caller after it, ends the request, that
    row is computed in vain, and its commit passes it over. Blocks that are freed meanwhile may be given away at once:
    the device computes one step after the other, so their owner writes to them later.
    """

    def __init__(self) -> None:
        self._ahead: _Flight | None = None  # launched by the last call

    def step(self, parts: Parts) -> list[Event]:
        """As `Loop.step`."""
        self._drop_unneeded(parts)  # the caller may have ended its requests
        flight = self._ahead or _launched(parts, parts.scheduler.plan())
        self._ahead = flight  # until the next one is planned: if that raises, nothing is lost
        plan = parts.under_way = flight.plan
        following = parts.scheduler.plan_ahead(plan) if flight.is_launched else None
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
            if self._ahead is not None and self._ahead.is_launched:  # it took this step's tokens for granted
                self._ahead = parts.under_way = None
            raise
        self._drop_unneeded(parts)
        return events

    def _drop_unneeded(self, parts: Parts) -> None:
        """Do not wait for a step that no request needs. One that failed is kept, so that its error is reported."""
        ahead = self._ahead
        if ahead is not None and ahead.is_launched and not parts.scheduler.is_needed(ahead.plan):
            self._ahead = parts.under_way = None


def _launched(parts: Parts, plan: Plan) -> _Flight:
    """Launch a step. What that raises is raised when it is waited for: the step before is to be committed first."""
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


def _failed(parts: Parts, plan: Plan, error: BaseException) -> list[Event]:
    """End the requests of a step that raised. Called where that is handled; raises it if none can be served."""
    ended = parts.scheduler.fail(plan, error)
    if not isinstance(error, Exception) or parts.runner.is_lost():
        raise error
    log.exception("a step failed; its %d requests end with an error", len(plan.items))
    return ended
