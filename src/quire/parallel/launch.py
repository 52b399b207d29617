"""How ranks are started: what a launcher says to a process stands in its environment, as torchrun has it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from quire.config import EngineConfig
from quire.errors import ConfigError

CONFIG = "QUIRE_RANK_CONFIG"  # what a process computes that rank 0 has started


class Place(NamedTuple):
    """A process among those that a launcher has started."""

    rank: int
    size: int
    address: str  # of rank 0, and of a port there where the ranks meet


class Process(Protocol):
    """One of the other ranks, as its starter sees it."""

    @property
    def pid(self) -> int:
        """Its number on this host."""

    def poll(self) -> int | None:
        """Its exit status; None: it runs."""

    def wait(self, timeout: float) -> int:
        """Wait for its end, at most so many seconds. Raises an exception where it runs on."""

    def kill(self) -> None:
        """End it at once."""


Starter = Callable[[Mapping[str, str]], Process]  # starts a rank with these variables in its environment


def place() -> Place | None:
    """What a launcher has said to this process; None: there was none. Raises ConfigError for a part of it."""
    names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    rank, size, host, port = (os.environ.get(name) for name in names)
    if rank is None or size is None:
        return None
    if not rank.isdecimal() or not size.isdecimal() or host is None or port is None:
        given = ", ".join(f"{name}={os.environ.get(name)!r}" for name in names)
        raise ConfigError(f"the environment has {given}; a launcher of ranks sets all four of them")
    return Place(int(rank), int(size), f"{host}:{port}")


def environment(rank: int, size: int, host: str, port: int, config: EngineConfig) -> dict[str, str]:
    """What a rank is started with that gets its config from rank 0."""
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return common | {"RANK": str(rank), CONFIG: pickle.dumps(config).hex()}


def given_config() -> EngineConfig:
    """What rank 0 has started this process with."""
    found: EngineConfig = pickle.loads(bytes.fromhex(os.environ[CONFIG]))
    return found


def start(variables: Mapping[str, str]) -> Process:
    """A rank as a process of this host."""
    return subprocess.Popen(
        [sys.executable, "-m", "quire.parallel.worker"], env={**os.environ, **variables}, stdin=subprocess.DEVNULL
    )
