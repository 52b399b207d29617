"""OpenJobs: the jobs of a gateway that have not ended, with their prompts and deadlines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from quire.fleet.calls import Calls
from quire.fleet.metrics import FleetMetrics
from quire.fleet.search import FleetSearch
from quire.fleet.work import Work
from quire.frontend.jobs import GenerationJob, Job
from quire.request import FinishReason
from quire.server.http.api_error import ApiError, deadline_passed, internal_error
from quire.server.http.timers import PatientTimer

log = logging.getLogger("quire.fleet")


class OpenJobs:
    """Admits jobs, and ends each once."""

    def __init__(self, calls: Calls, metrics: FleetMetrics, limit: float | None) -> None:
        """limit: seconds that a job may take; None: no limit."""
        self._calls = calls
        self._metrics = metrics
        self._limit = limit
        self._timers: dict[Job, PatientTimer | None] = {}
        self._works: dict[GenerationJob, list[Work]] = {}

    def __contains__(self, job: Job) -> bool:
        return job in self._timers

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._timers))

    @property
    def works(self) -> list[Work]:
        """The prompts that are open."""
        return [work for works in self._works.values() for work in works]

    @property
    def searches(self) -> list[FleetSearch]:
        """The beam searches that are open."""
        return [job for job in self._timers if isinstance(job, FleetSearch)]

    def of(self, job: GenerationJob) -> Sequence[Work]:
        """Return the prompts of a job; none if it has ended."""
        return self._works.get(job, ())

    def admit(self, job: Job, works: Sequence[Work] = ()) -> None:
        """Add a job with its prompts. Its time begins."""
        if isinstance(job, GenerationJob):
            self._works[job] = list(works)
        timer = None
        if self._limit is not None:
            timer = PatientTimer(self._limit, self.close, job, deadline_passed(self._limit))
        self._timers[job] = timer

    def abort(self, job: Job) -> None:
        """End a job, and its samples as aborted."""
        if job in self:
            for work in self._works.get(job, []):  # type: ignore[call-overload]
                work.end(FinishReason.ABORT)
            self.close(job)

    @contextmanager
    def closing(self, job: Job) -> Iterator[None]:
        """Close a job with the error that its block raises: without this its client would wait forever."""
        try:
            yield
        except ApiError as error:
            self.close(job, error)
        except Exception as error:
            log.exception("a request cannot continue")
            self.close(job, internal_error(error))

    def close(self, job: Job, error: ApiError | None = None) -> None:
        """End a job: wake its waiter, and abort its calls at replicas."""
        if job not in self:
            return
        timer = self._timers.pop(job)
        if timer is not None:
            timer.cancel()
        if isinstance(job, GenerationJob):
            for work in self._works.pop(job):
                for assignment in set(work.assigned.values()):
                    self._calls.give_up(assignment, "taken back")
        elif isinstance(job, FleetSearch) and job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()
        if error is not None:
            self._metrics.count("refused", error.status)
        job.error = error
        job.ended.set()
        job.take([])
