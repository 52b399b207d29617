"""Ranks that start quickly: forks of one process that has imported their modules."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.forks import Spawner, status_file

PROGRAM = """
import os, runpy, sys
os.environ.update({variables!r})
sys.argv[1:] = {arguments!r}
runpy.run_module({module!r}, run_name="__main__")
"""


class Forked:
    """A module that runs as a process, with the part of `subprocess.Popen` that a group uses."""

    def __init__(self, forks: Spawner, module: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
        program = PROGRAM.format(variables=dict(variables), arguments=list(arguments), module=module)
        self._process = forks.start("rank", program=program)
        self.pid = self._process.pid

    def said(self) -> str:
        """Return its standard output and standard error."""
        return self._process.log.read_text()

    def poll(self) -> int | None:
        return None if self._process.is_alive else int(status_file(self._process.log).read_text())

    def wait(self, seconds: float) -> int:
        end = time.monotonic() + seconds
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", seconds)
            time.sleep(0.005)
        return status

    def kill(self) -> None:
        self._process.kill()


class Forks:
    """Replacement for `subprocess.Popen` with which a rank starts the others. It keeps the processes."""

    def __init__(self, forks: Spawner) -> None:
        self._forks = forks
        self.started: list[Forked] = []

    def __call__(self, command: Sequence[str], env: Mapping[str, str], **others: Any) -> Forked:
        _, option, module = command  # python -m MODULE
        assert option == "-m"
        self.started.append(Forked(self._forks, module, [], {name: env[name] for name in env if "QUIRE" in name}))
        return self.started[-1]
