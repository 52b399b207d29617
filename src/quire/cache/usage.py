"""Cache usage: the reserved, owned, shared and wasted slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.cache.groups import RowGroup, StateGroup
from quire.cache.manager import BlockManager
from quire.cache.pool import NONE
from quire.request import Request


@dataclass(frozen=True)
class CacheUsage:
    """The current usage of the blocks of some groups with the same block size."""

    block_size: int  # tokens per block: B; for layers with a state, tokens per piece
    num_blocks: int  # reserved: in the pools
    used_blocks: int  # owned by at least one request
    logical_blocks: int  # entries of all block tables: the owned blocks if nothing were shared
    cached_blocks: int  # without an owner, but still reusable
    filled_slots: int  # slots of the owned blocks that contain a token
    host_blocks: int = 0  # owned by swapped-out requests

    @property
    def reserved_slots(self) -> int:
        """Slots of all blocks."""
        return self.num_blocks * self.block_size

    @property
    def used_slots(self) -> int:
        """Slots of the owned blocks."""
        return self.used_blocks * self.block_size

    @property
    def shared_slots(self) -> int:
        """Slots saved by sharing: additional slots if every request had separate blocks."""
        return (self.logical_blocks - self.used_blocks) * self.block_size

    @property
    def wasted_slots(self) -> int:
        """Owned slots without a token: the open ends of partly filled blocks."""
        return self.used_slots - self.filled_slots


def cache_usage(manager: BlockManager, requests: Iterable[Request]) -> CacheUsage:
    """Return the usage of the blocks of attention, given all requests."""
    return _usage(manager, requests, manager.attention_groups, manager.block_size)


def state_usage(manager: BlockManager, requests: Iterable[Request]) -> tuple[CacheUsage, CacheUsage]:
    """Return the usage of the states, and of the rows of pieces in progress, given all requests."""
    listed = list(requests)
    kinds = [
        [g for g, group in enumerate(manager.groups) if isinstance(group, kind)] for kind in (StateGroup, RowGroup)
    ]
    states, rows = (_usage(manager, listed, groups, manager.unit) for groups in kinds)
    return states, rows


def _usage(manager: BlockManager, requests: Iterable[Request], groups: Sequence[int], size: int) -> CacheUsage:
    logical, empty = 0, 0
    listed = [request for request in requests if request.cache.block_ids]
    for g in groups:
        filled: dict[int, int] = {}  # blocks that are not full for every owner
        for request in listed:
            cache = request.cache
            logical += len(manager.owned(request, g))
            stored = manager.groups[g].stored(cache.num_computed, cache.num_cached)
            for i in range(max(stored // size, cache.num_freed[g]), len(cache.block_ids[g])):
                block = cache.block_ids[g][i]
                if block != NONE:
                    filled[block] = max(filled.get(block, 0), min(size, stored - i * size), 0)
        empty += sum(size - count for count in filled.values())
    pools, indexes = [manager.pools[g] for g in groups], [manager.indexes[g] for g in groups]
    used = sum(pool.num_used for pool in pools)
    cached = sum(
        len(index) - sum(pool.ref_counts[block] > 0 for block in index.by_block)
        for pool, index in zip(pools, indexes, strict=True)
    )
    host = sum(manager.host_pools[g].num_used for g in groups)
    reserved = sum(pool.num_blocks for pool in pools)
    return CacheUsage(size, reserved, used, logical, cached, used * size - empty, host)
