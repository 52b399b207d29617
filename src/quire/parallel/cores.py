"""Which cores a rank computes on: those of one memory node, where that can be.

What a process writes first lies in the memory of the node on which it runs, its weights and its cache too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

SYSTEM = Path("/sys/devices/system")


class Binding(NamedTuple):
    """The CPUs that a thread may use, and how many threads it computes with."""

    cpus: tuple[int, ...]
    threads: int

    @classmethod
    def now(cls) -> Binding:
        """This thread's. No CPUs where the system does not say."""
        cpus = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
        return cls(cpus, torch.get_num_threads())

    def take(self) -> None:
        """Let this thread, and those that it starts, have these."""
        if self.cpus:
            os.sched_setaffinity(0, self.cpus)
        torch.set_num_threads(self.threads)

    def part(self, index: int, count: int) -> Binding:
        """One of so many parts, of whole cores. Where there are too few of these, all parts have all of them."""
        cores = by_place(self.cpus)
        threads = max(1, self.threads // count)
        if len(cores) < count:
            return Binding(self.cpus, threads)
        own = cores[len(cores) * index // count : len(cores) * (index + 1) // count]
        return Binding(tuple(sorted(cpu for core in own for cpu in core)), min(len(own), threads))


def by_place(cpus: Sequence[int], system: Path = SYSTEM) -> list[list[int]]:
    """CPUs by cores, of which each has one or several, and the cores in the order of their memory nodes."""
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
