"""Requests by rank: those that wait, and lists of the others."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from operator import attrgetter

from quire.errors import BadValue
from quire.request import Request

RANK = attrgetter("schedule.rank")


class WaitingQueue:
    """Requests in the order of their ranks. Coming and going cost the logarithm of their number at most."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by ordinal
        self._heap: list[tuple[float, int, int]] = []  # the ranks of all these, once each, and of some that have left
        self._in_heap: set[int] = set()  # ordinals

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.schedule.ordinal) is request

    def add(self, request: Request) -> None:
        """Let the request wait."""
        self._requests[request.schedule.ordinal] = request
        if request.schedule.ordinal not in self._in_heap:
            self._in_heap.add(request.schedule.ordinal)
            heapq.heappush(self._heap, request.schedule.rank)

    def remove(self, request: Request) -> None:
        """Take the request out, if it waits."""
        self._requests.pop(request.schedule.ordinal, None)

    def first(self) -> Request | None:
        """The request of the lowest rank; None: none waits."""
        while self._heap:
            request = self._requests.get(self._heap[0][-1])
            if request is not None:
                return request
            self._in_heap.remove(heapq.heappop(self._heap)[-1])
        return None

    def pop(self) -> None:
        """Take the first request out."""
        ordinal = heapq.heappop(self._heap)[-1]
        self._in_heap.remove(ordinal)
        del self._requests[ordinal]


class RankedList(list[Request]):
    """Requests sorted by rank. Siblings stand side by side."""

    def add(self, request: Request) -> None:
        """Insert the request by its rank."""
        insort(self, request, key=RANK)

    def take_out(self, request: Request) -> None:
        """Take the request out. Raises BadValue if it is not there."""
        at = bisect_left(self, request.schedule.rank, key=RANK)
        if at == len(self) or self[at] is not request:
            raise BadValue(f"request {request.id} is not in the list that its blocks imply")
        del self[at]

    def siblings_of(self, request: Request) -> Iterator[Request]:
        """The request's siblings in the list, itself included; none of one that has no group."""
        if request.group is not None:
            start = bisect_left(self, (*request.schedule.rank[:2], -1), key=RANK)
            yield from takewhile(lambda other: other.group is request.group, islice(self, start, None))

    def first_unit(self) -> list[Request]:
        """The first request with its siblings."""
        return _unit(self)

    def last_unit(self) -> list[Request]:
        """The last request with its siblings."""
        return _unit(reversed(self))[::-1]


def _unit(requests: Iterable[Request]) -> list[Request]:
    unit: list[Request] = []
    for request in requests:
        if unit and (request.group is None or request.group is not unit[0].group):
            break
        unit.append(request)
    return unit
