"""Scores: logprobs of prompts' tokens, stored with the blocks of these tokens.

The logprob of a token depends on the tokens before it and on itself, as does the name of its block. So a block has a
record for each of its tokens: its logprob and rank, and the most probable token with its logprob. A record of a block's
first token comes from the last row of the block before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isnan
from struct import Struct
from typing import TYPE_CHECKING

from quire.cache.incoming import BlockMemory
from quire.errors import BadValue
from quire.request import Request, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RECORD = Struct(
    "<fiif"
)  # logprob, in fp32 as it was computed; rank, 0: there is no record; most probable token; its logprob
MOST_TOP = 1  # most probable tokens of a position that are stored; requests for more compute them


class Scores:
    """The records of the blocks of one pool, by block id. Any thread may read them."""

    def __init__(self, group: int | None, block_size: int) -> None:
        """group: the cache group whose blocks have records, one with full attention; None: no block has any."""
        self.group = group
        self.block_size = block_size
        self.width = block_size * RECORD.size  # bytes of a block's records
        self.unsaved: set[int] = set()  # blocks whose records have changed since they were offered to a disk
        self._of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def records(self, block: int) -> bytes:
        """Return the records of a block, `width` bytes."""
        return self._of.get(block) or bytes(self.width)

    def put(self, block: int, records: bytes) -> None:
        """Store the records of a block, unless all are empty."""
        if any(records):
            self._of[block] = records

    def merge(self, block: int, records: bytes) -> bool:
        """Add records to those of a block. Return whether they changed."""
        old, size = self._of.get(block), RECORD.size
        if old is not None:
            starts = range(0, self.width, size)
            pairs = ((records[at : at + size], old[at : at + size]) for at in starts)
            records = b"".join(new if any(new) else before for new, before in pairs)
        if records == old or not any(records):
            return False
        self._of[block] = records
        self.unsaved.add(block)
        return True

    def forget(self, block: int) -> None:
        """Remove the records of a block."""
        if self._of.pop(block, None) is not None:
            self.unsaved.discard(block)

    def clear(self) -> None:
        """Remove all records."""
        self._of.clear()
        self.unsaved.clear()

    def serve(self, request: Request) -> bool:
        """Return whether records can spare a request the rows that it needs for its prompt's logprobs."""
        wanted = request.sampling.prompt_logprobs
        if wanted is None or wanted > MOST_TOP or self.group is None:
            return False
        return request.next_prompt_logprob < request.num_prompt - 1

    def covered(self, request: Request, blocks: Sequence[int]) -> int:
        """Return how many of these first blocks of a request have the records that it still needs.

        A negative block will be read from another place, and may have them.
        """
        size = self.block_size
        for i in range((request.next_prompt_logprob + 1) // size, len(blocks)):
            if blocks[i] >= 0 and not all(self._of_tokens(request, i, blocks[i])):
                return i
        return len(blocks)

    def _of_tokens(self, request: Request, index: int, block: int) -> Iterator[tuple[float, int, int, float] | None]:
        """Yield the record, or None, of each token of block `index` of the request whose logprob it still needs."""
        records, start = self._of.get(block), index * self.block_size
        last = min(start + self.block_size, request.num_prompt)
        for position in range(max(start, request.next_prompt_logprob + 1), last):
            found = None if records is None else RECORD.unpack_from(records, (position - start) * RECORD.size)
            yield found if found is not None and found[1] else None

    def read(self, request: Request, blocks: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        """Return the logprobs that the request still needs of the tokens of these blocks, its first ones."""
        found: list[TokenLogprobs] = []
        first = request.next_prompt_logprob + 1
        for i in range(first // self.block_size, len(blocks)):
            for record in self._of_tokens(request, i, blocks[i]):
                if record is None:
                    raise BadValue(f"block {blocks[i]} has no logprob of token {first + len(found)} of {request.id}")
                logprob, rank, best, highest = record
                top = ((best, highest),) if request.sampling.prompt_logprobs else ()
                found.append(TokenLogprobs(request.tokens[first + len(found)], logprob, rank, top))
        return tuple(found)


def write(records: bytearray, position: int, found: Sequence[TokenLogprobs]) -> None:
    """Write the records of a request's tokens from `position` on. The first of their most probable tokens is stored."""
    for i, one in enumerate(found, position):
        if one.top and not isnan(one.logprob):
            RECORD.pack_into(records, i * RECORD.size, one.logprob, one.rank, *one.top[0])


class ScoredMemory:
    """A `BlockMemory` in which the records of a block follow its K and V."""

    def __init__(self, memory: BlockMemory, widths: Sequence[int], scores: Scores) -> None:
        """widths: bytes of a block of each group in `memory`."""
        self._memory = memory
        self._own = tuple(widths)
        self._scores = scores

    def widths(self) -> list[int]:
        """Return the bytes of a block of each group, with its records."""
        return [width + self._scores.width * (g == self._scores.group) for g, width in enumerate(self._own)]

    def read_block(self, group: int, block: int, out: NDArray[np.uint8]) -> None:
        """See `BlockMemory`."""
        width = self._own[group]
        self._memory.read_block(group, block, out[:width])
        if group == self._scores.group:
            out[width:].data[:] = self._scores.records(block)

    def write_block(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """See `BlockMemory`."""
        width = self._own[group]
        self._memory.write_block(group, block, data[:width])
        if group == self._scores.group:
            self._scores.put(block, data[width:].tobytes())

    def merge_records(self, group: int, block: int, data: NDArray[np.uint8]) -> None:
        """Add the records of a block that was read to those of the same block in memory."""
        if group == self._scores.group:
            self._scores.merge(block, data[self._own[group] :].tobytes())
