"""BlockPool: reference counts of blocks."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Container, Iterable, Iterator
from itertools import chain, islice

from quire.errors import BadValue, OutOfBlocks

NONE = -1  # in place of a block


class BlockPool:
    """Reference counts of N blocks, and the order in which free blocks are allocated.

    The free order is the eviction order: blocks are allocated from its front, and a block with reusable contents is put
    at its end, so that it keeps them for as long as possible. Retained blocks are free blocks that are allocated after
    these, in the same order, and reserved ones after all others, so that a waiting request still finds their contents.
    Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = array("i", bytes(4 * num_blocks))  # [N], number of owners of each block
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._retained: OrderedDict[int, None] = OrderedDict()  # free blocks that are allocated after those
        self._reserved: dict[int, None] = {}  # free blocks that are allocated after the others, last in first out

    @property
    def num_free(self) -> int:
        """Number of blocks without an owner."""
        return len(self._free) + len(self._retained) + len(self._reserved)

    @property
    def num_unreserved(self) -> int:
        """Number of free blocks that are not reserved."""
        return len(self._free) + len(self._retained)

    @property
    def num_used(self) -> int:
        """Number of blocks with at least one owner."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> array[int]:
        """Allocate free blocks: empty ones, then the least recently freed ones, then retained and reserved ones.

        Raises OutOfBlocks, and allocates none, if there are fewer than `count`.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} KV blocks were asked for and {self.num_free} of {self.num_blocks} are free")
        take, ref_counts = self._free.popitem, self.ref_counts
        left = max(0, count - len(self._free))
        blocks = array("i", [take(last=False)[0] for _ in range(count - left)])
        num_retained = min(left, len(self._retained))
        blocks.extend([self._retained.popitem(last=False)[0] for _ in range(num_retained)])
        blocks.extend([self._reserved.popitem()[0] for _ in range(left - num_retained)])
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def in_order(self, number: int) -> int:
        """Return the block of the `number`-th allocation from now on, counted from 1."""
        return next(islice(self._order(), number - 1, None))

    def next_free(self, count: int) -> Iterator[int]:
        """Iterate over the next `count` free blocks in the order of their allocation."""
        return islice(self._order(), count)

    def _order(self) -> Iterator[int]:
        """Iterate over the free blocks in the order of their allocation."""
        return chain(self._free, self._retained, reversed(self._reserved))

    def _table(self, block: int) -> dict[int, None]:
        """Return the part of the order that a free block is in."""
        if block in self._retained:
            return self._retained
        return self._reserved if block in self._reserved else self._free

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block; a free one leaves the free order. Raises BadValue for an unknown id."""
        for block in blocks:
            self._check_id(block)
            if self.ref_counts[block] == 0:
                del self._table(block)[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int], keep: Container[int] = ()) -> None:
        """Remove an owner from each block.

        A block without any becomes free: at the end of the order if it is in `keep`, because its contents can be
        reused, else at the front. Raises BadValue for a block without an owner.
        """
        free, ref_counts, num_blocks = self._free, self.ref_counts, self.num_blocks
        for block in blocks:
            if not 0 <= block < num_blocks:
                self._check_id(block)
            left = ref_counts[block] - 1
            if left < 0:
                raise BadValue(f"block {block} is released, but has no owner")
            ref_counts[block] = left
            if left == 0:
                free[block] = None
                if block not in keep:
                    free.move_to_end(block, last=False)

    def drop(self, blocks: Iterable[int]) -> None:
        """Move these free blocks to the front of the order, because their contents will not be reused."""
        for block in blocks:
            self._table(block).pop(block, None)
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def reserve(self, blocks: Iterable[int]) -> None:
        """Make those of these blocks that are free the last ones to be allocated."""
        for block in blocks:
            if block in self._free or block in self._retained:
                del self._table(block)[block]
                self._reserved[block] = None

    def unreserve(self, blocks: Iterable[int]) -> None:
        """Move those of these blocks that are reserved to the end of the free order."""
        for block in blocks:
            if block in self._reserved:
                del self._reserved[block]
                self._free[block] = None

    def retain(self, blocks: Iterable[int]) -> None:
        """Make those of these blocks that are free, and not reserved, the last retained ones to be allocated."""
        for block in blocks:
            if block in self._free:
                del self._free[block]
                self._retained[block] = None

    def unretain(self, blocks: Iterable[int]) -> None:
        """Move those of these blocks that are retained to the end of the free order."""
        for block in blocks:
            if block in self._retained:
                del self._retained[block]
                self._free[block] = None

    @property
    def retained(self) -> Collection[int]:
        """The retained free blocks."""
        return self._retained.keys()

    def audit(self, owned: Iterable[Iterable[int]], keep: Container[int] = ()) -> None:
        """Verify the pool against all block tables.

        Every block must be free or owned, each owner counted, and of the free ones those in `keep` must come after all
        others. Raises BadValue at the first block that violates this.
        """
        expected = array("i", bytes(4 * self.num_blocks))
        for table in owned:
            for block in table:
                self._check_id(block)
                expected[block] += 1
        for block, (have, want) in enumerate(zip(self.ref_counts, expected, strict=True)):
            if have != want:
                raise BadValue(f"block {block} has a reference count of {have}, but is in {want} tables")
            if (have == 0) != (block in self._free) + (block in self._retained) + (block in self._reserved):
                raise BadValue(f"block {block} has {have} owners and is {'' if have else 'not '}in the free order")

        kept = [block in keep for block in self._order()]
        if kept != sorted(kept):
            raise BadValue("a free block whose contents can be reused comes before an empty one")

    def _check_id(self, block: int) -> None:
        # A negative index would silently count from the end of the array.
        if not 0 <= block < self.num_blocks:
            raise BadValue(f"{block} is not a block id; the pool has 0..{self.num_blocks - 1}")
