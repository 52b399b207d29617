"""The books of the cache, proved against the requests there are."""

from __future__ import annotations

from collections.abc import Sequence

from quire.cache.manager import BlockManager
from quire.errors import BadValue
from quire.request import Request


def audit(manager: BlockManager, requests: Sequence[Request]) -> None:
    """Prove free + owned = total, every reference count, every table and every reusable block, given all requests.

    Raises BadValue at the first thing that is not as it should be.
    """
    owners = [request for request in requests if request.block_ids]
    swapped = [request for request in requests if request.host_block_ids]
    for g, (pool, host_pool, index) in enumerate(zip(manager.pools, manager.host_pools, manager.indexes, strict=True)):
        pool.audit((manager.owned(request, g) for request in owners), index.by_block)
        host_pool.audit(request.host_block_ids[g] for request in swapped)
        index.audit()
        for request in owners:
            _audit_table(manager, request, g)
    for request in requests:
        if request.block_ids and request.host_block_ids:
            raise BadValue(f"request {request.id} owns blocks both on the device and on the host")
        if not request.block_ids and not request.host_block_ids and request.num_computed:
            raise BadValue(f"request {request.id} has computed {request.num_computed} tokens and owns no block")


def _audit_table(manager: BlockManager, request: Request, g: int) -> None:
    """Prove one request's table in the group of that index."""
    size, group, index = manager.block_size, manager.groups[g], manager.indexes[g]
    stored = max(request.num_computed, request.num_cached)
    if len(request.block_ids[g]) < manager.blocks_for(stored):
        raise BadValue(
            f"request {request.id} has computed {stored} tokens, but owns {len(request.block_ids[g])} blocks of {size} "
            f"in cache group {g}"
        )
    seen = 0 if group.window is None else max(0, request.num_computed - group.window + 1)
    if request.num_given_back[g] != seen // size:
        raise BadValue(
            f"request {request.id} gave {request.num_given_back[g]} blocks of {size} back in cache group {g}; its next "
            f"row sees the keys from {seen} on"
        )
    for i in range(request.num_given_back[g], len(request.block_ids[g])):
        block = request.block_ids[g][i]
        cached = index.by_block.get(block)
        if cached is not None and cached.tokens != request.tokens[i * size : (i + 1) * size].tobytes():
            raise BadValue(f"block {block} is reusable for other tokens than those of its owner, request {request.id}")
        if manager.pools[g].ref_counts[block] > 1 and stored < (i + 1) * size and request.group is None:
            raise BadValue(f"block {block} of request {request.id} is shared, but neither full nor a sibling's")
