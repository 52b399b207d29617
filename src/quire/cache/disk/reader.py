"""DiskReader: read blocks of a disk's store for waiting requests, and for other replicas."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.cache.disk.store import DiskStore
from quire.cache.incoming import THREADS, Arrivals, ArrivingBlocks, BlockSource, Fault, Holds, Name, Read
from quire.request import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("quire")


class Change(NamedTuple):
    """A block was stored on the disk, or is no longer there."""

    name: Name
    is_stored: bool


class DiskReader(BlockSource):
    """The source of the blocks on a disk."""

    name = "disk"

    def __init__(self, arrivals: Arrivals, store: DiskStore, changes: deque[Change]) -> None:
        """changes: receives the blocks that are found to be damaged."""
        super().__init__(arrivals, store.widths)
        self._store = store
        self._changes = changes

    def held(self, _: Request) -> Holds | None:
        """Return the test of `BlockSource.held`: any block may be on the disk."""
        return self.holds if len(self._store) else None

    def holds(self, group: int, digest: bytes, parent: bytes, tokens: bytes) -> bool:
        """Return whether the block with these tokens after that parent is on the disk."""
        name = Name(group, digest)
        # Most names are not on the disk, and a check takes longer than that.
        return self._store.holds_name(name) and self._store.holds(name, self._store.check_of(parent, tokens))

    def read(self, _: Request, reads: Sequence[Read]) -> None:
        """See `BlockSource.read`. These blocks count as used now."""
        self._store.touch([read.name for read in reads], self._store.next_tick())
        self._enqueue([ArrivingBlocks([read]) for read in reads])

    def _fetch(self, batch: ArrivingBlocks) -> Iterator[tuple[Read, NDArray[np.uint8] | Fault]]:
        for read in batch.reads:
            began = time.perf_counter()
            found = self.get(read.name, read.parent, read.tokens)
            self._observe(THREADS * self.widths[read.name.group], time.perf_counter() - began)
            yield read, found

    def get(self, name: Name, parent: bytes, tokens: bytes) -> NDArray[np.uint8] | Fault:
        """Return the bytes of the block with these tokens after that parent. May be called from any thread."""
        payload = np.empty(self.widths[name.group], np.uint8)
        fault: Fault | None = Fault.IO
        try:
            fault = self._store.get(name, self._store.check_of(parent, tokens), payload)
        except Exception:
            log.exception("a KV block could not be read")
        if fault is None:
            return payload
        self._changes.append(Change(name, is_stored=False))
        return fault
