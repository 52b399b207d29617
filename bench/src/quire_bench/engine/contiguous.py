"""Serving from one stretch of memory for each request: what paging is measured against.

Every request reserves as many slots as it may ever fill, side by side, before it runs, and keeps them until it ends.
The scheduling is Quire's own (first come first served, one token a step, prompts in pieces under the same budget of
tokens), so that only the memory differs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import BadValue, ConfigError


class ContiguousAllocator:
    """A first-fit allocator over a list of gaps, which join with their neighbours when memory comes back."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.num_free = num_slots
        self._gaps = [(0, num_slots)] if num_slots else []  # start and end, by start; no two of them touch
        self._taken: dict[int, int] = {}  # start -> end

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Start and end of each free stretch, in order."""
        return tuple(self._gaps)

    def allocate(self, size: int) -> int | None:
        """Take the beginning of the first gap of at least that size; its start. None, taking nothing, without one.

        Raises BadValue for a size below 1.
        """
        if size < 1:
            raise BadValue(f"{size} slots were asked for; it must be at least 1")
        for i, (start, end) in enumerate(self._gaps):
            if end - start >= size:
                self._gaps[i : i + 1] = [(start + size, end)] if end - start > size else []
                self._taken[start] = start + size
                self.num_free -= size
                return start
        return None

    def free(self, start: int) -> None:
        """Take back what was allocated there. Raises BadValue where nothing was."""
        if start not in self._taken:
            raise BadValue(f"slot {start} is freed, but no allocation begins there")
        end = self._taken.pop(start)
        self.num_free += end - start
        at = bisect_left(self._gaps, (start, end))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end = self._gaps.pop(at)[1]
        if at > 0 and self._gaps[at - 1][1] == start:
            start = self._gaps.pop(at - 1)[0]
        insort(self._gaps, (start, end))


@dataclass(eq=False)
class Reservation:
    """One request and the memory that is its own."""

    num_tokens: int  # the prompt, then what was generated, too
    longest: int  # tokens at which it ends
    size: int  # slots that it reserves; the last token needs none
    start: int | None = None  # the first of them, while it runs; set by ContiguousScheduler
    num_computed: int = 0  # slots that hold a token; set by ContiguousScheduler

    @property
    def num_missing(self) -> int:
        """Tokens still to be computed."""
        return self.num_tokens - self.num_computed


class ContiguousScheduler:
    """plan() and commit(), as quire.engine.scheduler.Scheduler has them, over contiguous memory."""

    def __init__(self, requests: Iterable[Reservation], num_slots: int, max_num_batched_tokens: int) -> None:
        """Raises ConfigError for a request that could never run here."""
        self.allocator = ContiguousAllocator(num_slots)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = deque(requests)  # in the order of arrival
        self.running: list[Reservation] = []
        for i, request in enumerate(self.waiting):
            if not request.longest - 1 <= request.size <= num_slots:
                raise ConfigError(
                    f"request {i} reserves {request.size} slots; it must be at least {request.longest - 1}, one for "
                    f"each token but the last, and at most the {num_slots} slots that there are"
                )

    @property
    def has_work(self) -> bool:
        """Return whether any request has not ended."""
        return bool(self.waiting or self.running)

    def plan(self) -> list[tuple[Reservation, int]]:
        """The next step: who computes how many tokens. A request comes in with all of its memory or not at all."""
        budget, items = self.max_num_batched_tokens, []
        singles = sum(request.num_missing == 1 for request in self.running)
        for request in self.running:
            num_new = 1 if request.num_missing == 1 else min(request.num_missing, budget - singles)
            singles -= request.num_missing == 1
            if 0 < num_new <= budget:
                items.append((request, num_new))
                budget -= num_new
        while self.waiting and budget > 0:
            request = self.waiting[0]
            request.start = self.allocator.allocate(request.size)
            if request.start is None:
                break
            self.running.append(self.waiting.popleft())
            items.append((request, min(request.num_missing, budget)))
            budget -= items[-1][1]
        return items

    def commit(self, items: Iterable[tuple[Reservation, int]]) -> None:
        """Take over what the step computed: who has all of his tokens got one more, or has come to his end."""
        for request, num_new in items:
            request.num_computed += num_new
            if request.num_missing == 0:
                request.num_tokens += 1
            if request.num_tokens == request.longest and request.start is not None:
                self.running.remove(request)
                self.allocator.free(request.start)
