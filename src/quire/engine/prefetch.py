"""Prefetch: blocks that a waiting request needs and that are on the disk become blocks of the prefix cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.cache.disk.store import Name
from quire.cache.disk.tier import DiskTier, Read
from quire.cache.lookup import ELSEWHERE
from quire.cache.manager import BlockManager
from quire.engine.decisions import fits
from quire.request import Request

WORTH = 0.5  # of the time that computing takes: what is read has to be there sooner
PATIENCE = 0.1  # s; so long a request waits for the disk at least, where computing would take less
LEAST_TOKENS = 64  # of a step from which is learnt how long a token takes
MEMORY = 0.2  # weight of the last of these steps
NAP = 0.005  # s; so long a step waits at most that has nothing to do but to wait for the disk


@dataclass(eq=False)
class Load:
    """What is read for one request."""

    request: Request
    missing: set[Name]  # that is not there yet
    deadline: float  # s, of the clock; then it is computed after all
    num_tokens: int  # that need not be computed if all arrives
    reads: list[Read] = field(default_factory=list)


class Prefetch:
    """Decides what is read from the disk, and lets requests wait for it.

    A request waits once, while it can be admitted but for that, and no longer than computing would take. What others
    wait for already is read once.
    """

    def __init__(
        self,
        manager: BlockManager,
        disk: DiskTier,
        seconds_a_token: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds_a_token: of a prompt, until steps have shown how long it takes."""
        self.seconds_a_token = seconds_a_token
        self.disk = disk
        self._manager = manager
        self._clock = clock
        self._loads: dict[str, Load] = {}  # by request id
        self._reading: dict[Name, Read] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether any request waits for the disk."""
        return any(load.missing for load in self._loads.values())

    def begin_step(self) -> None:
        """Take over what has arrived. Called before anything of a step is planned."""
        for request_id, load in list(self._loads.items()):
            if load.request.finish_reason is not None or load.request.cache.block_ids:
                self._forget(request_id)
        arrived = self.disk.arrived()
        for read in arrived:
            self._reading.pop(read.name, None)
        for load in self._loads.values():
            names = load.missing
            mine = [read for read in arrived if read.name in names]
            for group in range(len(self._manager.groups)):
                there = [read for read in mine if read.name.group == group and read.payload is not None]
                if there:
                    self._manager.restore(group, sorted(there, key=lambda read: read.depth), load.request)
            if mine:
                names -= {read.name for read in mine}
                if not names and all(read.payload is not None for read in load.reads):
                    self.disk.counts.hits += 1
                    self.disk.counts.tokens += load.num_tokens
        self._manager.tell_disk_changes()

    def end_step(self, num_tokens: int, seconds: float) -> None:
        """A step that computed so many tokens was committed."""
        self.disk.is_computing, self.disk.last_step = False, time.monotonic()
        if num_tokens >= LEAST_TOKENS:
            self.seconds_a_token += MEMORY * (seconds / num_tokens - self.seconds_a_token)

    def awaits(self, request: Request, spare: Sequence[int]) -> bool:
        """Whether the request waits for the disk. spare: free blocks of each group that it may take."""
        load = self._loads.get(request.id)
        if load is None:
            load = self._begin(request, spare)
        if load is None or not load.missing:
            return False
        if self._clock() < load.deadline:
            return True
        self.disk.refuse("late")
        self._cancel(load)
        return False

    def _begin(self, request: Request, spare: Sequence[int]) -> Load | None:
        """Begin to read what is on the disk for the request. None: there is nothing, or no room for it now."""
        manager, lookup, size = self._manager, self._manager.lookup, self._manager.block_size
        if len(self.disk.store) == 0:
            return None
        match = lookup.match(request)
        if match.num_blocks == lookup.num_reusable(request):
            return None
        more = lookup.match(request, self.disk.holds)
        if more.num_blocks <= match.num_blocks or not fits(manager.needed(request, match), spare):
            return None
        reads: list[Read] = []
        for g, (first, blocks) in enumerate(zip(more.first, more.blocks, strict=True)):
            span = manager.spans[g]
            for i, block in enumerate(blocks, first):
                if block == ELSEWHERE:
                    at = (i + 1) * span // size - 1
                    parent, digest = request.cache.digests[at : at + 2]
                    tokens = request.tokens[at * size : (at + 1) * size].tobytes()
                    check = self.disk.store.check_of(parent, tokens)
                    reads.append(Read(Name(g, digest), parent, tokens, i, check))
        num_tokens = (more.num_blocks - match.num_blocks) * size
        reading = self.disk.seconds(sum(self.disk.store.widths[read.name.group] for read in reads))
        computing = num_tokens * self.seconds_a_token
        self._loads[request.id] = load = Load(request, set(), self._clock() + max(PATIENCE, computing), num_tokens)
        if reading > WORTH * computing:
            self.disk.refuse("slower")
            return load
        new = [read for read in reads if read.name not in self._reading]
        load.reads = [self._reading.get(read.name, read) for read in reads]
        load.missing = {read.name for read in reads}
        self._reading |= {read.name: read for read in new}
        for pool, blocks, index in zip(manager.pools, match.blocks, manager.indexes, strict=True):
            pool.share(blocks)  # what it has found stays longer than what makes room for the rest
            pool.release(reversed(blocks), index.by_block)
        self.disk.read(new)
        return load

    def _forget(self, request_id: str) -> None:
        """The request runs, or has ended."""
        self._cancel(self._loads.pop(request_id))

    def _cancel(self, load: Load) -> None:
        """Nobody waits for what this load alone was to bring."""
        wanted = {name for other in self._loads.values() if other is not load for name in other.missing}
        for read in load.reads:
            if read.name in load.missing and read.name not in wanted:
                read.is_wanted = False
        load.missing = set()
