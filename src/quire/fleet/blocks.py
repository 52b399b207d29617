"""Transfer of blocks between replicas: the protocol and the sending side.

A replica posts the names of blocks, each with its parent and tokens, to `/fleet/blocks` of another replica. The answer
has a record for each of them, in the order of the call: the block's size, a checksum, and its bytes. The size of a
block that the replica does not have is 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from http import HTTPStatus
from struct import Struct
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from quire.cache.incoming import BlockMemory, Name
from quire.cache.manager import BlockManager
from quire.cache.prefix import DIGEST_SIZE
from quire.fleet.wire import WireError, loads, shown
from quire.server.http.api_error import ApiError

PATH = "/fleet/blocks"
RECORD = Struct("<II")  # the number of bytes that follow, and their checksum
MOST_BLOCKS = 1024  # in one call
MOST_ANSWERS = 4  # concurrent answers of a replica; each keeps a chunk in memory
PIECE = 2**20  # bytes that are copied and sent together


class Wanted(NamedTuple):
    """A block that another replica asks for. Its digest is not trusted: parent and tokens are compared."""

    name: Name
    parent: bytes
    tokens: bytes

    def to_json(self) -> list[Any]:
        """Return the JSON form that is sent."""
        return [self.name.group, self.name.digest.hex(), self.parent.hex(), self.tokens.hex()]

    def checksum(self, payload: NDArray[np.uint8]) -> int:
        """Return the checksum of the block's bytes, seeded with its name so that another block's bytes do not match."""
        seed = crc32(self.name.group.to_bytes(2, "little") + self.name.digest + self.parent + self.tokens)
        return crc32(payload.data, seed)


def read_wanted(found: Any, num_groups: int) -> list[Wanted]:
    """Return the blocks of a call. Raises WireError for an invalid list."""
    if not isinstance(found, list) or len(found) > MOST_BLOCKS:
        raise WireError(f"blocks is {shown(found)}; it must be a list of at most {MOST_BLOCKS:,} blocks")
    wanted = []
    for one in found:
        try:
            group, digest, parent, tokens = one
            made = Wanted(Name(group, bytes.fromhex(digest)), bytes.fromhex(parent), bytes.fromhex(tokens))
        except (TypeError, ValueError) as error:
            raise WireError(f"a block is {shown(one)}; it must be a group, a digest, a parent and tokens") from error
        if type(group) is not int or not 0 <= group < num_groups:
            raise WireError(f"the group of a block is {shown(group)}; it must be in 0..{num_groups - 1}")
        if len(made.name.digest) != DIGEST_SIZE or len(made.parent) != DIGEST_SIZE:
            raise WireError(f"a block's digests are {shown(one[1:3])}; they must have {DIGEST_SIZE} bytes each")
        wanted.append(made)
    return wanted


class BlockServer:
    """Sends blocks of the prefix cache and of the disk to replicas with the same fingerprint."""

    def __init__(self, manager: BlockManager, memory: BlockMemory, widths: Sequence[int], fingerprint: str) -> None:
        """widths: bytes of a block of each group."""
        self.num_bytes = 0  # sent so far
        self._manager = manager
        self._memory = memory
        self._widths = tuple(widths)
        self._fingerprint = fingerprint
        self._num_open = 0

    async def answer(self, request: HttpRequest) -> Response:
        """Answer a call with its blocks.

        Raises ApiError for an invalid call, for another fingerprint, and if too many answers are open.
        """
        try:
            found = loads(await request.body())
            wanted = read_wanted(found.get("blocks"), len(self._widths))
        except WireError as error:
            raise ApiError(str(error), code="bad_message") from error
        if (asked := found.get("fingerprint")) != self._fingerprint:
            message = f"this replica computes other bits ({self._fingerprint}, not {shown(asked)})"
            raise ApiError(message, HTTPStatus.CONFLICT, code="other_bits")
        if self._num_open >= MOST_ANSWERS:
            message = f"this replica sends blocks to {MOST_ANSWERS} others already"
            raise ApiError(message, HTTPStatus.TOO_MANY_REQUESTS, code="busy")
        self._num_open += 1
        return _Answer(self._pieces(wanted), self._close)

    def _close(self) -> None:
        self._num_open -= 1

    async def _pieces(self, wanted: Sequence[Wanted]) -> AsyncIterator[bytes]:
        step = max(1, PIECE // max(self._widths))
        for start in range(0, len(wanted), step):
            piece = await asyncio.to_thread(self._records, wanted[start : start + step])
            yield piece
            self.num_bytes += len(piece)

    def _records(self, wanted: Sequence[Wanted]) -> bytes:
        """Return the records of these blocks. Thread-safe."""
        parts: list[bytes | memoryview] = []
        for one in wanted:
            payload = self._payload(one)
            parts.append(RECORD.pack(0, 0) if payload is None else RECORD.pack(len(payload), one.checksum(payload)))
            if payload is not None:
                parts.append(payload.data)
        return b"".join(parts)

    def _payload(self, wanted: Wanted) -> NDArray[np.uint8] | None:
        """Return the bytes of a block; None if it is not here. Called while the engine's thread changes the cache.

        A block leaves the index before its memory is overwritten. So if it is still in the index after the copy, the
        copy is consistent.
        """
        (group, digest), parent, tokens = wanted
        index, disk = self._manager.indexes[group], self._manager.disk
        cached = index.entry(digest, parent, tokens)
        if cached is not None:
            payload = np.empty(self._widths[group], np.uint8)
            self._memory.read_block(group, cached.block, payload)
            if index.by_block.get(cached.block) is cached:
                return payload
        if disk is not None and disk.reader.holds(group, digest, parent, tokens):
            found = disk.reader.get(wanted.name, parent, tokens)
            if isinstance(found, np.ndarray):
                return found
        return None


class _Answer(StreamingResponse):
    """A response that calls `close` at its end, also if the client left before the first chunk."""

    def __init__(self, pieces: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(pieces, media_type="application/octet-stream")
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
