"""Requests by rank: the waiting queue, and sorted lists of the others."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice, takewhile
from operator import attrgetter

from quire.errors import BadValue
from quire.request import Request

SORT_KEY = attrgetter("schedule.sort_key")


class WaitingQueue:
    """Waiting requests in the order of their ranks. Adding and removing take at most logarithmic time."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}  # by ordinal
        self._heap: list[tuple[float, int, int]] = []  # rank of each of these once, and of some that have left
        self._in_heap: set[int] = set()  # ordinals

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.schedule.ordinal) is request

    def add(self, request: Request) -> None:
        """Add the request."""
        self._requests[request.schedule.ordinal] = request
        if request.schedule.ordinal not in self._in_heap:
            self._in_heap.add(request.schedule.ordinal)
            heapq.heappush(self._heap, request.schedule.sort_key)

    def remove(self, request: Request) -> None:
        """Remove the request, if it is waiting."""
        self._requests.pop(request.schedule.ordinal, None)

    def first(self) -> Request | None:
        """Return the request of the lowest rank, or None if none is waiting."""
        while self._heap:
            request = self._requests.get(self._heap[0][-1])
            if request is not None:
                return request
            self._in_heap.remove(heapq.heappop(self._heap)[-1])
        return None

    def pop(self) -> None:
        """Remove the first request."""
        ordinal = heapq.heappop(self._heap)[-1]
        self._in_heap.remove(ordinal)
        del self._requests[ordinal]


class RankedList(list[Request]):
    """Requests sorted by rank, with siblings next to each other."""

    def add(self, request: Request) -> None:
        """Insert the request by its rank."""
        insort(self, request, key=SORT_KEY)

    def take_out(self, request: Request) -> None:
        """Remove the request. Raises BadValue if it is not in the list."""
        at = bisect_left(self, request.schedule.sort_key, key=SORT_KEY)
        if at == len(self) or self[at] is not request:
            raise BadValue(f"request {request.id} is not in the list that its blocks imply")
        del self[at]

    def siblings_of(self, request: Request) -> Iterator[Request]:
        """Yield the request's siblings in the list, itself included; nothing if it has no group."""
        if request.group is not None:
            start = bisect_left(self, (*request.schedule.sort_key[:2], -1), key=SORT_KEY)
            yield from takewhile(lambda other: other.group is request.group, islice(self, start, None))

    def first_unit(self) -> list[Request]:
        """Return the first request with its siblings."""
        return _unit(self)

    def last_unit(self) -> list[Request]:
        """Return the last request with its siblings."""
        return _unit(reversed(self))[::-1]


def _unit(requests: Iterable[Request]) -> list[Request]:
    unit: list[Request] = []
    for request in requests:
        if unit and (request.group is None or request.group is not unit[0].group):
            break
        unit.append(request)
    return unit
