"""Calls: the bookkeeping of a gateway's open calls. It sends nothing, and needs no event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from quire.fleet.index import FleetIndex
from quire.fleet.link import Link
from quire.fleet.work import Assignment


class Unseen(NamedTuple):
    """The load at a replica that its latest state does not count."""

    tokens: int
    requests: int
    since: float  # s of time.monotonic(), when the first of these requests was sent


class Calls:
    """The assignments that have not ended, by flow."""

    def __init__(self, index: FleetIndex, abort: Callable[[Assignment], object]) -> None:
        """index: has an expectation of each call. abort: aborts a call at its replica."""
        self._index = index
        self._abort = abort
        self._open: dict[int, Assignment] = {}
        self._next_flow = 0

    def next_flow(self) -> int:
        """Return the number of a new call."""
        self._next_flow += 1
        return self._next_flow - 1

    def add(self, assignment: Assignment) -> None:
        """Add a call, which has its samples from now on."""
        self._open[assignment.flow] = assignment
        assignment.work.assigned.update(dict.fromkeys(assignment.samples, assignment))

    def is_open(self, assignment: Assignment) -> bool:
        """Return whether a call has neither ended nor been given up."""
        return self._open.get(assignment.flow) is assignment

    def of(self, link: Link, flow: int) -> Assignment | None:
        """Return a call of a replica; None if it has ended, or moved to another replica."""
        found = self._open.get(flow)
        return found if found is not None and found.link is link else None

    def accepted_by(self, link: Link) -> list[Assignment]:
        """Return the calls that a replica has accepted."""
        return [one for one in self._open.values() if one.link is link and one.is_placed]

    def movable(self, link: Link) -> list[Assignment]:
        """Return the calls that must leave a draining replica, and mark them: each is moved once."""
        found = [one for one in self.accepted_by(link) if not one.is_moving]
        for one in found:
            one.is_moving = True
        return found

    def seen(self, link: Link, flows: Sequence[int]) -> None:
        """Mark calls that the replica's state counts."""
        for flow in flows:
            if (assignment := self.of(link, flow)) is not None:
                assignment.is_seen = True

    def unseen(self) -> dict[Link, Unseen]:
        """Return the load that the replicas' states do not count yet."""
        found: dict[Link, Unseen] = {}
        for one in self._open.values():
            if not one.is_seen:
                tokens, requests, since = found.get(one.link, (0, 0, one.sent))
                tokens += one.placement.choice.best.uncached_tokens
                found[one.link] = Unseen(tokens, requests + len(one.samples), min(since, one.sent))
        return found

    def accept(self, assignment: Assignment) -> None:
        """Record that a replica accepted a call. The calls that had its samples before are given up."""
        assignment.is_placed = assignment.work.is_admitted = True
        replaced, assignment.replaced = assignment.replaced, {}
        for sample, other in replaced.items():
            other.samples.discard(sample)
            if not other.samples:
                self.give_up(other, "moved")

    def refuse(self, assignment: Assignment, before: Mapping[int, Assignment], *, is_over: bool) -> None:
        """Give a call up that its replica did not accept.

        before: the calls that had its samples, which get them back. is_over: the job has ended meanwhile, so that these
        calls are given up, too.
        """
        self.give_up(assignment, "not taken", is_error=True)
        for sample, other in before.items():
            if other.flow in self._open:
                assignment.work.assigned[sample] = other
        if is_over:
            for other in before.values():
                self.give_up(other, "taken back")

    def give_up(self, assignment: Assignment, why: str, *, is_error: bool = False) -> None:
        """Forget a call and abort it at its replica."""
        if self.forget(assignment, why, is_error=is_error) and assignment.link.is_up:
            self._abort(assignment)

    def forget(self, assignment: Assignment, why: str, *, is_error: bool = False) -> bool:
        """Forget a call, so that its frames are ignored. Return False if it was forgotten already.

        why: outcome for the trace.
        """
        if self._open.pop(assignment.flow, None) is None:
            return False
        self._index.settle(assignment.expectation)
        if assignment.span is not None:
            assignment.span.end(why, is_error=is_error)
        for sample in assignment.samples:
            if assignment.work.assigned.get(sample) is assignment:
                del assignment.work.assigned[sample]
        return True
