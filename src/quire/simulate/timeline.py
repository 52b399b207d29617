"""Timeline: the virtual clock of a cell, and the events on it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

STEPS, OTHERS = 0, 1  # priorities: at the same time, steps end before other events


class Timeline:
    """Runs events in the order of their times. Events at the same time run in the order in which they were pushed."""

    def __init__(self, seed: str, jitter: float) -> None:
        """jitter: average addition to a latency, as a share of it."""
        self.now = 0.0  # seconds
        self._jitter = jitter
        self._network = random.Random(f"{seed}/network")
        self._heap: list[tuple[float, int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0  # number of events
        self._hash = blake2b(digest_size=16)

    def push(self, at: float, what: Callable[..., None], *arguments: Any, step_of: int | None = None) -> None:
        """Call a function at a time. step_of: the number of a replica if it is the end of a step there."""
        self._count += 1
        order = (OTHERS, 0) if step_of is None else (STEPS, step_of)
        heapq.heappush(self._heap, (at, *order, self._count, what, arguments))

    def later(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        """Call a function after a number of seconds."""
        self.push(self.now + seconds, what, *arguments)

    def delay(self, seconds: float) -> float:
        """Return a latency with its jitter."""
        return seconds * (1 + self._jitter * self._network.expovariate(1.0)) if self._jitter else seconds

    def note(self, what: str, *words: object) -> None:
        """Add a decision to the hash of all decisions."""
        self._hash.update(f"{self.now!r} {what} {words}\n".encode())

    def run(self) -> str:
        """Run all events. Return the hash of all decisions."""
        heap = self._heap
        while heap:
            self.now, _, _, _, what, arguments = heapq.heappop(heap)
            what(*arguments)
        return self._hash.hexdigest()
