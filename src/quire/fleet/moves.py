"""Mover: moves the calls of replicas that are lost or drain to others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from quire.fleet.attempts import no_replica
from quire.fleet.link import Link
from quire.fleet.placement import Cause
from quire.fleet.placing import Placer
from quire.fleet.resume import why_to_end
from quire.fleet.shared import Shared
from quire.fleet.work import Assignment, Work
from quire.server.http.api_error import ApiError

log = logging.getLogger("quire.fleet")


class Mover:
    """Applies `why_to_end` and `Calls.movable`."""

    def __init__(self, shared: Shared, secret: str) -> None:
        self.placer = Placer(shared, secret, self._placed)
        self._shared = shared
        self._draining: set[Link] = set()

    def lost(self, link: Link) -> None:
        """Move the calls of a lost replica."""
        self._draining.discard(link)
        for assignment in self._shared.calls.accepted_by(link):
            self.failed(assignment, "lost")

    def failed(self, assignment: Assignment, why: str) -> None:
        """Move a call that its replica cannot complete. why: "lost" or "failed"."""
        work, samples, jobs = assignment.work, sorted(assignment.samples), self._shared.jobs
        url = assignment.link.url
        self._shared.calls.forget(assignment, why, is_error=True)
        if work.job not in jobs:
            return
        work.num_lost += 1
        end = why_to_end(self._shared.config.resume, work.num_lost, "the request before a new token came", url)
        if end is not None:
            jobs.close(work.job, no_replica(end))
            return
        self._shared.metrics.count("resumed", why)
        if not assignment.is_moving:  # else `_move` continues, or resumes it itself
            self._shared.tasks.spawn(self._resume(work, samples, Cause(why, url)))

    def drains(self, link: Link) -> None:
        """Move the calls of a replica that has begun to drain."""
        if link not in self._draining:
            self._draining.add(link)
            self._shared.tasks.spawn(self.empty(link))

    def came(self) -> None:
        """Move calls that had to stay at draining replicas, as another replica is available."""
        for link in self._draining:
            self._shared.tasks.spawn(self.empty(link))

    async def empty(self, link: Link) -> None:
        """Move a draining replica's requests to others. Those that no other replica accepts stay."""
        reasons = await asyncio.gather(*map(self._move, self._shared.calls.movable(link)))
        stay = [why for why in reasons if why is not None]
        if stay:
            log.warning("%d requests stay at %s, which is draining: %s", len(stay), link.url, stay[0])

    def _placed(self, assignment: Assignment) -> None:
        if assignment.link in self._draining:  # it began to drain after it had accepted this
            self._shared.tasks.spawn(self.empty(assignment.link))

    async def _move(self, assignment: Assignment) -> str | None:
        """Move an assignment to another replica. Return the reason if that is not possible."""
        work, link, cause = assignment.work, assignment.link, Cause("drained", assignment.link.url)
        samples, why = sorted(assignment.samples), None
        try:
            if samples:  # else it has ended meanwhile
                await self.placer.place(work, cause, samples, without=link)
                self._shared.metrics.count("resumed", "drained")
        except ApiError as error:
            why = str(error)
        except Exception as error:
            log.exception("a request cannot be moved")
            why = str(error)
        assignment.is_moving = False
        if why is not None and not self._shared.calls.is_open(assignment) and work.job in self._shared.jobs:
            await self._resume(work, [sample for sample in samples if sample not in work.assigned], cause)
        return why

    async def _resume(self, work: Work, samples: Sequence[int], cause: Cause) -> None:
        with self._shared.jobs.closing(work.job):
            await self.placer.place(work, cause, samples)
