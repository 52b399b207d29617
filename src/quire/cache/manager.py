"""BlockManager: from a request's tokens to its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.cache.pool import BlockPool
from quire.errors import BadValue
from quire.request import Request


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose requests share one block table: those with the same window. Most models have a single group."""

    layers: tuple[int, ...]
    window: int | None = None  # keys that a row of these layers sees, its own included; None: all before it


@dataclass(frozen=True)
class CacheUsage:
    """How the blocks of all groups are used at one moment."""

    num_blocks: int  # in the pools
    used_blocks: int  # owned by a request
    used_slots: int  # slots of the owned blocks
    filled_slots: int  # of these, slots that hold a token

    @property
    def wasted_slots(self) -> int:
        """Owned slots that hold nothing: the open ends of partly filled blocks."""
        return self.used_slots - self.filled_slots


class BlockManager:
    """Hands blocks to requests as they grow and takes them back. Knows ids and counts, no tensors.

    A request owns, in every group, exactly the blocks that its computed and planned tokens need, so at most one of
    them is partly filled.
    """

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: int, block_size: int) -> None:
        self.groups = tuple(groups)
        self.num_blocks = num_blocks  # N of each group
        self.block_size = block_size
        self.pools = tuple(BlockPool(num_blocks) for _ in groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens take in one group."""
        return -(-num_tokens // self.block_size)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request room for its first `num_tokens` tokens. False, with nothing taken, if blocks are short."""
        tables = request.block_ids or [array("i") for _ in self.groups]
        missing = [max(0, self.blocks_for(num_tokens) - len(table)) for table in tables]
        if any(count > pool.num_free for count, pool in zip(missing, self.pools, strict=True)):
            return False
        for count, pool, table in zip(missing, self.pools, tables, strict=True):
            table.extend(pool.allocate(count))
        request.block_ids = tables
        return True

    @property
    def num_free(self) -> int:
        """Blocks that every group could still give."""
        return min(pool.num_free for pool in self.pools)

    def missing_blocks(self, requests: Iterable[Request]) -> int:
        """Blocks that these requests lack in one group to hold all of their tokens."""
        return sum(
            max(0, self.blocks_for(len(request.tokens)) - (len(request.block_ids[0]) if request.block_ids else 0))
            for request in requests
        )

    def release(self, request: Request) -> None:
        """Take back all blocks of the request. The last ones are freed first, so that they are reused first."""
        for pool, table in zip(self.pools, request.block_ids, strict=False):
            pool.release(reversed(table))
        request.block_ids = []

    def usage(self, requests: Iterable[Request]) -> CacheUsage:
        """How the blocks are used, given all requests that own some."""
        used = sum(pool.num_used for pool in self.pools)
        filled = sum(request.num_computed * len(request.block_ids) for request in requests)
        return CacheUsage(self.num_blocks * len(self.pools), used, used * self.block_size, filled)

    def audit(self, requests: Sequence[Request]) -> None:
        """Prove free + owned = total and every reference count, given all requests. Raises BadValue otherwise."""
        for g, pool in enumerate(self.pools):
            pool.audit(request.block_ids[g] for request in requests if request.block_ids)
        for request in requests:
            for table in request.block_ids:
                if len(table) < self.blocks_for(request.num_computed):
                    raise BadValue(
                        f"request {request.id} has computed {request.num_computed} tokens, but owns {len(table)} "
                        f"blocks of {self.block_size}"
                    )
