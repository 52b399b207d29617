"""BlockPool: who owns a block."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator
from itertools import chain, islice

from quire.errors import BadValue, OutOfBlocks

NONE = -1  # instead of a block


class BlockPool:
    """Reference counts of N blocks, and the order in which the free ones are given out.

    The free order is the eviction order: blocks are taken from its front, and one whose contents can be reused comes
    back at its end, so that it keeps them for as long as possible. Reserved blocks are free blocks that are given out
    after all others, so that a request that waits finds what they hold. Every operation is O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = array("i", bytes(4 * num_blocks))  # [N], owners of each block
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._reserved: dict[int, None] = {}  # free blocks that are given out after those, the last one first

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._free) + len(self._reserved)

    @property
    def num_unreserved(self) -> int:
        """Free blocks that are not reserved."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> array[int]:
        """Take free blocks: empty ones, then those that were freed the longest ago, then reserved ones.

        Raises OutOfBlocks, taking none, if there are fewer.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} KV blocks were asked for and {self.num_free} of {self.num_blocks} are free")
        take, ref_counts = self._free.popitem, self.ref_counts
        num_reserved = max(0, count - len(self._free))
        blocks = array("i", [take(last=False)[0] for _ in range(count - num_reserved)])
        blocks.extend([self._reserved.popitem()[0] for _ in range(num_reserved)])
        for block in blocks:
            ref_counts[block] = 1
        return blocks

    def in_order(self, number: int) -> int:
        """The free block that is given out as the number-th from now on, the first one being 1."""
        return next(islice(self._order(), number - 1, None))

    def next_free(self, count: int) -> Iterator[int]:
        """The free blocks that are given out from now on, up to so many."""
        return islice(self._order(), count)

    def _order(self) -> Iterator[int]:
        """The free blocks in the order in which they are given out."""
        return chain(self._free, reversed(self._reserved))

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block; a free one leaves the free order. Raises BadValue for an unknown id."""
        for block in blocks:
            self._check_id(block)
            if self.ref_counts[block] == 0:
                del (self._reserved if block in self._reserved else self._free)[block]
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int], keep: Container[int] = ()) -> None:
        """One owner less for each block. One without any is free: at the end of the order if it stands in `keep`, as
        its contents can be reused, else at the front.

        Raises BadValue for a block that nobody owns.
        """
        free, ref_counts, num_blocks = self._free, self.ref_counts, self.num_blocks
        for block in blocks:
            if not 0 <= block < num_blocks:
                self._check_id(block)
            left = ref_counts[block] - 1
            if left < 0:
                raise BadValue(f"block {block} is released, but nobody owns it")
            ref_counts[block] = left
            if left == 0:
                free[block] = None
                if block not in keep:
                    free.move_to_end(block, last=False)

    def drop(self, blocks: Iterable[int]) -> None:
        """Nobody will reuse the contents of these free blocks: they go to the front of the order."""
        for block in blocks:
            self._reserved.pop(block, None)
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def reserve(self, blocks: Iterable[int]) -> None:
        """Give out those of these blocks that are free after all others."""
        for block in blocks:
            if block in self._free:
                del self._free[block]
                self._reserved[block] = None

    def unreserve(self, blocks: Iterable[int]) -> None:
        """Those of these blocks that are reserved come to the end of the free order."""
        for block in blocks:
            if block in self._reserved:
                del self._reserved[block]
                self._free[block] = None

    def audit(self, owned: Iterable[Iterable[int]], keep: Container[int] = ()) -> None:
        """Prove the books against all block tables there are: every block is free or owned, each owner counted, and of
        the free ones those in `keep` stand after all others.

        Raises BadValue at the first block of which that is not true.
        """
        expected = array("i", bytes(4 * self.num_blocks))
        for table in owned:
            for block in table:
                self._check_id(block)
                expected[block] += 1
        for block, (have, want) in enumerate(zip(self.ref_counts, expected, strict=True)):
            if have != want:
                raise BadValue(f"block {block} has a reference count of {have}, but is in {want} tables")
            if (have == 0) != (block in self._free) + (block in self._reserved):
                raise BadValue(f"block {block} has {have} owners and is {'' if have else 'not '}in the free order")

        kept = [block in keep for block in self._order()]
        if kept != sorted(kept):
            raise BadValue("a free block whose contents can be reused comes before an empty one")

    def _check_id(self, block: int) -> None:
        # A negative index would silently count from the end of the array.
        if not 0 <= block < self.num_blocks:
            raise BadValue(f"{block} is not a block id; the pool has 0..{self.num_blocks - 1}")
