"""Sandbox processes that start quickly: forks of one process that has imported the modules of their programs.

Importing transformers takes 1.5 s of CPU time, and the tests start hundreds of servers. A fork runs the same code with
the same limits as a new process. `python -m tests.warm` is the process that forks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import quire.sandbox.process
from quire.sandbox import child, grammar_program
from quire.sandbox.chat_template import PROGRAM as TEMPLATE_PROGRAM

ROOT = Path(__file__).parent.parent
PROGRAMS = (str(TEMPLATE_PROGRAM), grammar_program.__file__)
ADDRESS = "TESTS_OF_QUIRE_WARM"  # the variable that tells the processes of tests where to ask for a fork


class Warm:
    """Replacement for the module subprocess in `quire.sandbox.process`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: list[str], **options: Any) -> Any:
        if command[-1] in PROGRAMS:
            return Forked(command[-1], options["env"])
        return subprocess.Popen(command, **options)


def install() -> None:
    """Make the sandboxes of this process forks."""
    quire.sandbox.process.subprocess = Warm()  # type: ignore


class Forked:
    """The part of subprocess.Popen that sandboxes use."""

    def __init__(self, program: str, environment: dict[str, str]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(address())
            its = [pipes[0][0], pipes[1][1], pipes[2][1]]
            socket.send_fds(connection, [json.dumps([program, environment]).encode()], its)
            for file in its:
                os.close(file)
            self.stdin = os.fdopen(pipes[0][1], "wb", 0)
            self.stdout = os.fdopen(pipes[1][0], "rb", 0)
            self.stderr = os.fdopen(pipes[2][0], "rb", 0)
            self.pid = int(connection.recv(20))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                self.returncode = -signal.SIGKILL  # how it ended is not known
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (60.0 if timeout is None else timeout)
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a sandbox's process", timeout or 60.0)
            time.sleep(0.002)
        return status


_lock = threading.Lock()
_started: list[Any] = []  # the process that forks and the directory of its socket, if this one has started it


def address() -> str:
    """Return the socket of the process that forks. The first caller of a run starts that process, and ends it."""
    with _lock:
        if ADDRESS not in os.environ:
            directory = TemporaryDirectory(prefix="quire-warm-")
            path = str(Path(directory.name) / "socket")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(128)
                process = subprocess.Popen(
                    [sys.executable, "-m", "tests.warm", str(listener.fileno())],
                    stdin=subprocess.PIPE,
                    cwd=ROOT,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
            _started.extend((process, directory))
            os.environ[ADDRESS] = path
        return os.environ[ADDRESS]


def fork_for(listener: socket.socket) -> None:
    """Fork for each process that asks, until stdin ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that what has ended is gone
    for each in PROGRAMS:
        child._load(Path(each))
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    poll.register(0, select.POLLIN)
    while all(file != 0 for file, _ in poll.poll()):
        connection, _ = listener.accept()
        message, files, *_ = socket.recv_fds(connection, 2**16, 3)
        if os.fork() == 0:
            run(connection, files, *json.loads(message))
        for file in files:
            os.close(file)
        connection.close()


def run(connection: socket.socket, files: list[int], program: str, environment: dict[str, str]) -> None:
    """Be the process of a sandbox."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
    connection.send(str(os.getpid()).encode())
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(BaseException):
        child.serve(Path(program))
    os._exit(1)


if __name__ == "__main__":
    fork_for(socket.socket(fileno=int(sys.argv[1])))
