"""How the cache is used: what is reserved, owned, shared and wasted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.cache.manager import BlockManager
from quire.request import Request


@dataclass(frozen=True)
class CacheUsage:
    """How the blocks of all groups are used at one moment."""

    block_size: int  # B
    num_blocks: int  # reserved: in the pools
    used_blocks: int  # owned by at least one request
    logical_blocks: int  # entries of all block tables: what would be owned if nothing were shared
    cached_blocks: int  # owned by nobody, but still reusable
    filled_slots: int  # slots of the owned blocks that hold a token
    host_blocks: int = 0  # owned by requests that are swapped out

    @property
    def reserved_slots(self) -> int:
        """Slots of all blocks there are."""
        return self.num_blocks * self.block_size

    @property
    def used_slots(self) -> int:
        """Slots of the owned blocks."""
        return self.used_blocks * self.block_size

    @property
    def shared_slots(self) -> int:
        """Slots that sharing saves: what would be owned besides if every request had its own blocks."""
        return (self.logical_blocks - self.used_blocks) * self.block_size

    @property
    def wasted_slots(self) -> int:
        """Owned slots that hold nothing: the open ends of partly filled blocks."""
        return self.used_slots - self.filled_slots


def cache_usage(manager: BlockManager, requests: Iterable[Request]) -> CacheUsage:
    """How the blocks are used, given all requests."""
    size, logical, empty = manager.block_size, 0, 0
    listed = [request for request in requests if request.cache.block_ids]
    for g in range(len(manager.groups)):
        filled: dict[int, int] = {}  # of the blocks that are not full for every owner
        for request in listed:
            logical += len(request.cache.block_ids[g]) - request.cache.num_freed[g]
            stored = max(request.cache.num_computed, request.cache.num_cached)
            for i in range(stored // size, len(request.cache.block_ids[g])):
                block = request.cache.block_ids[g][i]
                filled[block] = max(filled.get(block, 0), min(size, stored - i * size), 0)
        empty += sum(size - count for count in filled.values())
    used = sum(pool.num_used for pool in manager.pools)
    cached = sum(
        len(index) - sum(pool.ref_counts[block] > 0 for block in index.by_block)
        for pool, index in zip(manager.pools, manager.indexes, strict=True)
    )
    host = sum(pool.num_used for pool in manager.host_pools)
    return CacheUsage(size, manager.num_blocks * len(manager.pools), used, logical, cached, used * size - empty, host)
