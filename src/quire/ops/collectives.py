"""Collectives of the ranks of a tensor-parallel group.

Each rank computes some columns of a linear's results, from all of its inputs. So no sum is divided among ranks, and
every result has the same bits for any number of ranks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from quire.errors import ConfigError, GroupLost
from quire.ops.weights.linear import Embedding, Linear

MOST_RANKS = 8  # of a group
BEAT, HUNG = 0.2, 5.0  # s between two heartbeats of a rank, and without one until it counts as lost
LEAVE_WITHIN = 1.0  # s that rank 0 waits for the others when it leaves
NEVER = timedelta(days=365)  # timeout for a collective to start
LOOK = timedelta(seconds=0.1)  # timeout of a wait for a collective, after which the ranks are checked


class Communicator(Protocol):
    """One rank's view of its group. All ranks call the same methods in the same order.

    Each method raises GroupLost if another rank has died or hangs.
    """

    rank: int
    size: int
    size_here: int  # ranks that share this one's memory: those on this host, or on this GPU
    reason: Callable[[], str | None]  # returns why the group was lost, if a rank has reported it

    def gather(
        self,
        x: Tensor,  # [...], of the same shape and dtype on all ranks, on the CPU or the rank's device
    ) -> Tensor:
        """Return the tensors of all ranks, in rank order: [ranks, ...]."""

    def collect(
        self,
        x: Tensor,  # [T, sizes[rank]]
        sizes: Sequence[int],
    ) -> Tensor | None:
        """Return the columns of all ranks on rank 0, [T, the sum of the sizes], and None on the others."""

    def send(self, message: bytes) -> None:
        """Broadcast a message. Only rank 0 may call this."""

    def receive(self) -> bytes:
        """Wait for the next message of rank 0, without a timeout, and return it."""

    @property
    def lost(self) -> int | None:
        """The rank that has died or hangs, or None if no loss is known."""

    def lose(self, rank: int) -> None:
        """End the group because `rank` is lost."""

    def leave(self) -> None:
        """Leave the group in an orderly way."""

    def watch(self, *, ends: bool) -> None:
        """Send heartbeats to the other ranks and check theirs, until the group ends.

        With `ends` the process exits when the group ends.
        """

    def loss(self) -> GroupLost:
        """Return the error to raise when the group is lost."""


class TorchCommunicator:
    """Collectives between hosts, by torch.distributed (gloo)."""

    def __init__(self, store: Store, rank: int, size: int, size_here: int) -> None:
        """Join the group. The ranks find one another, and exchange heartbeats, through `store`."""
        self.rank, self.size, self.size_here = rank, size, size_here
        self.lost: int | None = None
        self.reason: Callable[[], str | None] = lambda: None
        self._store, self._has_left = store, False
        if distributed.is_initialized():
            raise ConfigError(
                "torch.distributed is used in this process already; ranks between hosts, and on GPUs, need it"
            )
        own = PrefixStore("exchange", store)
        distributed.init_process_group("gloo", store=own, rank=rank, world_size=size, timeout=NEVER)

    def gather(
        self,
        x: Tensor,  # [...], of the same shape and dtype on all ranks
    ) -> Tensor:
        """Return the tensors of all ranks, in rank order: [ranks, ...]."""
        found = x.new_empty(self.size, *x.shape)
        raw = [one.view(torch.uint8).flatten() for one in (*found, x.contiguous())]  # gloo does not support all dtypes
        self._finish(lambda: distributed.all_gather(raw[:-1], raw[-1], async_op=True))
        return found

    def collect(
        self,
        x: Tensor,  # [T, sizes[rank]]
        sizes: Sequence[int],
    ) -> Tensor | None:
        """Return the columns of all ranks on rank 0, and None on the others."""
        found = Columns(self, tuple(sizes)).gathered(x)
        return found if self.rank == 0 else None

    def send(self, message: bytes) -> None:
        """Broadcast a message."""
        self._broadcast(torch.tensor([len(message)]))
        if message:
            self._broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes:
        """Wait for the next message of rank 0 and return it."""
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        message = torch.empty(int(size), dtype=torch.uint8)
        if len(message):
            self._broadcast(message)
        return message.numpy().tobytes()

    def watch(self, *, ends: bool) -> None:
        """Send heartbeats to the other ranks and check theirs, until the group ends."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        seen, silent, last = dict.fromkeys(others, 0), dict.fromkeys(others, 0.0), time.monotonic()
        while not self._has_left and self.lost is None:
            now = time.monotonic()
            passed, last = min(now - last, 2 * BEAT), now  # the whole group may have been suspended meanwhile
            try:
                self._store.add(f"beat/{self.rank}", 1)
                for rank in others:
                    beats = self._store.add(f"beat/{rank}", 0)
                    silent[rank] = silent[rank] + passed if beats == seen[rank] and beats else 0.0
                    seen[rank] = beats
                    if silent[rank] > HUNG:
                        self.lost = rank
                if ends and self._store.check(["left"]):
                    self._store.set(f"gone/{self.rank}", "")
                    os._exit(0)
            except RuntimeError:  # the process with the store has ended
                self.lost = 0
            time.sleep(BEAT)
        if ends and not self._has_left:
            os._exit(1)

    def lose(self, rank: int) -> None:
        """End the group because `rank` is lost."""
        self.lost = rank

    def leave(self) -> None:
        """Leave the group in an orderly way."""
        self._has_left = True
        with suppress(RuntimeError):
            if self.rank > 0:
                self._store.set(f"gone/{self.rank}", "")
            else:
                self._store.set("left", "")
                others = [f"gone/{rank}" for rank in range(1, self.size)]
                deadline = time.monotonic() + LEAVE_WITHIN  # the others need the store, which ends with this process
                while not self._store.check(others) and time.monotonic() < deadline:
                    time.sleep(BEAT / 10)
        distributed.destroy_process_group()

    def loss(self) -> GroupLost:
        """Return the error to raise when the group is lost."""
        return loss(self)

    def _broadcast(self, x: Tensor) -> None:
        self._finish(lambda: distributed.broadcast(x, 0, async_op=True))

    def _finish(self, begin: Callable[[], distributed.Work]) -> None:
        """Start a collective, and wait for it as long as all ranks run."""
        try:
            work = begin()
            while not work.is_completed():
                if self.lost is not None:
                    raise self.loss()
                with suppress(RuntimeError):  # raised if it is not complete after LOOK
                    work.wait(LOOK)
            work.wait()
        except RuntimeError as error:
            if self.lost is None:
                self.lost = -1
            raise self.loss() from error


class DeviceCommunicator(TorchCommunicator):
    """Collectives of ranks that compute on GPUs. Messages, and tensors on the CPU, are sent by gloo.

    A GPU's tensors are sent by NCCL on the current stream, so that a captured graph repeats the exchange. Ranks that
    share a GPU, which NCCL refuses, send them by gloo through the host's memory.
    """

    def __init__(
        self, store: Store, rank: int, size: int, size_here: int, device: torch.device | None, kind: str = "nccl"
    ) -> None:
        """Join the group. device: this rank's own GPU, or None if several ranks share one. kind: the library for it."""
        super().__init__(store, rank, size, size_here)
        self.device, self._group = device, None
        if device is not None:
            gpu = device if device.type == "cuda" else None
            self._group = distributed.new_group(backend=kind, timeout=NEVER, device_id=gpu)

    def gather(
        self,
        x: Tensor,  # [...], of the same shape and dtype on all ranks
    ) -> Tensor:
        """Return the tensors of all ranks, in rank order: [ranks, ...]."""
        if x.device != self.device:
            return super().gather(x.cpu()).to(x.device)
        if self.lost is not None:
            raise self.loss()
        found = x.new_empty(self.size, *x.shape)
        if x.numel():
            raw, own = (one.view(-1).view(torch.uint8) for one in (found, x.contiguous()))  # NCCL lacks some dtypes
            distributed.all_gather_into_tensor(raw, own, group=self._group)
        return found

    def watch(self, *, ends: bool) -> None:
        """Send heartbeats to the other ranks and check theirs, until the group ends."""
        super().watch(ends=ends)
        if self.lost is not None and self._group is not None:
            self._group.abort()  # else the GPU would wait for the lost rank for ever


def loss(exchange: Communicator) -> GroupLost:
    """Return the error to raise when a group is lost."""
    if (reason := exchange.reason()) is not None:
        return GroupLost(reason)
    rank = exchange.lost
    who = "a rank" if rank is None or rank < 0 else f"rank {rank}"
    return GroupLost(f"{who} of the tensor-parallel group has died or hangs; its other ranks end, too")


def least(exchange: Communicator, number: int) -> int:
    """Return the smallest of the ranks' numbers."""
    return int(exchange.gather(torch.tensor([number])).min())


@dataclass(frozen=True)
class Columns:
    """Columns that are divided among the ranks of a group, in rank order."""

    exchange: Communicator
    sizes: tuple[int, ...]  # of each rank's

    @property
    def own(self) -> int:
        """Number of columns of this rank."""
        return self.sizes[self.exchange.rank]

    def gathered(
        self,
        x: Tensor,  # [T, this rank's]
    ) -> Tensor:
        """Return the columns of all ranks: [T, the sum of the sizes]."""
        padded = torch.nn.functional.pad(x, (0, max(self.sizes) - x.shape[1]))
        parts = self.exchange.gather(padded)
        return torch.cat([part[:, :size] for part, size in zip(parts, self.sizes, strict=True)], 1)


@dataclass(frozen=True)
class SharedHead:
    """The output projection, with the vocabulary divided among the ranks."""

    part: Linear
    columns: Columns  # V

    def __call__(
        self,
        x: Tensor,  # [R, H]
    ) -> Tensor:
        """Return the logits, [R, V], on rank 0. The other ranks do not need them and get [R, 0]."""
        found = self.columns.exchange.collect(self.part(x), self.columns.sizes)
        return x.new_empty(len(x), 0) if found is None else found


@dataclass(frozen=True)
class SharedEmbedding:
    """An embedding with the rows divided among the ranks. A token's row is copied from its owner."""

    part: Embedding
    rows: Columns  # V

    def __call__(
        self,
        token_ids: Tensor,  # int64 [T]
    ) -> Tensor:
        """Return the rows, in separate memory: [T, H]."""
        exchange, firsts = self.rows.exchange, _firsts(self.rows.sizes, token_ids.device)
        owners = torch.bucketize(token_ids, firsts, right=True) - 1
        own = owners == exchange.rank
        found = exchange.gather(self.part((token_ids - firsts[exchange.rank]) * own))
        return found.flatten(0, 1)[owners * len(token_ids) + torch.arange(len(token_ids), device=token_ids.device)]


@cache
def _firsts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the first row of each rank, which a captured graph cannot copy to the device: int64 [ranks]."""
    return torch.tensor([0, *accumulate(sizes)][:-1], device=device)


def own_share(count: int, rank: int, size: int) -> range:
    """Return a rank's range of `count` items. If they cannot be divided evenly, rank 0 and others have one more."""
    return range(-(-count * rank // size), -(-count * (rank + 1) // size))


def shares(count: int, size: int) -> tuple[int, ...]:
    """Return the number of `count` items that each rank has."""
    return tuple(len(own_share(count, rank, size)) for rank in range(size))
