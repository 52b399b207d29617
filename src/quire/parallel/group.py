"""A tensor-parallel group: processes that compute one model together, each a part of it.

Rank 0 is the process that was asked for a model. It starts the others itself, unless a launcher has started them all.
On one host they exchange numbers through shared memory, between hosts by torch.distributed (gloo).
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from quire.config import EngineConfig
from quire.errors import ConfigError, GroupLost
from quire.ops import Backend
from quire.ops.exchange import Exchange, TorchExchange
from quire.parallel import launch
from quire.parallel.cores import Binding

HERE = "127.0.0.1"
JOIN_WITHIN = 120.0  # s from the first process's start to the last one's
LOAD_WITHIN = 3600.0  # s that the slowest rank may take for its weights
END_WITHIN = 5.0  # s that the other ranks have to end
POLL = 0.005  # s between two looks at what is waited for
SHARED = Path("/dev/shm")  # memory that has names, where a system has it


class Group:
    """The ranks as one of them sees them."""

    def __init__(self, store: Store, rank: int, size: int, processes: Sequence[launch.Process] = ()) -> None:
        """processes: the other ranks, where this one has started them."""
        self.store, self.rank, self.size = store, rank, size
        self.processes = processes
        self.on_lost: Callable[[], None] = lambda: None  # called once, on a thread of its own, when a rank is lost
        self._exchange: Exchange | None = None
        self._before = Binding.now()

    @property
    def exchange(self) -> Exchange:
        """What the ranks exchange numbers through. Raises GroupLost before the group is formed, and after its end."""
        if self._exchange is None:
            raise GroupLost("the tensor-parallel group has ended")
        return self._exchange

    def form(self, config: EngineConfig, backend: Backend) -> None:
        """Agree on the options, take cores, and open the exchange.

        Raises ConfigError where options differ, GroupLost where a rank does not come.
        """
        self.agree("options", _options(config), JOIN_WITHIN)
        places = self.said("place", json.dumps([platform.node(), self._before.cpus]))
        alike = [rank for rank, place in enumerate(places) if place == places[self.rank]]
        if len(alike) > 1:
            self._before.part(alike.index(self.rank), len(alike)).take()
        hosts = [json.loads(place)[0] for place in places]
        memory = self._shared_memory(backend.exchange_bytes(self.size))
        if memory is None:
            self._exchange = TorchExchange(self.store, self.rank, self.size, hosts.count(hosts[self.rank]))
        else:
            self._exchange = backend.exchange(memory, self.rank, self.size)
        threading.Thread(target=self._watch, args=(self._exchange,), name="quire-ranks", daemon=True).start()

    def agree(self, what: str, own: Mapping[str, str], seconds: float) -> None:
        """Raise ConfigError unless all ranks have the same. what: a name for it, that was not used before."""
        found = [json.loads(text) for text in self.said(what, json.dumps(own), seconds)]
        for rank, other in enumerate(found):
            for name in {**found[0], **other}:
                if found[0].get(name) != other.get(name):
                    raise ConfigError(
                        f"rank {rank} of the tensor-parallel group has {name} {other.get(name)!r}, and rank 0 "
                        f"{found[0].get(name)!r}; all need the same options, checkpoint, versions and kind of CPU"
                    )

    def said(self, what: str, own: str, seconds: float = JOIN_WITHIN) -> list[str]:
        """What each rank says to that, in their order. Raises GroupLost where one ends before, or takes longer."""
        self.store.set(f"{what}/{self.rank}", own)
        return [self._wait_for(f"{what}/{rank}", seconds) for rank in range(self.size)]

    def _wait_for(self, key: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        try:
            while not self.store.check([key]):
                self.check()
                if time.monotonic() > deadline:
                    raise GroupLost(f"{key!r} did not come from the tensor-parallel group within {seconds:g} s")
                time.sleep(POLL)
            return str(self.store.get(key).decode())
        except RuntimeError as error:  # of the store, whose process has ended
            raise GroupLost(f"rank 0 of the tensor-parallel group does not answer: {error}") from error

    def check(self) -> None:
        """Raise GroupLost where a rank has ended or hangs."""
        for rank, process in enumerate(self.processes, 1):
            if (status := process.poll()) is not None:
                self._raise_failure()
                raise GroupLost(f"rank {rank} of the tensor-parallel group has ended with status {status}")
        if self._exchange is not None and self._exchange.lost is not None:
            self._raise_failure()
            raise self._exchange.loss()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.store.check(["failure"]):
            raise GroupLost(str(self.store.get("failure").decode()))

    def fail(self, error: BaseException) -> None:
        """Say to the others why this rank ends."""
        with suppress(RuntimeError):
            if not self.store.check(["failure"]):
                self.store.set("failure", f"rank {self.rank} of the tensor-parallel group has failed: {error}")
        if self._exchange is not None:
            self._exchange.lose(self.rank)

    def close(self) -> None:
        """End the other ranks, and free this one's cores. May be called again."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.leave()
        deadline = time.monotonic() + END_WITHIN
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except Exception:
                process.kill()
        self.processes = ()
        self._before.take()

    def _shared_memory(self, size: int) -> Tensor | None:
        """Memory of so many bytes that all ranks have; None: they cannot, since they are on several hosts."""
        memory, path = None, Path(SHARED if SHARED.is_dir() else tempfile.gettempdir(), f"quire-{secrets.token_hex(8)}")
        if self.rank == 0:
            memory = mapped(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), size)
        try:
            path = Path(self.said("memory", str(path))[0])
            if self.rank > 0:
                with suppress(OSError):
                    memory = mapped(os.open(path, os.O_RDWR), size)
            have = self.said("has memory", str(memory is not None))
        finally:
            if self.rank == 0:
                path.unlink()
        return memory if all(each == "True" for each in have) else None

    def _watch(self, exchange: Exchange) -> None:
        """Until the group ends, and with it this process if it is not rank 0."""
        exchange.watch(ends=self.rank > 0)
        if exchange.lost is not None:
            self.on_lost()


def join(config: EngineConfig, backend: Backend) -> Group:
    """Become a rank of the group that the config asks for: rank 0, unless a launcher says otherwise.

    Raises ConfigError where ranks disagree or cannot meet, GroupLost where one does not come.
    """
    size, place = config.tensor_parallel_size, launch.place()
    if place is None:
        store = TCPStore(HERE, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_WITHIN))
        variables = [launch.environment(rank, size, HERE, store.port, config) for rank in range(1, size)]
        group = Group(store, 0, size, [launch.start(each) for each in variables])
    else:
        if place.size != size:
            raise ConfigError(
                f"tensor_parallel_size is {size}, and a launcher has started {place.size} processes (WORLD_SIZE); "
                "there are as many processes as ranks"
            )
        group = Group(_met(place), place.rank, size)
    try:
        group.form(config, backend)
    except BaseException as error:
        group.fail(error)
        group.close()
        raise
    return group


def _met(place: launch.Place) -> Store:
    try:
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=JOIN_WITHIN))))[0]
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"ranks cannot meet at MASTER_ADDR:MASTER_PORT {place.address}: {why}") from error
    return store


def _options(config: EngineConfig) -> dict[str, str]:
    own = {one.name: repr(getattr(config, one.name)) for one in fields(config) if one.name != "cache"}
    return own | {one.name: repr(getattr(config.cache, one.name)) for one in fields(config.cache)}


def mapped(descriptor: int, size: int) -> Tensor:
    """The first bytes of a file, which is closed: uint8 [size]."""
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    finally:
        os.close(descriptor)
