"""Verify the cache's bookkeeping against all requests."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cache.manager import BlockManager
from quire.cache.pool import NONE
from quire.errors import BadValue
from quire.request import Request


def audit(manager: BlockManager, requests: Sequence[Request]) -> None:
    """Verify free + owned = total, every reference count, every table and every reusable block, given all requests.

    Raises BadValue at the first inconsistency.
    """
    owners = [request for request in requests if request.cache.block_ids]
    swapped = [request for request in requests if request.cache.host_block_ids]
    for g, (pool, host_pool, index) in enumerate(zip(manager.pools, manager.host_pools, manager.indexes, strict=True)):
        pool.audit((manager.owned(request, g) for request in owners), index.by_block)
        host_pool.audit(request.cache.host_block_ids[g] for request in swapped)
        index.audit()
        reserved = {index.block_of(digest) for digest in manager.reserved[g] if digest in index}
        free = list(pool.next_free(pool.num_free))
        if {*free[pool.num_unreserved :]} != reserved.intersection(free):
            raise BadValue(f"the free blocks that cache group {g} allocates last are not the reserved ones")
        manager.retained[g].audit(cached.digest for cached in index.by_block.values())
        kept = {
            block for block in free if block in index.by_block and index.by_block[block].digest in manager.retained[g]
        }
        if {*pool.retained} != kept - reserved:
            raise BadValue(f"the retained blocks of cache group {g} are not those that a key keeps")
        for request in owners:
            _audit_table(manager, request, g)
    if (group := manager.scores.group) is not None and not manager.indexes[group].by_block.keys() >= {*manager.scores}:
        raise BadValue(f"a block of cache group {group} has logprobs, but is not reusable")
    if manager.disk is not None:
        for entry in manager.disk.pending():
            if manager.indexes[entry.group].by_block.get(entry.cached.block) is not entry.cached:
                raise BadValue(f"block {entry.cached.block} is to be written to the disk, and is not reusable")
    for request in requests:
        if request.cache.block_ids and request.cache.host_block_ids:
            raise BadValue(f"request {request.id} owns blocks both on the device and on the host")
        if not request.cache.block_ids and not request.cache.host_block_ids and request.cache.num_computed:
            raise BadValue(f"request {request.id} has computed {request.cache.num_computed} tokens and owns no block")


def _audit_table(manager: BlockManager, request: Request, g: int) -> None:
    """Verify one request's table in group `g`."""
    size, group, index, cache = manager.spans[g], manager.groups[g], manager.indexes[g], request.cache
    stored, table, freed = group.stored(cache.num_computed, cache.num_cached), cache.block_ids[g], cache.num_freed[g]
    needed = group.count(stored, size)
    if len(table) < needed or NONE in table[freed:needed]:
        raise BadValue(
            f"request {request.id} has computed {stored} tokens, but has not all blocks of {size} tokens for them in "
            f"cache group {g}: {table[freed:].tolist()} from its block {freed} on"
        )
    if freed != (first := group.first(cache.num_computed, size)):
        raise BadValue(
            f"request {request.id} freed {freed} blocks of {size} in cache group {g}; its next row needs those from "
            f"{first} on"
        )
    for i in range(freed, len(table)):
        block = table[i]
        if block == NONE:  # a state that a step does not store
            continue
        cached, end = index.by_block.get(block), (i + 1) * size
        if cached is not None and cached.tokens != request.tokens[end - manager.block_size : end].tobytes():
            raise BadValue(f"block {block} is reusable for other tokens than those of its owner, request {request.id}")
        if manager.pools[g].ref_counts[block] > 1 and stored < end and request.group is None:
            raise BadValue(f"block {block} of request {request.id} is shared, but neither full nor a sibling's")
