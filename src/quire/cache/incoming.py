"""Incoming blocks: blocks that are read from a disk or from another replica instead of being computed.

A `BlockSource` reads in separate threads. Blocks that it has read are kept in `Arrivals` until the engine adds them to
the prefix cache, between two steps.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeAlias

from quire.request import Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("quire")

MOST_STAGED = 64 * 2**20  # bytes that were read and are not in the cache yet; each thread may exceed this by a block
THREADS = 2  # of each source
ASSUMED_RATE = 1e9  # bytes per second, until some were read
MEMORY = 0.3  # weight of the latest read in the rate

# Returns whether a block of a group, with that digest, parent and tokens, can be read.
Holds: TypeAlias = "Callable[[int, bytes, bytes, bytes], bool]"


class Name(NamedTuple):
    """The name by which a block is found."""

    group: int
    digest: bytes  # 16 bytes, of its tokens and all before them


class Fault(str, Enum):
    """The reason why a block could not be read."""

    ABSENT = "absent"  # it does not exist, or was evicted meanwhile
    CHECKSUM = "checksum"  # its bytes differ from those that were written or sent
    IO = "io"  # the system could not read it, or the connection failed
    REFUSED = "refused"  # the other replica refuses to send it


class BlockMemory(Protocol):
    """The memory of the cache's blocks. A block's bytes are those of all layers of its group, layer by layer."""

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a block's bytes out of memory."""

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """Copy a block's bytes into memory."""


@dataclass(slots=True, eq=False)
class Read:
    """A block to be read, or one that was read."""

    name: Name
    parent: bytes  # digest of the block before it
    tokens: bytes  # its token ids, int32
    depth: int  # number of blocks of its group before it in its sequence
    payload: NDArray[np.uint8] | None = None  # None: it was not read
    is_wanted: bool = True  # False: no request waits for it any more


@dataclass(slots=True, eq=False)
class ArrivingBlocks:
    """Blocks that one thread reads one after the other."""

    reads: Sequence[Read]
    place: str = ""  # the origin: for another replica its URL


@dataclass
class ReadCounts:
    """Counters of a source since it began."""

    blocks: int = 0
    bytes: int = 0
    hits: int = 0  # requests that reused blocks that were read for them
    tokens: int = 0  # tokens of these blocks, which were not computed
    # Blocks or requests that it did not serve: a Fault's value; slower (computing was expected to be faster), late (not
    # read in the time of computing it).
    misses: Counter[str] = field(default_factory=Counter)


class Arrivals:
    """Blocks of all sources that were read and that the engine has not taken yet."""

    def __init__(self) -> None:
        self.lock = threading.Condition()  # also protects the sources' queues
        self._arrived: deque[Read] = deque()
        self._staged = 0  # bytes

    @property
    def has_room(self) -> bool:
        """True if more may be read. Requires the lock."""
        return self._staged < MOST_STAGED

    def put(self, read: Read) -> None:
        """Add a block that was read, or could not be."""
        with self.lock:
            self._arrived.append(read)
            self._staged += 0 if read.payload is None else len(read.payload)
            self.lock.notify_all()

    def take(self) -> list[Read]:
        """Return the blocks that arrived since the last call, including those that could not be read."""
        if not self._arrived:
            return []
        with self.lock:
            found = list(self._arrived)
            self._arrived.clear()
        return found

    def drop(self, reads: Sequence[Read]) -> None:
        """Free the bytes of blocks that were taken, so that more can be read."""
        with self.lock:
            for read in reads:
                if read.payload is not None:
                    self._staged -= len(read.payload)
                    read.payload = None
            self.lock.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` s for an arrival."""
        with self.lock:
            if not self._arrived:
                self.lock.wait(seconds)


class BlockSource(ABC):
    """A source of blocks. The engine's thread calls all methods except those marked as running in a thread."""

    name: ClassVar[str]  # in metrics

    def __init__(self, arrivals: Arrivals, widths: Sequence[int]) -> None:
        """widths: bytes of a block of each group. Nothing is read before `start`."""
        self.counts = ReadCounts()
        self.widths = tuple(widths)
        self._arrivals = arrivals
        self._lock = arrivals.lock
        self._queue: deque[ArrivingBlocks] = deque()
        self._queued = 0  # bytes to be read
        self._rate = ASSUMED_RATE
        self._closing = False
        self._threads: list[threading.Thread] = []

    @abstractmethod
    def held(self, request: Request) -> Holds | None:
        """Return a function that tests whether a block of the request can be read, or None if no block can."""

    @abstractmethod
    def read(self, request: Request, reads: Sequence[Read]) -> None:
        """Start reading these blocks. Each of them arrives in the Arrivals."""

    @abstractmethod
    def _fetch(self, batch: ArrivingBlocks) -> Iterator[tuple[Read, NDArray[np.uint8] | Fault]]:
        """Read the blocks of a batch, in a thread. Yield each with its bytes, or with the fault."""

    def start(self) -> None:
        """Start the threads."""
        self._threads = [
            threading.Thread(target=self._run, name=f"quire-{self.name}-reads-{i}", daemon=True) for i in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, seconds: float) -> None:
        """Stop the threads; wait up to `seconds` s for each."""
        with self._lock:
            self._closing = True
            self._queue.clear()
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(seconds)

    # ----------------------------------------------------------------------------------------------------- the price

    def seconds(self, num_bytes: int) -> float:
        """Return the estimated seconds to read that many bytes, after everything that is queued."""
        return (self._queued + num_bytes) / self._rate

    @property
    def seconds_a_block(self) -> float:
        """Seconds to read a block of every group."""
        return sum(self.widths) / self._rate

    def refuse(self, reason: str) -> None:
        """Count a request that is computed although blocks of it could be read."""
        with self._lock:
            self.counts.misses[reason] += 1
            self._rate += (ASSUMED_RATE - self._rate) / 64  # otherwise one slow read could be the last one

    def _observe(self, num_bytes: int, seconds: float) -> None:
        """Update the rate after a read of `num_bytes` bytes, successful or not."""
        with self._lock:
            self._rate += MEMORY * (num_bytes / max(seconds, 1e-6) - self._rate)

    # --------------------------------------------------------------------------------------------------- the threads

    def _enqueue(self, batches: Sequence[ArrivingBlocks]) -> None:
        with self._lock:
            self._queue.extend(batches)
            self._queued += sum(self.widths[read.name.group] for batch in batches for read in batch.reads)
            self._lock.notify_all()

    def read_next(self) -> bool:
        """Read one batch, like the threads. Return False if none is queued."""
        with self._lock:
            if not self._queue:
                return False
            batch = self._queue.popleft()
        left = dict.fromkeys(batch.reads)
        try:
            if any(read.is_wanted for read in batch.reads):
                for read, found in self._fetch(batch):
                    del left[read]
                    self._arrive(read, found)
        except Exception:
            log.exception("KV blocks could not be read")
            for read in left:
                self._arrive(read, Fault.IO)
        else:
            for read in left:  # no request waits for them any more
                self._arrive(read, None)
        return True

    def _arrive(self, read: Read, found: NDArray[np.uint8] | Fault | None) -> None:
        width = self.widths[read.name.group]
        with self._lock:
            self._queued -= width
            if isinstance(found, Fault):
                self.counts.misses[found.value] += 1
            elif found is not None:
                read.payload = found
                self.counts.blocks += 1
                self.counts.bytes += width
            self._arrivals.put(read)

    def _wait_for_room(self) -> bool:
        """Wait until more may be read. Return False if the source is closing."""
        with self._lock:
            while not self._closing and not self._arrivals.has_room:
                self._lock.wait()
            return not self._closing

    def _run(self) -> None:
        """Run a reading thread."""
        while True:
            with self._lock:
                while not self._closing and not (self._queue and self._arrivals.has_room):
                    self._lock.wait()
                if self._closing:
                    return
            self.read_next()
