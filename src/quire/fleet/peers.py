"""PeerSource: reads blocks from the replica that the gateway names as their holder."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np

from quire.cache.incoming import Arrivals, ArrivingBlocks, BlockSource, Fault, Holds, Read
from quire.fleet.blocks import MOST_BLOCKS, PATH, RECORD, Wanted
from quire.request import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

log = logging.getLogger("quire.fleet")

TIMEOUT = 1.0  # s to connect, and s without a byte after which the connection counts as lost


class PeerSource(BlockSource):
    """A source of other replicas' blocks. `Request.holder` names the replica that has blocks of a request."""

    name = "peer"

    def __init__(self, arrivals: Arrivals, widths: Sequence[int], fingerprint: str, secret: str) -> None:
        """fingerprint: this replica's digest; other replicas send blocks only to replicas with the same one."""
        super().__init__(arrivals, widths)
        self._fingerprint = fingerprint
        self._headers = {"Authorization": f"Bearer {secret}"}

    def held(self, request: Request) -> Holds | None:
        """Implement `BlockSource.held`: the number of first blocks that the gateway stated."""
        holder = request.holder
        if holder is None:
            return None
        digests: set[bytes] = set()

        def holds(_: int, digest: bytes, *__: bytes) -> bool:
            if not digests:
                digests.update(request.cache.digests[1 : holder.num_blocks + 1])
            return digest in digests

        return holds

    def read(self, request: Request, reads: Sequence[Read]) -> None:
        """Implement `BlockSource.read`."""
        if request.holder is not None:
            url = request.holder.url
            self._enqueue([ArrivingBlocks(reads[i : i + MOST_BLOCKS], url) for i in range(0, len(reads), MOST_BLOCKS)])

    def _fetch(self, batch: ArrivingBlocks) -> Iterator[tuple[Read, NDArray[np.uint8] | Fault]]:
        left, began, num_bytes = deque(batch.reads), time.perf_counter(), 0
        connection = _connection(batch.place)
        try:
            answer = self._asked(connection, batch)
            while left and answer.status == HTTPStatus.OK and self._wait_for_room():
                found = self._received(answer, left)
                if found is None:
                    return
                num_bytes += 0 if isinstance(found, Fault) else len(found)
                yield left.popleft(), found
            fault = Fault.IO if answer.status == HTTPStatus.OK else Fault.REFUSED
            if fault is Fault.REFUSED:
                log.warning("replica %s sends no blocks: HTTP status %d", batch.place, answer.status)
        except (OSError, HTTPException, ValueError) as error:
            fault = Fault.IO
            log.warning("blocks of replica %s are computed: %s", batch.place, error or type(error).__name__)
        finally:
            connection.close()
            if num_bytes:
                self._observe(num_bytes, time.perf_counter() - began)
        while left:
            yield left.popleft(), fault

    def _asked(self, connection: HTTPConnection, batch: ArrivingBlocks) -> HTTPResponse:
        blocks = [Wanted(read.name, read.parent, read.tokens).to_json() for read in batch.reads]
        body = json.dumps({"fingerprint": self._fingerprint, "blocks": blocks}, separators=(",", ":"))
        connection.request("POST", PATH, body.encode("ascii"), self._headers)
        return connection.getresponse()

    def _received(self, answer: HTTPResponse, left: deque[Read]) -> NDArray[np.uint8] | Fault | None:
        """Return the next block of an answer; None if no request waits any more for it or those after it.

        Raises OSError if the answer ends before the block does.
        """
        read, width = left[0], self.widths[left[0].name.group]
        head = np.empty(RECORD.size, np.uint8)
        if not _fill(answer, head, left):
            return None
        size, checksum = RECORD.unpack(head.data)
        if size == 0:
            return Fault.ABSENT
        if size != width:
            raise ConnectionError(f"a block has {size:,} bytes; it must have {width:,}")
        payload = np.empty(width, np.uint8)
        if not _fill(answer, payload, left):
            return None
        is_right = Wanted(read.name, read.parent, read.tokens).checksum(payload) == checksum
        return payload if is_right else Fault.CHECKSUM


def _fill(answer: HTTPResponse, out: NDArray[np.uint8], left: Sequence[Read]) -> bool:
    """Fill `out` from the answer. Return False if no request waits for these blocks any more."""
    at = 0
    while at < len(out):
        if not any(read.is_wanted for read in left):
            return False
        data = answer.read1(len(out) - at)
        if not data:
            raise ConnectionError("the answer ends within a block")
        out[at : at + len(data)] = np.frombuffer(data, np.uint8)
        at += len(data)
    return True


def _connection(url: str) -> HTTPConnection:
    parts = urlsplit(url)
    return HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT)
