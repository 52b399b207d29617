"""Reads of other replicas' blocks on a virtual clock: decisions are those of a real replica, but no bytes move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.cache.incoming import THREADS, Arrivals, ArrivingBlocks, Fault, Read
from quire.engine.cost import ModelCost, assumed_prompt_token
from quire.engine.prefetch import Prefetch
from quire.engine.scheduler import Scheduler
from quire.fleet.peers import PeerSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOTHING = np.empty(0, np.uint8)  # bytes of any block


class _Arrivals(Arrivals):
    """The blocks that have arrived. No thread waits for them, since the virtual clock would not advance."""

    def wait(self, seconds: float) -> None:
        """Return at once."""


class _Memory:
    """The memory of blocks, which have no bytes here."""

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """Copy nothing."""

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """Copy nothing."""


class Peers(PeerSource):
    """The source of other replicas' blocks. Started reads are in `begun`; `end` completes one."""

    def __init__(self, scheduler: Scheduler, model: ModelCost, widths: Sequence[int], seconds_a_byte: float) -> None:
        """scheduler: of the reading replica; it gets a Prefetch. widths: bytes of a block of each group."""
        super().__init__(_Arrivals(), widths, "", "")
        self.begun: list[tuple[float, ArrivingBlocks]] = []  # each with its end; the cell empties the list
        self._clock = scheduler.clock
        self._seconds_a_byte = seconds_a_byte
        self._free_at = [0.0] * THREADS  # when each thread has finished its reads
        self._fault: Callable[[Read], Fault | None]  # of the blocks that arrive now
        scheduler.manager.memory = _Memory()
        scheduler.prefetch = Prefetch(scheduler.manager, self._arrivals, assumed_prompt_token(model), self._clock)
        scheduler.prefetch.sources.append(self)

    def _enqueue(self, batches: Sequence[ArrivingBlocks]) -> None:
        super()._enqueue(batches)
        for batch in batches:
            thread = min(range(THREADS), key=self._free_at.__getitem__)
            end = max(self._clock(), self._free_at[thread]) + self._num_bytes(batch.reads) * self._seconds_a_byte
            self._free_at[thread] = end
            self.begun.append((end, batch))

    def end(self, batch: ArrivingBlocks, fault: Callable[[Read], Fault | None]) -> None:
        """Complete the read of a batch, except for blocks with a fault."""
        self._queue.remove(batch)
        self._queue.appendleft(batch)
        self._fault = fault
        self.read_next()

    def _fetch(self, batch: ArrivingBlocks) -> Iterator[tuple[Read, NDArray[np.uint8] | Fault]]:
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
