"""Processes for programs that nobody has read: grammars by clients, and chat templates that come with a model.

Such a program may loop, take all memory, or overflow a stack, and no library stops all of that. So it runs in a process
of its own that has limits. This module starts such processes, asks them, and ends them; `child.py` is what they run.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import LifoQueue
from typing import Any

from quire.errors import QuireError
from quire.server.sandbox import child
from quire.server.sandbox.child import ANSWER, DIED, HEADER, frame

START = (
    60.0  # seconds that a process may take to load its program; it ends requests by itself, so this is the last resort
)


class OutOfTime(QuireError):
    """A request took longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it takes longer than {seconds:g} s")
        self.seconds = seconds


class Died(QuireError):
    """A request took too much memory, overflowed the stack, or made too long an answer."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may take."""

    seconds: float  # from its beginning to its end
    cpu_seconds: float  # of all of the process's threads together
    memory: int  # bytes of address space, beyond the program's own
    stack: int  # bytes
    answer: int  # bytes of JSON


class Process:
    """A process for one program. It starts at the first request, or with `start`, and again if it has ended."""

    def __init__(self, program: Path, limits: Limits, *arguments: Any) -> None:
        """program, arguments: see `child`."""
        self._command = [sys.executable, child.__file__, str(program)]
        self._limits = limits
        fork_limits = asdict(limits)
        del fork_limits["answer"]
        self._setup = frame({"arguments": arguments, "limits": fork_limits})
        self._unsent = b""  # the setup, until the first request
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to load the program, so that the first request need not wait for it."""
        with self._lock:
            self._running()

    def ask(self, request: object) -> Any:
        """The answer to a request. Both are plain data, as JSON has it. One request at a time gets in.

        Raises OutOfTime or Died where it exceeds the limits.
        """
        with self._lock:
            process = self._running()
            try:
                reply = json.loads(self._exchanged(process, self._unsent + frame(request)))
            except TimeoutError:
                self._end(process)
                raise OutOfTime(self._limits.seconds) from None
            except OSError as error:
                self._end(process)
                raise Died(f"the process has ended: {error}") from error
            self._unsent = b""
        if ANSWER in reply:
            return reply[ANSWER]
        if reply[DIED] == signal.SIGALRM:
            raise OutOfTime(self._limits.seconds)
        if reply[DIED] == signal.SIGPROF:
            raise OutOfTime(self._limits.cpu_seconds)
        raise Died("the request has ended its process")

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None:
            # What it says before it is asked is of a request that somebody else has ended, such as the system.
            if process.poll() is None and not _poll(_pipes(process)[1], select.POLLIN, 0):
                return process
            self._end(process)
        self._process = process = subprocess.Popen(
            self._command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the server's terminal is not for this process
        )
        os.set_blocking(_pipes(process)[0], False)
        self._unsent = self._setup
        return process

    def _exchanged(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Write a request and read the JSON of its answer. Raises OSError, of which TimeoutError is one."""
        to_it, from_it = _pipes(process)
        deadline = time.monotonic() + START + self._limits.seconds
        unsent, reply = memoryview(request), bytearray()
        poll = select.poll()
        poll.register(from_it, select.POLLIN)
        poll.register(to_it, select.POLLOUT)
        while True:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError
            for pipe, _ in poll.poll(1000 * left):
                if pipe == from_it:
                    if not (piece := os.read(from_it, 2**20)):
                        raise BrokenPipeError("it says no more")
                    reply += piece
                elif unsent := unsent[os.write(to_it, unsent) :]:
                    continue
                else:
                    poll.unregister(to_it)
            if len(reply) >= HEADER.size:
                (size,) = HEADER.unpack_from(reply)
                if size > self._limits.answer:
                    raise BrokenPipeError(f"its answer has {size} bytes, of {self._limits.answer}")
                if len(reply) == HEADER.size + size:
                    if unsent:  # it has died of a part of the request, so the rest is no beginning of the next one
                        self._end(process)
                    return bytes(reply[HEADER.size :])

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        """End a process and its fork. If the process has ended by itself, its fork ends when the pipe is closed."""
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


class Sandbox:
    """Some processes for the same program. Any number of threads may ask; those beyond the processes wait."""

    def __init__(self, count: int, program: Path, limits: Limits, *arguments: Any) -> None:
        """See `Process`."""
        self._processes = tuple(Process(program, limits, *arguments) for _ in range(count))
        self._free: LifoQueue[Process] = LifoQueue()  # the one that was used last: it has started
        for process in reversed(self._processes):
            self._free.put(process)

    def start(self) -> None:
        """Start the first process."""
        self._processes[0].start()

    def ask(self, request: object) -> Any:
        """See `Process`."""
        process = self._free.get()
        try:
            return process.ask(request)
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()


def _pipes(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The files to write to a process and to read from it."""
    if process.stdin is None or process.stdout is None:
        raise Died("the process has no pipes")
    return process.stdin.fileno(), process.stdout.fileno()


def _poll(file: int, events: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(file, events)
    return bool(poll.poll(milliseconds))
