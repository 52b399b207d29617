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


def most_blocks(num_tokens: int, growth: int, window: int | None, block_size: int) -> int:
    """Blocks that a request owns at most in a group of that window, on its way to num_tokens, `growth` at a time."""
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    # What the first row of a step sees before itself, then the step's tokens; both ends may cut a block.
    return min(whole, -(-(window - 1 + growth) // block_size) + 1)


class BlockManager:
    """Hands blocks to requests as they grow and takes them back. Knows ids and counts, no tensors.

    A request owns, in every group, exactly the blocks that its computed and planned tokens need, so at most one of
    them is partly filled. In a group with a window it gives back the blocks that no later row can see; their entries
    stay at the front of its table, where nobody reads them.
    """

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: int, block_size: int, max_growth: int) -> None:
        """num_blocks: N of each group. max_growth: tokens that a request grows by in one step at most."""
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_growth = max_growth
        self.pools = tuple(BlockPool(num_blocks) for _ in groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens take in one group."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, growth: int, group: CacheGroup) -> int:
        """Blocks of the group that a request owns at most on its way to this many tokens, `growth` at a time."""
        return most_blocks(num_tokens, min(growth, self.max_growth), group.window, self.block_size)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Give the request room for its first `num_tokens` tokens. False, with nothing taken, if blocks are short."""
        tables = request.block_ids or [array("i") for _ in self.groups]
        missing = [max(0, self.blocks_for(num_tokens) - len(table)) for table in tables]
        if any(count > pool.num_free for count, pool in zip(missing, self.pools, strict=True)):
            return False
        for count, pool, table in zip(missing, self.pools, tables, strict=True):
            table.extend(pool.allocate(count))
        if not request.block_ids:
            request.block_ids, request.num_given_back = tables, [0] * len(tables)
        return True

    def trim(self, request: Request) -> None:
        """Take back what lies wholly below the window of the request's next row."""
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            if group.window is not None:
                unseen = max(0, request.num_computed - group.window + 1) // self.block_size
                pool.release(request.block_ids[g][request.num_given_back[g] : unseen])
                request.num_given_back[g] = max(unseen, request.num_given_back[g])

    def missing_blocks(self, requests: Iterable[Request]) -> list[int]:
        """Blocks of each group that these requests still lack to compute all tokens that they have."""
        missing = [0] * len(self.groups)
        for request in requests:
            for g, group in enumerate(self.groups):
                owned = len(self.owned(request, g)) if request.block_ids else 0
                missing[g] += max(0, self.most_blocks(len(request.tokens), request.num_missing, group) - owned)
        return missing

    def has_free(self, counts: Sequence[int]) -> bool:
        """Whether each group has that many free blocks."""
        return all(count <= pool.num_free for count, pool in zip(counts, self.pools, strict=True))

    def owned(self, request: Request, group: int) -> array[int]:
        """The blocks that the request owns in the group of that index."""
        return request.block_ids[group][request.num_given_back[group] :]

    def release(self, request: Request) -> None:
        """Take back all blocks of the request. The last ones are freed first, so that they are reused first."""
        for g in range(len(request.block_ids)):
            self.pools[g].release(reversed(self.owned(request, g)))
        request.block_ids, request.num_given_back = [], []

    def usage(self, requests: Iterable[Request]) -> CacheUsage:
        """How the blocks are used, given all requests that own some."""
        used = sum(pool.num_used for pool in self.pools)
        filled = sum(
            request.num_computed - given_back * self.block_size
            for request in requests
            for given_back in request.num_given_back
        )
        return CacheUsage(self.num_blocks * len(self.pools), used, used * self.block_size, filled)

    def audit(self, requests: Sequence[Request]) -> None:
        """Prove free + owned = total and every reference count, given all requests. Raises BadValue otherwise."""
        for g, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            owners = [request for request in requests if request.block_ids]
            pool.audit(self.owned(request, g) for request in owners)
            for request in owners:
                if len(request.block_ids[g]) < self.blocks_for(request.num_computed):
                    raise BadValue(
                        f"request {request.id} has computed {request.num_computed} tokens, but owns "
                        f"{len(request.block_ids[g])} blocks of {self.block_size} in cache group {g}"
                    )
                seen = 0 if group.window is None else max(0, request.num_computed - group.window + 1)
                if request.num_given_back[g] != seen // self.block_size:
                    raise BadValue(
                        f"request {request.id} gave {request.num_given_back[g]} blocks of {self.block_size} back in "
                        f"cache group {g}; its next row sees the keys from {seen} on"
                    )
