"""Servers as processes that start quickly, and gates through which gateways reach replicas.

`python -m tests.fleet.processes` imports all that is heavy once and forks a process for each command that it reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

READY = re.compile(r"serves \S+ at (http://[\d.]+:(\d+))")
START_LIMIT = 60.0  # s in which a process must listen
Watch = Callable[["Gate", "Connection", str, bytes], bool]


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
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fleet.processes"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )

    def __enter__(self) -> Spawner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def start(self, *arguments: str) -> Process:
        """Start `quire` with these arguments."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._count += 1
        log = self._directory / f"{self._count:04d}-{arguments[0]}.log"
        log.touch()
        self._process.stdin.write(json.dumps([str(log), *arguments]) + "\n")
        self._process.stdin.flush()
        return Process(int(self._process.stdout.readline()), log)


def spawn() -> None:
    """Fork as the lines of stdin say; at its end kill what was forked."""
    import quire.fleet.gateway
    import quire.server.run  # noqa: F401

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


class Connection:
    """What is remembered of a connection through a gate."""

    def __init__(self) -> None:
        self.is_session = False
        self.is_called = False  # a call was sent on it whose answer has not come


class Gate:
    """A way from one gateway to one replica. While it is held, nothing passes, and nothing is closed."""

    def __init__(self, gateway: int, replica: int, watch: Watch) -> None:
        """watch: sees what is about to pass; what it returns False for is lost, and with it the connection."""
        self.gateway = gateway
        self.replica = replica
        self.target = 0  # port of the replica
        self.port = 0
        self.num_sessions = 0
        self._watch = watch
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._served: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._served:
            task.cancel()
        await asyncio.gather(*self._served, return_exceptions=True)

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        connection = Connection()
        ways = [
            asyncio.create_task(self._pass(connection, "up", reader, up_writer)),
            asyncio.create_task(self._pass(connection, "down", up_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            await self._open.wait()
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, up_writer):
                end.close()
            if connection.is_session:
                self.num_sessions -= 1

    async def _pass(
        self, connection: Connection, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if way == "down" and not connection.is_session and b'"protocol":' in data:
                    connection.is_session = True
                    self.num_sessions += 1
                if not self._watch(self, connection, way, data):
                    return
                await self._open.wait()
                writer.write(data)
                await writer.drain()


if __name__ == "__main__":
    spawn()
