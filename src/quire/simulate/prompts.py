"""Tokens by the names of their parts: equal parts are equal tokens, and none of them takes memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from quire.cache.prefix import DIGEST_SIZE, block_digest
from quire.engine.trace import TraceRow

NAME_SIZE = 8  # bytes
MASK = (1 << 8 * DIGEST_SIZE) - 1
STRIDE = 0x9E3779B97F4A7C15F39CC0605CEDC835  # from a digest to the next one within a part; odd, so that all differ


class Part(bytes):
    """Some tokens in a row, as a block manager reads them.

    The name of their part, where they start, and how many they are; then where other parts begin, with their names.
    """

    __slots__ = ()

    def tobytes(self) -> bytes:
        """The same for the same tokens, and for no others."""
        return self

    def tolist(self) -> list[int]:
        """A number for each token, which says nothing."""
        return [0] * int.from_bytes(self[NAME_SIZE + 4 : NAME_SIZE + 8], "big")


class NamedTokens:
    """A request's tokens, in place of the array that a Request has: parts with names, the last of which grows.

    Two of them begin alike as far as their parts have the same names and ends.
    """

    __slots__ = ("_ends", "_length", "_names")

    def __init__(self, names: Sequence[bytes], ends: Sequence[int], length: int) -> None:
        """names: of 8 bytes each. ends: of all parts but the last one, ascending. length: tokens that there are."""
        self._names = names
        self._ends = ends
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> Part:
        start, stop = where.start, where.stop
        count = (stop if stop < self._length else self._length) - start
        if not self._ends:  # as of most
            return Part(self._names[0] + (start << 32 | count).to_bytes(8, "big"))
        return Part(self._content(start, count))

    def _content(self, start: int, count: int) -> bytes:
        ends, names = self._ends, self._names
        where = (start << 32 | count).to_bytes(8, "big")
        at = bisect_right(ends, start)
        content = names[at] + where
        while at < len(ends) and ends[at] < start + count:
            content += ends[at].to_bytes(4, "big") + names[at + 1]
            at += 1
        return content

    def extend_digests(self, digests: list[bytes], count: int, size: int) -> None:
        """Name the first `count` blocks of `size` tokens, those that there are, and will be, after the ones named.

        Faster than block by block: within a part, all after the first block follow from that one's digest.
        digests: their root's, then theirs.
        """
        index, begin = len(digests) - 1, 0
        for end in (*self._ends, count * size):
            first = -(-begin // size)  # block that lies in this part alone
            while index < min(count, first + 1):
                digests.append(block_digest(digests[-1], self._content(index * size, size)))
                index += 1
            last = min(count, end // size)
            if index < last:
                head = int.from_bytes(digests[first + 1], "little")
                digests += [
                    (head + at * STRIDE & MASK).to_bytes(DIGEST_SIZE, "little")
                    for at in range(index - first, last - first)
                ]
                index = last
            begin = end

    def append(self, _: int) -> None:
        """One token more. Which one it is follows from the name of the last part."""
        self._length += 1

    def grow(self, count: int) -> None:
        """So many tokens more."""
        self._length += count

    def extend(self, tokens: Iterable[int]) -> None:
        """These tokens more. Which they are follows from the name of the last part."""
        self._length += len(tokens) if isinstance(tokens, (list, array, range)) else sum(1 for _ in tokens)


def part_name(*words: object) -> bytes:
    """A part's name: the same for the same words."""
    return blake2b("/".join(map(str, words)).encode(), digest_size=NAME_SIZE).digest()


def named_prompt(row: TraceRow, number: int, seed: int) -> NamedTokens:
    """The prompt of the row of that number: in nothing but the prefix like another's, as `prompt_of` has it.

    What is generated after it belongs to its last part.
    """
    names, ends = [], []
    for name, end in row.prefixes():
        names.append(part_name(seed, "prefix", name))
        ends.append(end)
    return NamedTokens([*names, part_name(seed, "row", number)], ends, row.prompt_tokens)
