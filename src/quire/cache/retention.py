"""Retention: the cached blocks that clients ask to keep, by key and until a time."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import count
from typing import NamedTuple

from quire.errors import BadValue
from quire.request import Retention

MOST_STALE = 1024  # deadlines of blocks that were extended or lost, in addition to those that count


class Owner(NamedTuple):
    """The key that keeps a block. Keys of clients with different salts are different."""

    salt: str
    key: str


class Mark(NamedTuple):
    """The reason to keep a block."""

    owner: Owner
    until: float  # s, of the manager's clock
    number: int  # of all marks, in their order


class Retained:
    """The blocks of one cache group that are kept. They are evicted after all others, and remain free blocks.

    A block belongs to the key that keeps it longest. A key keeps at most `budget` blocks: the least recently used ones,
    tails before heads, become ordinary cached blocks when it exceeds them, as does a block whose time is over.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget  # blocks of a key
        self._marks: dict[bytes, Mark] = {}  # by the block's digest
        self._of: dict[Owner, dict[bytes, None]] = {}  # digests of each key, in the order of their last use
        self._deadlines: list[tuple[float, int, bytes]] = []  # a heap, which also has deadlines that no longer count
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._marks

    def keep(self, salt: str, retention: Retention, digests: Iterable[bytes], now: float) -> list[bytes]:
        """Keep these blocks, tails before heads. Return those that the key's budget no longer covers."""
        owner, until, lost = Owner(salt, retention.key), now + retention.seconds, []
        for digest in digests if self.budget else ():
            before = self._marks.get(digest)
            if before is not None and before.until > until and before.owner != owner:
                continue
            self.forget(digest)
            later = until if before is None else max(until, before.until)
            self._marks[digest] = Mark(owner, later, next(self._numbers))
            self._of.setdefault(owner, {})[digest] = None
            heapq.heappush(self._deadlines, (later, self._marks[digest].number, digest))
        if len(self._deadlines) > 2 * len(self._marks) + MOST_STALE:
            self._deadlines = [(one.until, one.number, digest) for digest, one in self._marks.items()]
            heapq.heapify(self._deadlines)
        own = self._of.get(owner, {})
        while len(own) > self.budget:
            lost.append(next(iter(own)))
            self.forget(lost[-1])
        return lost

    def expire(self, now: float) -> Iterator[bytes]:
        """Stop keeping the blocks whose time is over, and yield them, tails before heads."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, digest = heapq.heappop(self._deadlines)
            mark = self._marks.get(digest)
            if mark is not None and mark.number == number:
                self.forget(digest)
                yield digest

    def forget(self, digest: bytes) -> None:
        """Stop keeping a block, if it is kept."""
        mark = self._marks.pop(digest, None)
        if mark is not None:
            own = self._of[mark.owner]
            del own[digest]
            if not own:
                del self._of[mark.owner]

    def clear(self) -> None:
        """Stop keeping all blocks."""
        self._marks.clear()
        self._of.clear()
        self._deadlines.clear()

    def owners(self) -> Iterator[tuple[Owner, int, float]]:
        """Yield each key, the number of its blocks, and the time until which it keeps the one that was used last."""
        for owner, digests in self._of.items():
            yield owner, len(digests), self._marks[next(reversed(digests))].until

    def audit(self, cached: Iterable[bytes]) -> None:
        """Verify the tables, given the digests of all cached blocks. Raises BadValue at the first inconsistency."""
        if lost := self._marks.keys() - set(cached):
            raise BadValue(f"{len(lost)} blocks are kept that are not cached")
        listed = {digest: owner for owner, digests in self._of.items() for digest in digests}
        if listed != {digest: mark.owner for digest, mark in self._marks.items()}:
            raise BadValue("the blocks of the keys are not the kept blocks")
        for owner, digests in self._of.items():
            if not 0 < len(digests) <= self.budget:
                raise BadValue(f"the key {owner.key!r} keeps {len(digests)} blocks; its budget is {self.budget}")
        if not {(mark.until, mark.number, digest) for digest, mark in self._marks.items()} <= set(self._deadlines):
            raise BadValue("a kept block has no deadline in the queue")
