"""DiskTier: brings blocks from memory to a disk and back, by threads of its own.

A block whose last owner has left is written while it still stands in the prefix cache. Nothing waits for that: where
its memory is given away first, the write does not happen. The writing thread copies the block and then asks whether it
was still there, so what it writes is never a mixture.

Blocks are read for a request that waits; when they are there, they become blocks of the prefix cache like any others.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.cache.disk.store import DiskStore, Fault, Name
from quire.cache.prefix import CachedBlock

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("quire")

BUSY_RATE = 2 * 2**20  # bytes a second that are written while the engine computes: it shares its cores with that
IDLE_AFTER = 0.02  # s after a step; then as much is written as goes
MOST_STAGED = 64 * 2**20  # bytes that were read and not taken over yet
READERS = 2
ASSUMED_RATE = 1e9  # bytes a second that are read, until some were
MEMORY = 0.3  # weight of the last reading in the rate
FLUSH_WITHIN = 2.0  # s that `close` waits for what is still to be written


class BlockMemory(Protocol):
    """Where blocks lie. A block's bytes are those of all layers of its group, one layer after the other."""

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a block's bytes out of memory."""

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """Copy a block's bytes into memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """A block to be written."""

    group: int
    cached: CachedBlock
    depth: int  # blocks before it in its sequence
    tick: int
    check: bytes


@dataclass(slots=True, eq=False)
class Read:
    """A block to be read, or that was."""

    name: Name
    parent: bytes
    tokens: bytes
    depth: int
    check: bytes
    payload: NDArray[np.uint8] | None = None  # None: it was not read
    is_wanted: bool = True


@dataclass
class DiskCounts:
    """What the tier did since it began."""

    blocks_written: int = 0
    bytes_written: int = 0
    blocks_read: int = 0
    bytes_read: int = 0
    hits: int = 0  # requests for which blocks were read
    tokens: int = 0  # that were read instead of computed
    # Blocks or requests that the disk did not serve: a Fault's value; slower (computing was expected to be quicker),
    # late (it was not there in the time of computing it).
    misses: Counter[str] = field(default_factory=Counter)
    # Blocks that were not written: evicted (before they could be), full (what is there is of more use), error.
    unwritten: Counter[str] = field(default_factory=Counter)


class DiskTier:
    """Writes and reads blocks of one engine. What is no method of a thread is called by the engine's."""

    def __init__(
        self,
        store: DiskStore,
        memory: BlockMemory,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        """Take over a store. release: called when it is closed. Nothing happens by itself before `start`."""
        self.store = store
        self.counts = DiskCounts()
        self.is_writing = True  # False: the disk failed, and nothing is written any more
        self.is_computing = False  # set by the scheduler, with the next one: both pace the writing
        self.last_step = 0.0  # s, of time.monotonic
        self.memory = memory
        self._release = release
        self._lock = threading.Condition()
        self._pending: dict[tuple[int, int], Pending] = {}  # by group and block, what is to be written
        self._to_write: deque[Pending] = deque()  # the same and what was taken back since
        self._claimed: Pending | None = None  # what is written: its memory is needed no more
        self._to_read: deque[Read] = deque()
        self._arrived: deque[Read] = deque()
        self._changes: deque[tuple[Name, CachedBlock | None]] = deque()  # stored, or None: gone
        self._staged = 0  # bytes
        self._rate = ASSUMED_RATE
        self._queued = 0  # bytes to be read
        self._closing = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to write and read."""
        names = ["writes", *[f"reads-{i}" for i in range(READERS)]]
        targets = [self._write_all, *[self._read_all] * READERS]
        self._threads = [
            threading.Thread(target=target, name=f"quire-disk-{name}", daemon=True)
            for name, target in zip(names, targets, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def flush(self, seconds: float) -> bool:
        """Wait until all is written that is to be, at most so long. Whether it is."""
        deadline = time.monotonic() + seconds
        self.is_computing, self.last_step = False, 0.0
        with self._lock:
            while self._threads and self._pending and (left := deadline - time.monotonic()) > 0:
                self._lock.wait(left)
            return not self._pending

    def close(self) -> None:
        """Write what is still to be written, for a moment, and end. May be called again."""
        if self._closing:
            return
        self.flush(FLUSH_WITHIN)
        with self._lock:
            self._closing = True
            self._to_write.clear()
            self._to_read.clear()
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(FLUSH_WITHIN)
        self.store.close()
        self._release()

    # ----------------------------------------------------------------------------------------------------- writing

    def next_tick(self) -> int:
        """A moment: what was of use in it gives way to what is of use later."""
        self.store.tick += 1
        return self.store.tick

    def offer(self, group: int, blocks: Iterable[tuple[int, CachedBlock]], tick: int) -> None:
        """Let these reusable blocks of a group be written, with the numbers of blocks before them in their sequence."""
        there: list[Name] = []
        with self._lock:
            for depth, cached in blocks:
                name, check = Name(group, cached.digest), self.store.check_of(cached.parent, cached.tokens)
                if self.store.holds(name, check):
                    there.append(name)
                elif self.is_writing and (group, cached.block) not in self._pending:
                    entry = Pending(group, cached, depth, tick, check)
                    self._pending[group, cached.block] = entry
                    self._to_write.append(entry)
            self._lock.notify_all()
        if there:
            self.store.touch(there, tick)

    def take_back(self, group: int, block: int) -> None:
        """The block's memory is about to be written, or it is no longer reusable."""
        if (group, block) in self._pending:
            with self._lock:
                entry = self._pending.pop((group, block), None)
                if entry is not None and entry is not self._claimed:
                    self.counts.unwritten["evicted"] += 1

    def clear(self) -> None:
        """Forget all blocks on the disk, and what is to be written or read."""
        with self._lock:
            self._pending.clear()
            for read in (*self._to_read, *self._arrived):
                read.is_wanted = False
        gone = [Name(group, digest) for group in range(len(self.store.widths)) for digest in self.store.digests(group)]
        try:
            self.store.clear()
        except OSError as error:
            self._fail(error)
        self._changes.extend((name, None) for name in gone)

    def pending(self) -> list[Pending]:
        """What is to be written."""
        with self._lock:
            return list(self._pending.values())

    def write_next(self) -> int:
        """Write one block, as the thread does. Returns the bytes that it took; 0: there is none to be written."""
        with self._lock:
            entry = None
            while self._to_write and entry is None:
                found = self._to_write.popleft()
                if self._pending.get((found.group, found.cached.block)) is found:
                    entry = found
        if entry is None:
            return 0
        payload = np.empty(self.store.widths[entry.group], np.uint8)
        self.memory.read_block(entry.group, entry.cached.block, payload)
        key = entry.group, entry.cached.block
        with self._lock:  # was its memory its own all the while?
            if self._pending.get(key) is not entry:
                return len(payload)
            self._claimed = entry
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
        if gone is None:
            self.counts.unwritten["full"] += 1
        else:
            self.counts.blocks_written += 1
            self.counts.bytes_written += len(payload)
            self._changes.extend((other, None) for other in gone)
            self._changes.append((name, entry.cached))
        return len(payload)

    def _fail(self, error: OSError) -> None:
        with self._lock:
            was_writing, self.is_writing = self.is_writing, False
            self.counts.unwritten["error"] += len(self._pending)
            self._pending.clear()
            self._to_write.clear()
            if was_writing and not self._closing:  # reported before `flush` returns
                where = self.store.directory
                log.error("%s cannot be written: %s; KV blocks are no longer written there", where, error)
            self._lock.notify_all()

    def _write_all(self) -> None:
        """The writing thread."""
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

    # ----------------------------------------------------------------------------------------------------- reading

    def holds(self, group: int, digest: bytes, parent: bytes, tokens: bytes) -> bool:
        """Whether the block with these tokens after that parent is on the disk."""
        name = Name(group, digest)
        # Most are not there at all, and a check takes longer than that.
        return self.store.holds_name(name) and self.store.holds(name, self.store.check_of(parent, tokens))

    def seconds(self, num_bytes: int) -> float:
        """How long it will take to read so much, after all that is to be read before."""
        return (self._queued + num_bytes) / self._rate

    @property
    def seconds_a_block(self) -> float:
        """How long it takes to read a block of every group."""
        return sum(self.store.widths) / self._rate

    def refuse(self, reason: str) -> None:
        """A request is computed although blocks of it are there."""
        self.counts.misses[reason] += 1
        self._rate += (ASSUMED_RATE - self._rate) / 64  # else one slow reading would be the last one

    def read(self, reads: Sequence[Read]) -> None:
        """Begin to read these blocks. Each of them comes up in `arrived`."""
        self.store.touch([read.name for read in reads], self.next_tick())
        with self._lock:
            self._to_read.extend(reads)
            self._queued += sum(self.store.widths[read.name.group] for read in reads)
            self._lock.notify_all()

    def arrived(self) -> list[Read]:
        """What was read since the last call, or could not be."""
        if not self._arrived:
            return []
        with self._lock:
            found = list(self._arrived)
            self._arrived.clear()
            self._staged = 0
            self._lock.notify_all()
        return found

    def changes(self) -> list[tuple[Name, CachedBlock | None]]:
        """What was stored on the disk since the last call; None: what is no longer there."""
        found = []
        while self._changes:
            found.append(self._changes.popleft())
        return found

    def wait(self, seconds: float) -> None:
        """Wait until something has arrived, at most so long."""
        with self._lock:
            if not self._arrived and not self._closing:
                self._lock.wait(seconds)

    def read_next(self) -> bool:
        """Read one block, as the threads do. False: there is none to be read."""
        with self._lock:
            if not self._to_read:
                return False
            read = self._to_read.popleft()
        width = self.store.widths[read.name.group]
        if read.is_wanted:
            payload, began = np.empty(width, np.uint8), time.perf_counter()
            fault: Fault | None = Fault.IO
            try:
                fault = self.store.get(read.name, read.check, payload)
            except Exception:
                log.exception("a KV block could not be read")
            took = time.perf_counter() - began
            with self._lock:
                self._rate += MEMORY * (READERS * width / max(took, 1e-6) - self._rate)
                if fault is None:
                    read.payload = payload
                    self.counts.blocks_read += 1
                    self.counts.bytes_read += width
                else:
                    self.counts.misses[fault.value] += 1
                    self._changes.append((read.name, None))
        with self._lock:
            self._queued -= width
            self._staged += width
            self._arrived.append(read)
            self._lock.notify_all()
        return True

    def _read_all(self) -> None:
        """A reading thread."""
        while True:
            with self._lock:
                while not self._closing and not (self._to_read and self._staged < MOST_STAGED):
                    self._lock.wait()
                if self._closing:
                    return
            self.read_next()
