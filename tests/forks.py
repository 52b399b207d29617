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
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from tests import warm

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # else a process that was forked would have none of the others
QUIRE = "from quire.cli import main; main()"
READY = re.compile(r"serves \S+ at (http://[\d.]+:(\d+))")
START_LIMIT = 60.0  # s in which a process must say what is waited for
END_LIMIT = 30.0  # s from SIGTERM to its end


class Process:
    """A command that was started."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log  # what it says, on both of its outputs
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return not status_file(self.log).exists()

    def send(self, signal_number: int) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    async def listening(self) -> Process:
        """Itself, when it listens."""
        self.port = int((await self.saying(READY))[2])
        return self

    def said(self, pattern: str) -> re.Match[str]:
        """A match of this in what it says, once there is one."""
        return asyncio.run(self.saying(re.compile(pattern, re.MULTILINE)))

    async def saying(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """A match of this in what it says, once there is one."""
        end = time.monotonic() + START_LIMIT
        while (found := pattern.search(self.log.read_text())) is None:
            assert self.is_alive, self.log.read_text()
            assert time.monotonic() < end, f"it does not say {pattern.pattern!r}: {self.log.read_text()}"
            await asyncio.sleep(0.02)
        return found

    def wait(self, seconds: float = END_LIMIT) -> int:
        """Its status, when it has ended, as that of subprocess.Popen: of a signal, its number below zero."""
        assert asyncio.run(self.ended(seconds)), f"it does not end: {self.log.read_text()}"
        return int(status_file(self.log).read_text())

    async def ended(self, seconds: float) -> bool:
        """Whether it ends within that time."""
        end = time.monotonic() + seconds
        while self.is_alive and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return not self.is_alive


def status_file(log: Path) -> Path:
    """Where the status of a process is written, once it has ended."""
    return log.with_suffix(".status")


# Before a program: an answer takes long enough to be interrupted, whatever else the machine does.
SLOWLY = """
import time
from quire.engine.engine import Engine

def slow_step(engine, step=Engine.step):
    time.sleep(0.02)
    return step(engine)

Engine.step = slow_step
"""


class Spawner:
    """Starts commands. All of them end with it."""

    def __init__(self, directory: Path) -> None:
        """directory: for their logs."""
        self._directory = directory
        self._count = 0
        self._lock = threading.Lock()  # a fleet's replicas are started side by side
        warm.address()  # which the processes get to know
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
    def running(
        self, *arguments: str, environment: Mapping[str, str] | None = None, program: str = QUIRE
    ) -> Iterator[Process]:
        """What `quire_bench.server.process.running` does. environment: one thread, which all have here."""
        assert environment in (None, ONE_THREAD)
        process = self.start(*arguments, program=program)
        try:
            yield asyncio.run(process.listening())
        finally:
            process.send(signal.SIGTERM)
            if not asyncio.run(process.ended(END_LIMIT)):
                process.kill()

    def start(self, *arguments: str, program: str = QUIRE) -> Process:
        """Start `quire` with these arguments, or another program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._count += 1
            log = self._directory / f"{self._count:04d}-{arguments[0]}.log"
            log.touch()
            self._process.stdin.write(json.dumps([str(log), program, *arguments]) + "\n")
            self._process.stdin.flush()
            return Process(int(self._process.stdout.readline()), log)


def spawn() -> None:
    """Fork as the lines of stdin say; at its end kill what was forked."""
    warm_up()
    assert threading.active_count() == 1
    logs: dict[int, Path] = {}  # of what was forked and has not ended, by process

    def reap(*_: object) -> None:
        while logs:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # this call came in the middle of another one, which has waited for the last one
                return
            if pid == 0:
                return
            file = status_file(logs.pop(pid))
            file.with_suffix(".new").write_text(str(os.waitstatus_to_exitcode(status)))
            file.with_suffix(".new").rename(file)

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        log, program, *arguments = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # until it is known whose process ended
        pid = os.fork()
        if pid == 0:
            run(log, program, arguments)
        logs[pid] = Path(log)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        print(pid, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in logs:
        os.kill(pid, signal.SIGKILL)


def warm_up() -> None:
    """Import all that servers and gateways need, by making what one of them serves."""
    import uvicorn.loops.auto  # noqa: F401

    import quire.cli.fleet
    import quire.fleet.gateway  # noqa: F401
    from quire.fleet.replica import Replica
    from quire.server.run import build_parts
    from quire.server.server_config import ServerConfig

    build_parts({"num_blocks": 8}, ServerConfig(fleet_secret="of a fleet"), Replica).app()
    warm.install()
    gc.collect()
    gc.freeze()  # a process that was forked would look through it again, and so copy it


def run(log: str, program: str, arguments: list[str]) -> None:
    """Be a program, with its own files and signals."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        out, nothing = os.open(log, os.O_WRONLY | os.O_APPEND), os.open(os.devnull, os.O_RDONLY)
        for number, file in ((0, nothing), (1, out), (2, out)):
            os.dup2(file, number)
        sys.argv = ["quire", *arguments]
        exec(program, {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    spawn()
