"""Numbers of threads that a command measures with, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.errors import ConfigError
from quire_bench.proc import num_cores


def thread_counts(given: str | None) -> tuple[int, ...]:
    """The numbers in a list such as "1,2,4"; without one, that of now.

    Raises ConfigError where one is no number from 1 to the machine's cores.
    """
    if given is None:
        return (torch.get_num_threads(),)
    most = num_cores()
    names = [name.strip() for name in given.split(",")]
    if wrong := [name for name in names if not (name.isdecimal() and 1 <= int(name) <= most)]:
        raise ConfigError(
            f"threads has {wrong[0]!r}; each must be a number from 1 to {most}, which is how many cores this machine "
            "has, with commas between them, as in 1,2"
        )
    return tuple(dict.fromkeys(map(int, names)))


def counted(count: int) -> str:
    """So many threads, in words."""
    return f"{count} thread" if count == 1 else f"{count} threads"


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Compute with that many threads, afterwards with as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
