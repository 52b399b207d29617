"""Collectives between processes of one host, in shared memory: see csrc/exchange.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from functools import cache
from typing import cast

import torch
from torch import Tensor

from quire.errors import GroupLost
from quire.ops import native
from quire.ops.collectives import Columns, loss

SLOT = 2**20  # bytes that one rank exchanges at a time
HEADER = 16  # bytes of a message's part before its content


@cache
def _functions() -> ctypes.CDLL:
    library = ctypes.CDLL(str(native.library_path()))
    for name, result, *arguments in (
        ("bytes", c_int64, c_int32, c_int64),
        ("new", c_void_p, c_void_p, c_int32, c_int32, c_int64),
        ("watch", None, c_void_p, c_int32),
        ("leave", None, c_void_p),
        ("lost", c_int32, c_void_p),
        ("lose", None, c_void_p, c_int32),
        ("gather", c_int32, c_void_p, c_void_p, c_int64, c_void_p),
        ("collect", c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_void_p),
        ("send", c_int32, c_void_p, c_char_p, c_int64, c_int64),
        ("receive", c_void_p, c_void_p),
    ):
        function = getattr(library, f"quire_exchange_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def shared_bytes(size: int) -> int:
    """Return the number of bytes of memory that `size` ranks share."""
    return int(_functions().quire_exchange_bytes(size, SLOT))


class MemoryExchange:
    """One rank's view of a group whose ranks share memory."""

    def __init__(
        self,
        memory: Tensor,  # uint8 [shared_bytes(size)], zero before the first rank uses it
        rank: int,
        size: int,
    ) -> None:
        self.rank, self.size, self.size_here = rank, size, size
        self.reason: Callable[[], str | None] = lambda: None
        self._memory, self._native = memory.numpy(), _functions()  # torch does not resize memory of numpy
        self.handle = int(self._native.quire_exchange_new(memory.data_ptr(), rank, size, SLOT))

    def gather(
        self,
        x: Tensor,  # [...], of the same shape and dtype on all ranks
    ) -> Tensor:
        """Return the tensors of all ranks, in rank order: [ranks, ...]."""
        x = x.contiguous()
        found = torch.empty(self.size, *x.shape, dtype=x.dtype)
        self._check(self._native.quire_exchange_gather(self.handle, x.data_ptr(), x.nbytes, found.data_ptr()))
        return found

    def collect(
        self,
        x: Tensor,  # [T, sizes[rank]]
        sizes: Sequence[int],
    ) -> Tensor | None:
        """Return the columns of all ranks on rank 0, and None on the others."""
        x = x.contiguous()
        found = x.new_empty(len(x), sum(sizes)) if self.rank == 0 else None
        to = None if found is None else found.data_ptr()
        nbytes = (c_int64 * self.size)(*(size * x.itemsize for size in sizes))
        self._check(self._native.quire_exchange_collect(self.handle, x.data_ptr(), len(x), nbytes, to))
        return found

    def send(self, message: bytes) -> None:
        """Broadcast a message."""
        step = SLOT - HEADER
        for first in range(0, max(1, len(message)), step):
            part = message[first : first + step]
            self._check(self._native.quire_exchange_send(self.handle, part, len(part), len(message)))

    def receive(self) -> bytes:
        """Wait for the next message of rank 0 and return it."""
        parts: list[bytes] = []
        while True:
            at = self._native.quire_exchange_receive(self.handle)
            if at is None:
                raise self.loss()
            total, size = (c_int64 * 2).from_address(at)
            parts.append(ctypes.string_at(at + HEADER, size))
            if sum(map(len, parts)) >= total:
                return b"".join(parts)

    @property
    def lost(self) -> int | None:
        """The rank that has died or hangs, or None if no loss is known."""
        rank = int(self._native.quire_exchange_lost(self.handle))
        return None if rank < 0 else rank

    def lose(self, rank: int) -> None:
        """End the group because `rank` is lost."""
        self._native.quire_exchange_lose(self.handle, rank)

    def watch(self, *, ends: bool) -> None:
        """Send heartbeats to the other ranks and check theirs, until the group ends."""
        self._native.quire_exchange_watch(self.handle, ends)

    def leave(self) -> None:
        """Leave the group in an orderly way."""
        self._native.quire_exchange_leave(self.handle)

    def loss(self) -> GroupLost:
        """Return the error to raise when the group is lost."""
        return loss(self)

    def _check(self, result: int) -> None:
        if result < 0:
            raise self.loss()


def gather_params(columns: Columns) -> native.GatherParams:
    """Return the library's description of columns that are exchanged through shared memory."""
    params = native.GatherParams(cast(MemoryExchange, columns.exchange).handle)
    params.sizes[: len(columns.sizes)] = columns.sizes
    return params
