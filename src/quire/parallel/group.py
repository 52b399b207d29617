"""A tensor-parallel group: processes that compute one model together, each a shard of it.

Rank 0 is the process that was asked for a model. It starts the others itself, unless a launcher has started them all.
CPUs of one host communicate through shared memory, those of several hosts through torch.distributed (gloo), and GPUs
through NCCL.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from subprocess import Popen, TimeoutExpired

import torch
from torch import Tensor
from torch.distributed import FileStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from quire.config import EngineConfig
from quire.errors import ConfigError, GroupLost
from quire.ops import Backend, native
from quire.ops.collectives import Communicator, DeviceCommunicator, TorchCommunicator
from quire.parallel import devices, launch
from quire.parallel.cores import Binding, by_place

JOIN_WITHIN = 120.0  # s from the first process's start to the last one's
LOAD_WITHIN = 3600.0  # s: limit for loading the weights on the slowest rank
END_WITHIN = 5.0  # s: limit for the other ranks to end
POLL = 0.005  # s between two polls while waiting
SHARED = Path("/dev/shm")  # named shared memory, on systems that have it


class ProcessGroup:
    """The group as one of its ranks sees it."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        processes: Sequence[Popen[bytes]] = (),
        directory: Path | None = None,
        launched: bool = False,
    ) -> None:
        """processes: the other ranks, if this one started them. directory: of the store, removed at the end."""
        self.store, self.rank, self.size = store, rank, size
        self.processes, self._directory, self._launched = processes, directory, launched
        self.on_lost: Callable[[], None] = lambda: None  # called once, on a separate thread, when a rank is lost
        self._exchange: Communicator | None = None
        self._device: str | None = None  # this rank's GPU
        self._pid = os.getpid()  # a fork of this process is not a rank
        self._before = self._taken = Binding.now()

    @property
    def exchange(self) -> Communicator:
        """The collectives of the ranks. Raises GroupLost before the group is formed, and after its end."""
        if self._exchange is None:
            raise GroupLost("the tensor-parallel group has ended")
        return self._exchange

    def form(self, config: EngineConfig, backend: Backend) -> None:
        """Agree on the options, bind to cores, and set up the collectives.

        Raises ConfigError if options differ, GroupLost if a rank does not arrive.
        """
        self.agree("options", {name: repr(value) for name, value in launch.options(config).items()}, JOIN_WITHIN)
        places = self.said("place", json.dumps([host_name(), self._before.cpus]))
        alike = [rank for rank, place in enumerate(places) if place == places[self.rank]]
        self._taken = self._before.part(alike.index(self.rank), len(alike))
        if self._launched:
            self._taken = self._taken._replace(threads=launch.threads(len(by_place(self._taken.cpus))))
        self._taken.take()
        hosts = [json.loads(place)[0] for place in places]
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        exchange = self._device_exchange(config, here) if config.device != "cpu" else self._host_exchange(backend, here)
        exchange.reason = self._failure
        self._exchange = exchange
        threading.Thread(target=self._watch, args=(exchange,), name="quire-ranks", daemon=True).start()
        self.said("formed", "")  # from here on the death of a rank is detected

    def placed(self, config: EngineConfig) -> EngineConfig:
        """Return the config with this rank's device."""
        return config if self._device is None else replace(config, device=self._device)

    def _host_exchange(self, backend: Backend, here: Sequence[int]) -> Communicator:
        memory = self._shared_memory(backend.exchange_bytes(self.size))
        if memory is None:
            return TorchCommunicator(self.store, self.rank, self.size, len(here))
        return backend.exchange(memory, self.rank, self.size)

    def _device_exchange(self, config: EngineConfig, here: Sequence[int]) -> Communicator:
        self._device = device = devices.device_of(config.device, here.index(self.rank))
        if self.rank > 0:
            torch.cuda.set_device(device)
        own = devices.have_own(config, self.said("device", devices.identity(device)))
        sharing, gpu = (1, torch.device(device)) if own else (len(here), None)
        return DeviceCommunicator(self.store, self.rank, self.size, sharing, gpu)

    def agree(self, what: str, own: Mapping[str, str], seconds: float) -> None:
        """Raise ConfigError unless all ranks have the same values. `what`: a name for them that was not used before."""
        found = [json.loads(text) for text in self.said(what, json.dumps(own), seconds)]
        for rank, other in enumerate(found):
            for name in {**found[0], **other}:
                if found[0].get(name) != other.get(name):
                    raise ConfigError(
                        f"rank {rank} of the tensor-parallel group has {name} {other.get(name)!r}, and rank 0 "
                        f"{found[0].get(name)!r}; all need the same options, checkpoint, versions and kind of processor"
                    )

    def said(self, what: str, own: str, seconds: float = JOIN_WITHIN) -> list[str]:
        """Exchange a text under the name `what`.

        Return the texts of all ranks in order. Raises GroupLost if a rank ends first, or takes longer than `seconds`.
        """
        self.store.set(f"{what}/{self.rank}", own)
        return [self._wait_for(f"{what}/{rank}", seconds) for rank in range(self.size)]

    def _wait_for(self, key: str, seconds: float) -> str:
        deadline = time.monotonic() + seconds
        try:
            while not self.store.check([key]):
                self.check()
                if time.monotonic() > deadline:
                    raise GroupLost(f"{key!r} did not arrive from the tensor-parallel group within {seconds:g} s")
                time.sleep(POLL)
            return str(self.store.get(key).decode())
        except RuntimeError as error:  # raised by the store, whose process has ended
            raise GroupLost(f"rank 0 of the tensor-parallel group does not answer: {error}") from error

    def check(self) -> None:
        """Raise GroupLost if a rank has ended or hangs."""
        for rank, process in enumerate(self.processes, 1):
            if (status := process.poll()) is not None:
                ended = f"rank {rank} of the tensor-parallel group has ended with status {status}"
                raise GroupLost(self._failure() or ended)
        if self._exchange is not None and self._exchange.lost is not None:
            raise self._exchange.loss()
        if (failure := self._failure()) is not None:
            raise GroupLost(failure)

    def _failure(self) -> str | None:
        """Return the message of a rank that failed, if any."""
        try:
            return str(self.store.get("failure").decode()) if self.store.check(["failure"]) else None
        except RuntimeError:  # the store has ended
            return None

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks why this rank ends."""
        with suppress(RuntimeError):
            if not self.store.check(["failure"]):
                self.store.set("failure", f"rank {self.rank} of the tensor-parallel group has failed: {error}")
        if self._exchange is not None:
            self._exchange.lose(self.rank)

    def close(self) -> None:
        """End the other ranks, and release this one's cores. May be called again."""
        if os.getpid() != self._pid:
            return
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.leave()
        deadline = time.monotonic() + END_WITHIN
        for process in self.processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except TimeoutExpired:
                process.kill()
                process.wait(END_WITHIN)
        self.processes = ()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._before.take_back(self._taken)

    def _shared_memory(self, size: int) -> Tensor | None:
        """Return memory of `size` bytes that all ranks share, or None if they are on several hosts."""
        memory, path = None, Path(SHARED if SHARED.is_dir() else tempfile.gettempdir(), f"quire-{secrets.token_hex(8)}")
        try:
            if self.rank == 0:
                memory = _made(path, size)
            path = Path(self.said("memory", str(path))[0])
            if self.rank > 0:
                with suppress(OSError):
                    memory = mapped(os.open(path, os.O_RDWR), size)
            have = self.said("has memory", str(memory is not None))
        finally:
            if self.rank == 0:
                path.unlink(missing_ok=True)
        return memory if all(each == "True" for each in have) else None

    def _watch(self, exchange: Communicator) -> None:
        """Watch the group until it ends, and then end this process if it is not rank 0."""
        exchange.watch(ends=self.rank > 0)
        if exchange.lost is not None:
            self.on_lost()


def join(config: EngineConfig, backend: Backend) -> ProcessGroup:
    """Join the group that the config asks for, as rank 0 unless a launcher specifies another rank.

    Raises ConfigError if ranks disagree or cannot meet, GroupLost if one does not arrive.
    """
    size, place = config.tensor_parallel_size, launch.place()
    if place is not None:
        if place.size != size:
            raise ConfigError(
                f"tensor_parallel_size is {size}, and a launcher has started {place.size} processes (WORLD_SIZE); "
                "there are as many processes as ranks"
            )
        return _formed(ProcessGroup(_met(place), place.rank, size, launched=True), config, backend)
    devices.check_count(config)
    directory = Path(tempfile.mkdtemp(prefix="quire-ranks-"))  # accessible to this user only
    store, own = str(directory / "store"), (torch.get_num_threads(), native.chosen())
    others = [launch.start(launch.Given(rank, size, store, *own, config)) for rank in range(1, size)]
    return _formed(ProcessGroup(FileStore(store, size), 0, size, others, directory), config, backend)


def join_started(given: launch.Given, backend: Backend) -> ProcessGroup:
    """Join as a rank that rank 0 has started. Raises the exceptions of `join`."""
    return _formed(ProcessGroup(FileStore(given.store, given.size), given.rank, given.size), given.config, backend)


def _formed(group: ProcessGroup, config: EngineConfig, backend: Backend) -> ProcessGroup:
    try:
        group.form(config, backend)
    except BaseException as error:
        group.fail(error)
        group.close()
        raise
    return group


def _met(place: launch.RankPlace) -> Store:
    try:
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=JOIN_WITHIN))))[0]
        again = place.rank == 0 and store.add("groups", 1) > 1
    except (RuntimeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise ConfigError(f"ranks cannot meet at MASTER_ADDR:MASTER_PORT {place.address}: {why}") from error
    if again:
        raise ConfigError("the processes of a launcher compute one model; this is the second model with several ranks")
    return store


def host_name() -> str:
    """Return a name that is unique to this host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{platform.node()} {boot}"


def _made(path: Path, size: int) -> Tensor:
    """Return a new file of `size` bytes as memory. Raises ConfigError if there is no room for it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):  # else a write to an unallocated page would end the process
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.ftruncate(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        return mapped(descriptor, size)
    except OSError as error:
        raise ConfigError(
            f"{path.parent} has no room for {size / 2**20:,.0f} MiB, through which ranks exchange numbers ({error}); "
            "in a container it can be made larger, as by `docker run --shm-size`"
        ) from error


def mapped(descriptor: int, size: int) -> Tensor:
    """Map the first bytes of a file, and close it: uint8 [size]."""
    try:
        return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    except ValueError as error:  # it has fewer bytes
        raise OSError(str(error)) from error
    finally:
        os.close(descriptor)
