"""Prefetch: read blocks of waiting requests from a disk or another replica into the prefix cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.cache.incoming import Arrivals, BlockSource, Name, Read
from quire.cache.lookup import ELSEWHERE, Match
from quire.cache.manager import BlockManager
from quire.engine.decisions import fits
from quire.engine.plan import Plan
from quire.request import Request

log = logging.getLogger("quire")

WORTH = 0.5  # fraction of the computing time: blocks are read if reading is expected to take less
PATIENCE = 0.1  # s: minimum time that a request waits for its blocks, even if computing would take less
LEAST_TOKENS = 64  # minimum size of a step that counts as a measurement of the time per token
MEMORY = 0.2  # weight of the latest of these steps
NAP = 0.005  # s: maximum wait in a step that has nothing to compute until blocks arrive


@dataclass(eq=False)
class Load:
    """The blocks being read for one request, and the space that is reserved for it until it is admitted."""

    request: Request
    source: BlockSource
    deadline: float  # s, of the clock; after it the request is computed
    num_cached: int  # tokens that were in memory
    num_tokens: int  # additional tokens that need not be computed if all blocks arrive
    names: Sequence[Name] = ()  # of its blocks in memory and of those being read: they are reserved
    missing: set[Read] = field(default_factory=set)  # those that have not arrived
    has_read: bool = False  # some have arrived


@dataclass(frozen=True)
class Offer:
    """The blocks that a source has for a request."""

    source: BlockSource
    match: Match
    num_tokens: int
    reading: float  # s
    computing: float  # s, for the same tokens

    @property
    def saved(self) -> float:
        """Seconds saved by reading."""
        return self.computing - self.reading


class Prefetch:
    """Decides which blocks to read, and makes requests wait for them.

    A request waits for one source, the one that saves most. It waits once, while it could be admitted otherwise, and no
    longer than computing would take. A block that several requests wait for is read once.

    The free blocks that a request needs are promised to it until it is admitted: no request after it may take them. Of
    these, the blocks that already contain its tokens are reserved. All of them stay free blocks: running requests may
    take them.
    """

    def __init__(
        self,
        manager: BlockManager,
        arrivals: Arrivals,
        seconds_a_token: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds_a_token: duration of a prompt token, until steps have been measured."""
        self.seconds_a_token = seconds_a_token
        self.arrivals = arrivals
        self.sources: list[BlockSource] = []
        self._manager = manager
        self._clock = clock
        self._loads: dict[str, Load] = {}  # by request id
        self._reading: dict[Name, Read] = {}

    @property
    def is_waiting(self) -> bool:
        """True if any request waits for blocks."""
        return any(load.missing for load in self._loads.values())

    def begin_step(self) -> None:
        """Restore the blocks that have arrived. Called before a step is planned."""
        for load in list(self._loads.values()):
            if load.request.finish_reason is not None or load.request.cache.block_ids:
                self._end(load)
        arrived = self.arrivals.take()
        for read in arrived:
            if self._reading.get(read.name) is read:
                del self._reading[read.name]
        for load in self._loads.values():
            mine = load.missing.intersection(arrived)
            load.missing -= mine
            there = sorted((read for read in mine if read.payload is not None), key=lambda read: read.depth)
            load.has_read |= bool(there)
            for group in range(len(self._manager.groups)):
                try:
                    self._manager.restore(group, [read for read in there if read.name.group == group], load.request)
                except Exception:  # they are computed instead
                    log.exception("KV blocks that were read for request %s cannot be used", load.request.id)
            if load.missing and self._clock() >= load.deadline:
                load.source.refuse("late")
                self._give_up(load)
        self.arrivals.drop(arrived)  # the cache has those that it had room for
        self._manager.tell_disk_changes()

    def planned(self, plan: Plan) -> None:
        """Record that a step was planned. While it is computed, the disk is written at a limited rate."""
        if self._manager.disk is not None:
            self._manager.disk.is_computing = not plan.is_empty

    def end_step(self, num_tokens: int, seconds: float) -> None:
        """Record that a step of `num_tokens` tokens was committed."""
        if self._manager.disk is not None:
            self._manager.disk.is_computing, self._manager.disk.last_step = False, time.monotonic()
        if num_tokens >= LEAST_TOKENS:
            self.seconds_a_token += MEMORY * (seconds / num_tokens - self.seconds_a_token)

    def awaits(self, request: Request, spare: Sequence[int]) -> bool:
        """Return whether the request waits for blocks. spare: free blocks of each group that it may take."""
        load = self._loads.get(request.id) or self._begin(request, spare)
        return load is not None and bool(load.missing)

    def promised(self, request: Request) -> Sequence[int]:
        """Return the number of free blocks of each group that no request after this waiting one may take."""
        load = self._loads.get(request.id)
        if load is None or not load.names:
            return [0] * len(self._manager.groups)
        return self._manager.needed(request, self._manager.lookup.match(request))  # blocks may have lost their owners

    def admitted(self, request: Request) -> None:
        """Record that the request was admitted with its matched blocks. Count those that were read for it."""
        load = self._loads.get(request.id)
        if load is None:
            return
        self._end(load)
        num_tokens = min(request.cache.num_cached - load.num_cached, load.num_tokens)
        if load.has_read and num_tokens > 0:
            load.source.counts.hits += 1
            load.source.counts.tokens += num_tokens

    def reset(self) -> None:
        """Stop all waiting, and discard the blocks that are being read."""
        for load in self._loads.values():
            self._give_up(load)

    def _begin(self, request: Request, spare: Sequence[int]) -> Load | None:
        """Begin to read blocks for the request. Return None if no source has any, or there is no room for them now."""
        lookup = self._manager.lookup
        sources = [source for source in self.sources if source.held(request) is not None]
        if not sources:
            return None
        match = lookup.match(request)
        if match.num_blocks == lookup.num_reusable(request) or not fits(self._manager.needed(request, match), spare):
            return None
        offers = [found for source in sources if (found := self._offer(source, request, match)) is not None]
        if not offers:
            return None
        best = max(offers, key=lambda offer: offer.saved)
        deadline = self._clock() + max(PATIENCE, best.computing)
        num_cached = match.num_blocks * self._manager.block_size
        self._loads[request.id] = load = Load(request, best.source, deadline, num_cached, best.num_tokens)
        if best.reading > WORTH * best.computing:
            best.source.refuse("slower")
            self._give_up(load)
            return load
        load.names, reads = self._blocks(request, best.match)
        self._manager.reserve(load.names)
        new = [read for read in reads if read.name not in self._reading]
        load.missing = {self._reading.get(read.name, read) for read in reads}
        self._reading |= {read.name: read for read in new}
        best.source.read(request, new)
        return load

    def _offer(self, source: BlockSource, request: Request, match: Match) -> Offer | None:
        """Return the request's blocks that a source has in addition to memory, or None if it has none."""
        more = self._manager.lookup.match(request, source.held(request))
        num_tokens = (more.num_blocks - match.num_blocks) * self._manager.block_size
        if num_tokens <= 0:
            return None
        size = sum(width * blocks.count(ELSEWHERE) for width, blocks in zip(source.widths, more.blocks, strict=True))
        return Offer(source, more, num_tokens, source.seconds(size), num_tokens * self.seconds_a_token)

    def _blocks(self, request: Request, match: Match) -> tuple[list[Name], list[Read]]:
        """Return the names of a match's blocks, and the reads of those that are not in memory."""
        names: list[Name] = []
        reads: list[Read] = []
        size = self._manager.block_size
        for g, (first, blocks) in enumerate(zip(match.first, match.blocks, strict=True)):
            for i, block in enumerate(blocks, first):
                at = (i + 1) * self._manager.spans[g] // size - 1
                parent, digest = request.cache.digests[at : at + 2]
                names.append(Name(g, digest))
                if block == ELSEWHERE:
                    tokens = request.tokens[at * size : (at + 1) * size].tobytes()
                    reads.append(Read(names[-1], parent, tokens, i))
        return names, reads

    def _end(self, load: Load) -> None:
        """End the load of a request that was admitted, or has ended."""
        del self._loads[load.request.id]
        self._give_up(load)

    def _give_up(self, load: Load) -> None:
        """Stop waiting and free the request's reservation. Cancel reads that no other request waits for."""
        others = {read for other in self._loads.values() if other is not load for read in other.missing}
        for read in load.missing - others:
            read.is_wanted = False
            if self._reading.get(read.name) is read:
                del self._reading[read.name]
        self._manager.unreserve(load.names)
        load.missing, load.names = set(), ()
