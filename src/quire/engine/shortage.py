"""Shortage: which waiting request found too few free blocks, so that its blocks are not looked for in every step."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.decisions import fits
from quire.request import Request

LOOK_AGAIN = 16  # plans after which its blocks are looked for again, even if no block was freed


class Shortage:
    """The last request that found too few free blocks."""

    def __init__(self) -> None:
        self._ordinal = -1  # of the request; -1: there was none yet
        self._spare: Sequence[int] = ()  # free blocks of each group that it might have taken
        self._plan = 0  # the number of the plan in which that was

    def note(self, request: Request, spare: Sequence[int], plan: int) -> None:
        """In the plan of that number the request found too few. spare: free blocks of each group that it may take."""
        self._ordinal, self._spare, self._plan = request.schedule.ordinal, spare, plan

    def is_of(self, request: Request) -> bool:
        """Whether it was this request."""
        return self._ordinal == request.schedule.ordinal

    def lasts(self, request: Request, spare: Sequence[int], plan: int) -> bool:
        """Whether the request need not look for its blocks in the plan of that number."""
        return self.is_of(request) and plan < self._plan + LOOK_AGAIN and fits(spare, self._spare)
