"""How ranks are started: what a launcher says to a process stands in its environment, as torchrun has it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from subprocess import DEVNULL, Popen
from typing import Any, NamedTuple

from quire.config import EngineConfig, engine_config
from quire.errors import ConfigError

GIVEN = "QUIRE_RANK"  # what rank 0 says to a process that it starts


class Place(NamedTuple):
    """A process among those that a launcher has started."""

    rank: int
    size: int
    address: str  # of rank 0, and of a port there where the ranks meet


class Given(NamedTuple):
    """What rank 0 says to a process that it starts."""

    rank: int
    size: int
    store: str  # path of the file through which the ranks meet
    threads: int  # of all ranks together
    config: EngineConfig


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


def is_follower() -> bool:
    """Whether a launcher has started this process as a rank other than the first."""
    found = place()
    return found is not None and found.rank > 0


def threads(cores: int) -> int:
    """Threads of a process that a launcher has started, on so many cores: OMP_NUM_THREADS, or as many as cores.

    torchrun sets that to 1 where it is not set, so 1 counts as not set.
    """
    given = os.environ.get("OMP_NUM_THREADS", "1")
    return int(given) if given.isdecimal() and int(given) > 1 else cores


def options(config: EngineConfig) -> dict[str, Any]:
    """The config's options, those of the cache among them, as `engine_config` takes them."""
    own = {one.name: getattr(config, one.name) for one in fields(config) if one.name != "cache"}
    return own | {one.name: getattr(config.cache, one.name) for one in fields(config.cache)}


def given() -> Given:
    """What rank 0 has started this process with."""
    said = json.loads(os.environ[GIVEN])
    return Given(**said | {"config": engine_config(**said["config"])})


def start(what: Given) -> Popen[bytes]:
    """A rank as a process of this host."""
    variables = {**os.environ, GIVEN: json.dumps(what._asdict() | {"config": options(what.config)})}
    return Popen([sys.executable, "-m", "quire.parallel.worker"], env=variables, stdin=DEVNULL)
