"""Shortage: the waiting request that found too few free blocks, so that not every step looks for its blocks again."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.decisions import fits
from quire.request import Request

LOOK_AGAIN = 16  # plans after which its blocks are looked for again, even if none was freed


class Shortage:
    """The last request that found too few free blocks."""

    def __init__(self) -> None:
        self._ordinal = -1  # of the request; -1: none so far
        self._spare: Sequence[int] = ()  # free blocks of each group that it might have taken
        self._plan = 0  # number of the plan in which it found too few

    def note(self, request: Request, spare: Sequence[int], plan: int) -> None:
        """Record that the request found too few blocks in plan number `plan`.

        spare: free blocks of each group that it may take.
        """
        self._ordinal, self._spare, self._plan = request.schedule.ordinal, spare, plan

    def is_of(self, request: Request) -> bool:
        """Return whether the recorded request is this one."""
        return self._ordinal == request.schedule.ordinal

    def lasts(self, request: Request, spare: Sequence[int], plan: int) -> bool:
        """Return whether the request need not look for its blocks in plan number `plan`."""
        return self.is_of(request) and plan < self._plan + LOOK_AGAIN and fits(spare, self._spare)
