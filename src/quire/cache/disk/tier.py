"""DiskTier: writes blocks of the prefix cache to a disk, in a separate thread.

A block is written after its last owner has freed it, while it is still in the prefix cache. No step waits for that: if
the block is evicted first, it is not written. The thread copies the block and then checks that it was not evicted
meanwhile, so that no mixture of two blocks is written.

Blocks are read by its `DiskReader`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

import numpy as np

from quire.cache.disk.reader import Change, DiskReader
from quire.cache.disk.store import DiskStore
from quire.cache.incoming import Arrivals, BlockMemory, Name
from quire.cache.prefix import CachedBlock

log = logging.getLogger("quire")

BUSY_RATE = 2 * 2**20  # bytes per second written while the engine computes, because the thread shares its cores
IDLE_AFTER = 0.02  # s after a step; then the rate of writing is not limited
FLUSH_WITHIN = 2.0  # s that `close` waits for pending writes


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A block to be written."""

    group: int
    cached: CachedBlock
    depth: int  # number of blocks before it in its sequence
    tick: int
    check: bytes


@dataclass
class WriteCounts:
    """Counters of the blocks that the tier wrote since it began."""

    blocks: int = 0
    bytes: int = 0
    # Blocks that were not written: evicted (before they could be), full (those on the disk are more useful), error.
    unwritten: Counter[str] = field(default_factory=Counter)


class DiskTier:
    """Writes blocks of one engine. The engine's thread calls all methods except those marked as run by the thread."""

    def __init__(
        self,
        store: DiskStore,
        memory: BlockMemory,
        arrivals: Arrivals,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over a store. release: called when it is closed. Nothing is written or read before `start`."""
        self.store = store
        self.counts = WriteCounts()
        self.is_writing = True  # False: the disk failed, and nothing is written any more
        self.is_computing = False  # set by the scheduler, with last_step: both limit the rate of writing
        self.last_step = 0.0  # s, of time.monotonic
        self._memory = memory
        self._release = release
        self._lock = threading.Condition()
        self._pending: dict[tuple[int, int], Pending] = {}  # by group and block, the blocks to be written
        self._to_write: deque[Pending] = deque()  # the same, including blocks that were evicted since
        self._copied: Pending | None = None  # the block being written: its memory is no longer needed
        self._changes: deque[Change] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.reader = DiskReader(arrivals, store, self._changes)

    def start(self) -> None:
        """Start the threads that write and read."""
        self._thread = threading.Thread(target=self._write_all, name="quire-disk-writes", daemon=True)
        self._thread.start()
        self.reader.start()

    def flush(self, seconds: float) -> bool:
        """Wait up to `seconds` s until all pending blocks are written. Return whether they are."""
        deadline = time.monotonic() + seconds
        self.is_computing, self.last_step = False, 0.0
        with self._lock:
            while self._thread is not None and self._pending and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(left)
            return not self._pending

    def close(self) -> None:
        """Write pending blocks for a limited time, and stop. May be called again."""
        if self._closing:
            return
        self.flush(FLUSH_WITHIN)
        with self._lock:
            self._closing = True
            self._to_write.clear()
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(FLUSH_WITHIN)
        self.reader.close(FLUSH_WITHIN)
        self.store.close()
        self._release()

    def offer(
        self, group: int, blocks: Iterable[tuple[int, CachedBlock]], tick: int, changed: Container[int] = ()
    ) -> None:
        """Queue reusable blocks of a group for writing, each with the number of blocks before it in its sequence.

        changed: blocks to be written even if they are on the disk.
        """
        there: list[Name] = []
        with self._lock:
            for depth, cached in blocks:
                name, check = Name(group, cached.digest), self.store.check_of(cached.parent, cached.tokens)
                if cached.block not in changed and self.store.holds(name, check):
                    there.append(name)
                elif self.is_writing and (group, cached.block) not in self._pending:
                    entry = Pending(group, cached, depth, tick, check)
                    self._pending[group, cached.block] = entry
                    self._to_write.append(entry)
            self._lock.notify_all()
        if there:
            self.store.touch(there, tick)

    def cancel(self, group: int, block: int) -> None:
        """Cancel writing an evicted block: its memory is about to be overwritten, or it is no longer reusable."""
        if (group, block) in self._pending:
            with self._lock:
                entry = self._pending.pop((group, block), None)
                if entry is not None and entry is not self._copied:
                    self.counts.unwritten["evicted"] += 1

    def leave_memory(self) -> None:
        """Write pending blocks for a limited time, and cancel the others: the memory is about to be freed."""
        if not self.flush(FLUSH_WITHIN):
            for entry in self.pending():
                self.cancel(entry.group, entry.cached.block)

    def clear(self) -> None:
        """Remove all blocks on the disk, and those to be written."""
        widths = self.store.widths
        with self._lock:  # a block that is being written is reported before that, or not at all
            self._pending.clear()
            gone = [Name(group, digest) for group in range(len(widths)) for digest in self.store.digests(group)]
            try:
                self.store.clear()
            except OSError as error:
                self._fail(error)
            self._changes.extend(Change(name, is_stored=False) for name in gone)

    def pending(self) -> list[Pending]:
        """Return the blocks to be written."""
        with self._lock:
            return list(self._pending.values())

    def changes(self) -> list[Change]:
        """Return the blocks that were stored on the disk since the last call, or removed from it."""
        found = []
        while self._changes:
            found.append(self._changes.popleft())
        return found

    # -------------------------------------------------------------------------------------------------- the thread

    def write_next(self) -> int:
        """Write one block, like the thread. Return its bytes, or 0 if none is pending."""
        with self._lock:
            entry = None
            while self._to_write and entry is None:
                found = self._to_write.popleft()
                if self._pending.get((found.group, found.cached.block)) is found:
                    entry = found
        if entry is None:
            return 0
        payload = np.empty(self.store.widths[entry.group], np.uint8)
        self._memory.read_block(entry.group, entry.cached.block, payload)
        key = entry.group, entry.cached.block
        with self._lock:
            if self._pending.get(key) is not entry:  # it was evicted while it was being copied
                return len(payload)
            self._copied = entry
        name = Name(entry.group, entry.cached.digest)
        try:
            gone = self.store.put(name, entry.check, entry.depth, entry.tick, payload)
        except OSError as error:
            self._fail(error)
            return len(payload)
        with self._lock:
            if self._pending.get(key) is entry:
                del self._pending[key]
            self._lock.notify_all()
            self._changes.extend(Change(other, is_stored=False) for other in gone or ())
            if entry.tick <= self.store.cleared_at:  # cleared meanwhile
                pass
            elif gone is None:
                self.counts.unwritten["full"] += 1
            else:
                self.counts.blocks += 1
                self.counts.bytes += len(payload)
                self._changes.append(Change(name, is_stored=True))
        return len(payload)

    def _fail(self, error: OSError) -> None:
        with self._lock:
            was_writing, self.is_writing = self.is_writing, False
            self.counts.unwritten["error"] += len(self._pending)
            self._pending.clear()
            self._to_write.clear()
            # Reported before `flush` returns.
            if was_writing and not self._closing:
                log.error(
                    "%s cannot be written: %s; KV blocks are no longer written there", self.store.directory, error
                )
            self._lock.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._lock:
                while not self._to_write and not self._closing:
                    self._lock.wait()
                if self._closing:
                    return
            try:
                size = self.write_next()
            except Exception:
                log.exception("a KV block could not be written")
                continue
            until = time.monotonic() + size / BUSY_RATE
            while self._is_busy and not self._closing and (left := until - time.monotonic()) > 0:
                time.sleep(min(left, IDLE_AFTER))

    @property
    def _is_busy(self) -> bool:
        return self.is_computing or time.monotonic() - self.last_step < IDLE_AFTER
