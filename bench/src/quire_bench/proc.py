"""Reports of the system about a process and the CPU."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from quire.errors import ConfigError


def sizes(path: Path) -> dict[str, int]:
    """The sizes in a file such as /proc/PID/status, by name, in bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    return {name: 1024 * int(kilobytes) for name, kilobytes in lines}


def tells_cpu_time() -> bool:
    """Return whether the system reports the CPU time of a process and its threads."""
    return Path("/proc/self/stat").exists()


def cpu_seconds(pid: int) -> float:
    """Seconds of CPU time that a process has taken, its threads together. Raises ConfigError without /proc."""
    return _cpu_seconds(Path(f"/proc/{pid}/stat"))


def first_thread_seconds(pid: int) -> float:
    """Seconds of CPU time that a process's first thread has taken. Raises ConfigError without /proc."""
    return _cpu_seconds(Path(f"/proc/{pid}/task/{pid}/stat"))


def _cpu_seconds(path: Path) -> float:
    if not path.exists():
        raise ConfigError(f"there is no {path}, where Linux tells CPU time")
    fields = path.read_text().rpartition(")")[2].split()  # those after the program's name, which may have spaces
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processor() -> str:
    """Return the name of the CPU."""
    path = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", path.read_text(), re.MULTILINE) if path.exists() else []
    return names[0] if names else platform.machine()


def cpu_flags() -> set[str]:
    """Return the features of the CPU by the system's names; empty if it does not list them as on x86."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*: (.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return set(found[1].split()) if found else set()


def num_cores() -> int:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
