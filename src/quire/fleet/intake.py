"""Intake: enters the frames of replicas into outputs, and delivers them to clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from quire.fleet.link import Link
from quire.fleet.placement import NEW
from quire.fleet.shared import Shared
from quire.fleet.wire import Frame
from quire.fleet.work import Assignment, Work
from quire.frontend.jobs import GenerationJob

log = logging.getLogger("quire.fleet")


class Intake:
    """Takes in frames."""

    def __init__(self, shared: Shared, accepted: Callable[[Assignment], None]) -> None:
        """accepted: called with a call of which a frame arrived before the replica's answer."""
        self._shared = shared
        self._accepted = accepted

    def frames(self, link: Link, frames: Sequence[Frame]) -> None:
        """Take in the frames of a step. A client gets the deltas of all its samples together."""
        grown: dict[GenerationJob, dict[Work, None]] = {}
        try:
            for frame in frames:
                assignment = self._shared.calls.of(link, frame.flow)
                if assignment is None or frame.sample not in assignment.samples:
                    self._shared.metrics.count("late_frames")
                elif self._enter(assignment, frame):
                    grown.setdefault(assignment.work.job, {})[assignment.work] = None
        finally:  # frames that were entered are delivered even if a later one is invalid
            for job, works in grown.items():
                self._report(job, works)

    def _enter(self, assignment: Assignment, frame: Frame) -> bool:
        """Take in a frame. Return False if it has nothing new. Raises WireError for an invalid one."""
        work, shared = assignment.work, self._shared
        is_new = work.enter(frame)
        if not assignment.is_placed:
            self._accepted(assignment)
        if is_new and frame.tokens:
            self._measure(assignment, frame.sample)
        ledger = work.ledgers[frame.sample]
        if ledger.output.finished:
            assignment.samples.discard(frame.sample)
            if not assignment.samples:
                shared.calls.forget(assignment, "finished")
            if is_new:
                work.output.num_running -= 1
                work.job.num_open -= work.output.finished
                shared.chooser.averages.ended(len(ledger.tokens))
        if frame.more is None:
            return is_new
        if count := frame.more.get("differences", 0):
            shared.metrics.count("resume_mismatch", amount=count)
            url = assignment.link.url
            log.error("replica %s draws other tokens than those that were delivered before it took over", url)
        if "cached" in frame.more:
            cached, num_prompt = frame.more["cached"], len(work.output.prompt_token_ids)
            shared.chooser.averages.began(cached, num_prompt)
            shared.metrics.count("prompt_tokens", amount=num_prompt)
            shared.metrics.count("cached_tokens", amount=cached)
        return True

    def _measure(self, assignment: Assignment, sample: int) -> None:
        """Record a new token of a sample. If it is the first one from this replica, measure how long it took."""
        work, placement, now = assignment.work, assignment.placement, time.monotonic()
        work.num_lost = 0
        if sample not in assignment.heard:
            assignment.heard.add(sample)
            seconds = now - work.last_tokens.get(sample, work.began)
            if not work.last_tokens:
                self._shared.metrics.observe("time_to_first_token", seconds)
            if placement.cause is not NEW:
                self._shared.metrics.observe("stall", seconds)
            if placement.seconds is None:
                placement.seconds = seconds
        work.last_tokens[sample] = now

    def _report(self, job: GenerationJob, works: Iterable[Work]) -> None:
        """Deliver the deltas of a job's outputs, and close the job if all its samples have ended."""
        jobs = self._shared.jobs
        if job not in jobs:
            return
        with jobs.closing(job):  # an error here is not the replica's fault
            if deltas := [delta for work in works for delta in job.news(work.output)]:
                job.take(deltas)
        if job.num_open == 0:
            jobs.close(job)
