"""Commands of Quire's as processes that start in a fraction of the time.

`python -m tests.forks` imports all that is heavy once and forks a process for each command that it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # else a process that was forked would have none of the others
READY = re.compile(r"serves \S+ at (http://[\d.]+:(\d+))")
START_LIMIT = 60.0  # s in which a process must listen
END_LIMIT = 30.0  # s from SIGTERM to its end


class Process:
    """A command of Quire's that listens."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def send(self, signal_number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal_number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    async def listening(self) -> Process:
        """Itself, when it listens."""
        end = time.monotonic() + START_LIMIT
        while (found := READY.search(self.log.read_text())) is None:
            assert self.is_alive, self.log.read_text()
            assert time.monotonic() < end, f"it does not listen: {self.log.read_text()}"
            await asyncio.sleep(0.02)
        self.port = int(found[2])
        return self

    async def ended(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        end = time.monotonic() + seconds
        while self.is_alive and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return not self.is_alive


class Spawner:
    """Starts commands. All of them end with it."""

    def __init__(self, directory: Path) -> None:
        """directory: for their logs."""
        self._directory = directory
        self._count = 0
        self._lock = threading.Lock()  # a fleet's replicas are started side by side
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ONE_THREAD | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )

    def __enter__(self) -> Spawner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    @contextmanager
    def running(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Process]:
        """What `quire_bench.server.process.running` does. environment: one thread, which all have here."""
        assert environment in (None, ONE_THREAD)
        process = self.start(*arguments)
        try:
            yield asyncio.run(process.listening())
        finally:
            process.send(signal.SIGTERM)
            if not asyncio.run(process.ended(END_LIMIT)):
                process.kill()

    def start(self, *arguments: str) -> Process:
        """Start `quire` with these arguments."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._count += 1
            log = self._directory / f"{self._count:04d}-{arguments[0]}.log"
            log.touch()
            self._process.stdin.write(json.dumps([str(log), *arguments]) + "\n")
            self._process.stdin.flush()
            return Process(int(self._process.stdout.readline()), log)


def spawn() -> None:
    """Fork as the lines of stdin say; at its end kill what was forked."""
    warm_up()
    assert threading.active_count() == 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that who has ended is gone
    forked = []
    for line in sys.stdin:
        log, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(log, arguments)
        forked.append(pid)
        print(pid, flush=True)
    for pid in forked:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def warm_up() -> None:
    """Import all that servers and gateways need, by making what one of them serves."""
    import uvicorn.loops.auto  # noqa: F401

    import quire.cli.fleet
    import quire.fleet.gateway  # noqa: F401
    from quire.server.run import build_parts
    from quire.server.server_config import ServerConfig

    build_parts({"num_blocks": 8}, ServerConfig(fleet_secret="of nobody")).app()
    gc.collect()
    gc.freeze()  # a process that was forked would look through it again, and so copy it


def run(log: str, arguments: list[str]) -> None:
    """Be a command, with its own files and signals."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        out, nothing = os.open(log, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
        for number, file in ((0, nothing), (1, out), (2, out)):
            os.dup2(file, number)
        sys.argv = ["quire", *arguments]
        from quire.cli import main

        main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(status)


if __name__ == "__main__":
    spawn()
