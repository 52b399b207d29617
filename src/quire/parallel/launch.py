"""Start of ranks: a launcher describes a rank in the process's environment, in torchrun's variables."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from subprocess import DEVNULL, Popen
from typing import Any, NamedTuple

from quire.config import EngineConfig, engine_config
from quire.errors import ConfigError

GIVEN = "QUIRE_RANK"  # environment variable in which rank 0 passes the parameters of a rank


class RankPlace(NamedTuple):
    """The place of a process among those that a launcher has started."""

    rank: int
    size: int
    address: str  # of rank 0, with the port where the ranks meet


class Given(NamedTuple):
    """The parameters that rank 0 passes to a process that it starts."""

    rank: int
    size: int
    store: str  # path of the file through which the ranks meet
    threads: int  # of all ranks together
    isa: str | None  # whose kernels are used, see `native.using`
    config: EngineConfig


def place() -> RankPlace | None:
    """Return the place that a launcher has set, or None without a launcher.

    Raises ConfigError for an incomplete one.
    """
    names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
    rank, size, host, port = (os.environ.get(name) for name in names)
    if rank is None or size is None:
        return None
    if not rank.isdecimal() or not size.isdecimal() or host is None or port is None:
        given = ", ".join(f"{name}={os.environ.get(name)!r}" for name in names)
        raise ConfigError(f"the environment has {given}; a launcher of ranks sets all four of them")
    return RankPlace(int(rank), int(size), f"{host}:{port}")


def is_follower() -> bool:
    """Return whether a launcher has started this process as a rank other than the first."""
    found = place()
    return found is not None and found.rank > 0


def threads(cores: int) -> int:
    """Return the threads of a launched process on `cores` cores: OMP_NUM_THREADS, or as many as cores.

    torchrun sets that variable to 1 if it is not set, so 1 counts as not set.
    """
    given = os.environ.get("OMP_NUM_THREADS", "1")
    return int(given) if given.isdecimal() and int(given) > 1 else cores


def options(config: EngineConfig) -> dict[str, Any]:
    """Return the config's options, including those of the cache, in the form of `engine_config`."""
    own = {one.name: getattr(config, one.name) for one in fields(config) if one.name != "cache"}
    return own | {one.name: getattr(config.cache, one.name) for one in fields(config.cache)}


def given() -> Given:
    """Return the parameters that rank 0 has passed to this process."""
    said = json.loads(os.environ[GIVEN])
    return Given(**said | {"config": engine_config(**said["config"])})


def start(what: Given) -> Popen[bytes]:
    """Start a rank as a process of this host."""
    variables = {**os.environ, GIVEN: json.dumps(what._asdict() | {"config": options(what.config)})}
    return Popen([sys.executable, "-m", "quire.parallel.worker"], env=variables, stdin=DEVNULL)
