"""What Linux reports of a process under /proc."""

from __future__ import annotations

import re
from pathlib import Path


def sizes(path: Path) -> dict[str, int]:
    """The sizes in a file such as /proc/PID/status, by name, in bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    return {name: 1024 * int(kilobytes) for name, kilobytes in lines}
