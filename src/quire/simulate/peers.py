"""Blocks that a replica reads from another one, on a virtual clock: it decides as a real one, and no bytes move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.incoming import THREADS, Arrivals, Batch, Fault, Read
from quire.engine.cost import ModelCost, assumed_prompt_token
from quire.engine.prefetch import Prefetch
from quire.engine.scheduler import Scheduler
from quire.fleet.peers import PeerSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOTHING = np.empty(0, np.uint8)  # a block's bytes


class _Arrivals(Arrivals):
    """What has arrived. No thread waits for it: the clock stands still meanwhile."""

    def wait(self, seconds: float) -> None:
        """Return at once."""


class _Memory:
    """Where blocks are. They have no bytes."""

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """Copy nothing."""

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """Copy nothing."""


class Peers(PeerSource):
    """The source of other replicas' blocks. What it begins to read is in `begun`; `end` lets it arrive."""

    def __init__(self, scheduler: Scheduler, model: ModelCost, widths: Sequence[int], seconds_a_byte: float) -> None:
        """scheduler: of the replica that reads, which gets a Prefetch. widths: bytes of a block of each group."""
        super().__init__(_Arrivals(), widths, "", "")
        self.begun: list[tuple[float, Batch]] = []  # with when each is read; its cell empties it
        self._clock = scheduler.clock
        self._seconds_a_byte = seconds_a_byte
        self._free_at = [0.0] * THREADS  # when each thread has read what it was given
        self._fault: Callable[[Read], Fault | None]  # of the blocks that arrive now
        scheduler.manager.memory = _Memory()
        scheduler.prefetch = Prefetch(scheduler.manager, self._arrivals, assumed_prompt_token(model), self._clock)
        scheduler.prefetch.sources.append(self)

    def _enqueue(self, batches: Sequence[Batch]) -> None:
        super()._enqueue(batches)
        for batch in batches:
            thread = min(range(THREADS), key=self._free_at.__getitem__)
            end = max(self._clock(), self._free_at[thread]) + self._num_bytes(batch.reads) * self._seconds_a_byte
            self._free_at[thread] = end
            self.begun.append((end, batch))

    def end(self, batch: Batch, fault: Callable[[Read], Fault | None]) -> None:
        """A batch is read, but for blocks that have a fault."""
        self._queue.remove(batch)
        self._queue.appendleft(batch)
        self._fault = fault
        self.read_next()

    def _fetch(self, batch: Batch) -> Iterator[tuple[Read, NDArray[np.uint8] | Fault]]:
        read = []
        for one in batch.reads:
            fault = self._fault(one)
            if fault is None:
                read.append(one)
            yield one, NOTHING if fault is None else fault
        if num_bytes := self._num_bytes(read):
            self._observe(num_bytes, num_bytes * self._seconds_a_byte)

    def _num_bytes(self, reads: Sequence[Read]) -> int:
        return sum([self.widths[read.name.group] for read in reads])
