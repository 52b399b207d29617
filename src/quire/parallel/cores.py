"""Assign cores to ranks: those of one memory node, if possible.

Memory is allocated on the node of the process that first writes to it; that includes weights and the cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

SYSTEM = Path("/sys/devices/system")


class Binding(NamedTuple):
    """The CPUs that a thread may use, and the number of threads that it computes with."""

    cpus: tuple[int, ...]
    threads: int
    thread: int  # the thread that may use the CPUs

    @classmethod
    def now(cls) -> Binding:
        """Return the binding of this thread, without CPUs if the system does not report them."""
        cpus = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
        return cls(cpus, torch.get_num_threads(), threading.get_native_id())

    def take(self) -> None:
        """Apply this binding to the thread and to the threads that it starts."""
        if self.cpus:
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(self.thread, self.cpus)
        torch.set_num_threads(self.threads)

    def take_back(self, taken: Binding) -> None:
        """Restore this binding, except for parts that were changed since `taken` was applied."""
        now = Binding.now()
        cpus = self.cpus
        with suppress(ProcessLookupError):
            if cpus and tuple(sorted(os.sched_getaffinity(self.thread))) != taken.cpus:
                cpus = ()
        threads = self.threads if now.threads == taken.threads else now.threads
        Binding(cpus, threads, self.thread).take()

    def part(self, index: int, count: int) -> Binding:
        """Return one of `count` parts, in whole cores. If there are too few cores, all parts share all of them."""
        cores = by_place(self.cpus)
        threads = max(1, self.threads // count)
        if count == 1:
            return self
        if len(cores) < count:
            return self._replace(threads=threads)
        own = cores[len(cores) * index // count : len(cores) * (index + 1) // count]
        return self._replace(cpus=tuple(sorted(cpu for core in own for cpu in core)), threads=min(len(own), threads))


def by_place(cpus: Sequence[int], system: Path = SYSTEM) -> list[list[int]]:
    """Group CPUs by core, with one or several each, and sort the cores by their memory nodes."""
    places: dict[tuple[int, int, int], list[int]] = {}
    for cpu in cpus:
        directory = system / "cpu" / f"cpu{cpu}"
        node = next((int(path.name[4:]) for path in directory.glob("node[0-9]*")), 0)
        package = _number(directory / "topology" / "physical_package_id", 0)
        core = _number(directory / "topology" / "core_id", cpu)
        places.setdefault((node, package, core), []).append(cpu)
    return [places[place] for place in sorted(places)]


def _number(path: Path, unknown: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return unknown
