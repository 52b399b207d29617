"""Tokens represented by the names of their parts: equal parts mean equal tokens, and tokens take no memory."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from quire.cache.prefix import DIGEST_SIZE, block_digest
from quire.engine.trace import TraceRow

NAME_SIZE = 8  # bytes
MASK = (1 << 8 * DIGEST_SIZE) - 1
STRIDE = 0x9E3779B97F4A7C15F39CC0605CEDC835  # between successive digests within a part; odd, so that all differ


class Part(bytes):
    """A slice of tokens, in the form that a block manager reads.

    It contains the name of their part, their start and their number, then the start and name of each further part.
    """

    __slots__ = ()

    def tobytes(self) -> bytes:
        """Return bytes that are equal exactly for equal tokens."""
        return self

    def tolist(self) -> list[int]:
        """Return a placeholder 0 for each token."""
        return [0] * int.from_bytes(self[NAME_SIZE + 4 : NAME_SIZE + 8], "big")


class NamedTokens:
    """A request's tokens as named parts, in place of the array of a Request. The last part grows.

    Two prompts share a prefix as long as their parts have the same names and ends.
    """

    __slots__ = ("_ends", "_length", "_names")

    def __init__(self, names: Sequence[bytes], ends: Sequence[int], length: int) -> None:
        """names: of 8 bytes each. ends: of all parts except the last one, ascending. length: number of tokens."""
        self._names = names
        self._ends = ends
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, where: slice) -> Part:
        start, stop = where.start, where.stop
        count = (stop if stop < self._length else self._length) - start
        if not self._ends:  # the usual case
            return Part(self._names[0] + (start << 32 | count).to_bytes(8, "big"))
        return Part(self._content(start, count))

    def blocks(self, first: int, stop: int, size: int) -> list[bytes]:
        """Return the bytes of each of these full blocks of `size` tokens."""
        starts = range(first * size, stop * size, size)
        if self._ends:
            return [self._content(start, size) for start in starts]
        name = self._names[0]
        return [name + (start << 32 | size).to_bytes(8, "big") for start in starts]

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
        """Extend the digests to the first `count` blocks of `size` tokens, including future ones.

        Faster than block by block: within a part, all digests after the first block's follow from that one.
        digests: the root's digest, then those of known blocks.
        """
        index, begin = len(digests) - 1, 0
        for end in (*self._ends, count * size):
            first = -(-begin // size)  # first block that is entirely in this part
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
        """Append one token. Its value follows from the name of the last part."""
        self._length += 1

    def grow(self, count: int) -> None:
        """Append `count` tokens."""
        self._length += count

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens. Only their number is used: their values follow from the name of the last part."""
        self._length += len(tokens) if isinstance(tokens, (list, array, range)) else sum(1 for _ in tokens)


def part_name(*words: object) -> bytes:
    """Return a part's name: the same for the same words."""
    return blake2b("/".join(map(str, words)).encode(), digest_size=NAME_SIZE).digest()


def parts_of(row: TraceRow, number: int, seed: int) -> tuple[list[bytes], list[int]]:
    """Return the names of a row's parts, and the ends of all but the last one. Only prefixes are shared with others."""
    names = [part_name(seed, "prefix", name) for name, _ in row.prefixes()]
    return [*names, part_name(seed, "row", number)], [end for _, end in row.prefixes()]


def named_prompt(row: TraceRow, number: int, seed: int) -> NamedTokens:
    """Return the prompt of a row, which like that of `prompt_of` shares only its prefix with others.

    Generated tokens belong to the last part.
    """
    return NamedTokens(*parts_of(row, number, seed), row.prompt_tokens)
