"""Processes for programs that no one has read: grammars by clients, and chat templates that come with a model.

Such a program may loop, take all memory, or overflow a stack, and no library stops all of that. So it runs in a process
of its own that has limits. This module starts such processes, asks them, and ends them; `child.py` is what they run.
"""

from __future__ import annotations

import contextlib
import json
import logging
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
from quire.sandbox import child
from quire.sandbox.child import ANSWER, DIED, HEADER, IS_CUT, frame

log = logging.getLogger("quire.server")

LOAD = 60.0  # seconds that a request waits for a process to load its program
GRACE = 5.0  # seconds beyond a request's own, after which its process, which should have ended it, is killed
LAST_LOOK = 0.1  # seconds beyond these, as a server that was stopped has not read what came meanwhile
# Variables that a process has of the server's environment: what Python and its libraries are found with, and the time
# zone of templates. All others, such as keys, are none of a stranger's program.
ENVIRONMENT = (
    "HOME", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE",
    "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
MAX_STDERR = 4096  # bytes that are logged of what a process wrote before it failed


class OutOfTime(QuireError):
    """A request took longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it takes longer than {seconds:g} s")
        self.seconds = seconds


class OutOfCpuTime(OutOfTime):
    """A request took more CPU time than it may, which does not depend on what else the machine does."""


class Died(QuireError):
    """A request took too much memory, overflowed the stack, or made too long an answer."""


class SandboxFailed(QuireError):
    """No process can answer, whatever the request is: it cannot start, was killed from outside, or is closed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request may take."""

    seconds: float  # from its beginning to its end
    cpu_seconds: float  # of all of the process's threads together
    memory: int  # bytes of address space, beyond the program's own
    stack: int  # bytes
    answer: int  # bytes of JSON


def setup_frame(limits: Limits, *arguments: Any) -> bytes:
    """What a process reads first. arguments: of the program's `prepare`; plain data, as JSON has it."""
    fork_limits = asdict(limits)
    del fork_limits["answer"]
    return frame({"arguments": arguments, "limits": fork_limits})


class Process:
    """A process for one program. It starts at the first request, or with `start`, and again if it has ended."""

    def __init__(self, program: Path, limits: Limits, setup: bytes) -> None:
        """program: see `child`. setup: from `setup_frame`."""
        self._command = [sys.executable, child.__file__, str(program)]
        self._name = program.stem
        self._limits = limits
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = memoryview(b"")  # to the process
        self._stderr = b""  # the end of what the process wrote while it loaded
        self._is_ready = False  # the process has loaded its program
        self._is_used = False  # the fork has answered a request, which may have left something in its memory
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to load the program, so that the first request need not wait for it. Raises SandboxFailed."""
        with self._lock:
            self._running()

    def ask(self, request: object) -> Any:
        """The answer to a request. Both are plain data, as JSON has it. One request at a time gets in.

        Raises OutOfTime or Died where it exceeds the limits, SandboxFailed where the process fails.
        """
        data = frame(request)
        with self._lock:
            while True:
                process = self._loaded()
                was_used, self._is_used = self._is_used, False
                reply = self._reply(process, data)
                if ANSWER in reply:
                    self._is_used = True
                    return reply[ANSWER]
                if reply[DIED] == signal.SIGALRM:
                    raise OutOfTime(self._limits.seconds)
                if reply[DIED] == signal.SIGPROF:
                    raise OutOfCpuTime(self._limits.cpu_seconds)
                if not was_used:  # else the memory may have been taken by earlier requests: try it in a new fork
                    break
            if reply[DIED] == signal.SIGKILL:  # which no limit sends
                raise self._failed("was killed")
            raise Died("the request has ended its process")

    def close(self) -> None:
        """End the process, if there is one, and its request with it. It never starts again."""
        self._is_closed = True
        if (process := self._process) is not None:  # before the lock, which a request holds until it is answered
            _kill(process)
        with self._lock:
            if self._process is not None:
                _end(self._process)
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and not self._is_closed:
            # What it says before it is asked is of a request that something else has ended, such as the system.
            if process.poll() is None and not (self._is_ready and _poll(_pipes(process)[1], select.POLLIN, 0)):
                return process
            _end(process)
        if self._is_closed:
            raise self._failed("is closed")
        try:
            self._process = process = subprocess.Popen(
                self._command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
                start_new_session=True,  # an interrupt of the server's terminal is not for this process
            )
        except OSError as error:
            self._process = None
            raise self._failed(f"cannot be started: {error}") from error
        if self._is_closed:  # meanwhile, so that `close` may not have seen it
            _kill(process)
        os.set_blocking(_pipes(process)[0], False)
        self._unsent = memoryview(self._setup)
        self._stderr = b""
        self._is_ready = self._is_used = False
        return process

    def _loaded(self) -> subprocess.Popen[bytes]:
        """A process that has loaded its program."""
        process = self._running()
        if self._is_ready:
            return process
        try:
            self._exchange(process, LOAD)
        except TimeoutError:  # it goes on loading, for the next request
            raise self._failed(f"has not loaded within {LOAD:g} s") from None
        except OSError as error:
            if process.stderr is not None:
                os.set_blocking(process.stderr.fileno(), False)
                self._stderr = (self._stderr + (process.stderr.read() or b""))[-MAX_STDERR:]
            raise self._failed(f"cannot start, exit status {_exit_status(process)}") from error
        if process.stderr is not None:
            process.stderr.close()
        self._is_ready = True
        return process

    def _reply(self, process: subprocess.Popen[bytes], request: bytes) -> dict[str, Any]:
        """What the process says of a request."""
        self._unsent = memoryview(request)
        try:
            reply: dict[str, Any] = json.loads(self._exchange(process, self._limits.seconds + GRACE))
        except TimeoutError:
            _end(process)
            raise OutOfTime(self._limits.seconds) from None
        except OSError as error:
            raise self._failed(f"has ended, exit status {_exit_status(process)}") from error
        if self._unsent or reply.get(IS_CUT):  # a part of the request was read, so the rest is no beginning of another
            _end(process)
        return reply

    def _exchange(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        """Write what is unsent and read the JSON of a frame.

        Raises OSError, of which TimeoutError is one, and Died for too long an answer.
        """
        to_it, from_it = _pipes(process)
        deadline, is_late = time.monotonic() + seconds, False
        reply = bytearray()
        poll = select.poll()
        poll.register(from_it, select.POLLIN)
        poll.register(to_it, select.POLLOUT)
        errors = None if self._is_ready or process.stderr is None else process.stderr.fileno()
        if errors is not None:
            poll.register(errors, select.POLLIN)
        while True:
            if (left := deadline - time.monotonic()) <= 0:
                if is_late:
                    raise TimeoutError
                is_late, left, deadline = True, LAST_LOOK, time.monotonic() + LAST_LOOK
            for pipe, _ in poll.poll(1000 * left):
                if pipe == errors:
                    piece = os.read(pipe, MAX_STDERR)
                    self._stderr = (self._stderr + piece)[-MAX_STDERR:]
                    if not piece:
                        poll.unregister(pipe)
                elif pipe == from_it:
                    if not (piece := os.read(from_it, 2**20)):
                        raise BrokenPipeError("it says no more")
                    reply += piece
                else:
                    with contextlib.suppress(BrokenPipeError):  # what it has said, and its end, are read all the same
                        self._unsent = self._unsent[os.write(to_it, self._unsent) :]
                        if self._unsent:
                            continue
                    poll.unregister(to_it)
            if len(reply) >= HEADER.size:
                (size,) = HEADER.unpack_from(reply)
                if size > self._limits.answer:
                    _end(process)
                    raise Died(f"its answer has {size} bytes, of {self._limits.answer}")
                if len(reply) == HEADER.size + size:
                    return bytes(reply[HEADER.size :])

    def _failed(self, why: str) -> SandboxFailed:
        """An error that is no request's own, once it is logged."""
        if self._is_closed:
            return SandboxFailed(f"the process of {self._name} is closed")
        message = f"the process of {self._name} {why}"
        log.error("%s\n%s", message, self._stderr.decode(errors="replace"))
        return SandboxFailed(message)


class Sandbox:
    """Some processes for the same program. Any number of threads may ask; those beyond the processes wait."""

    def __init__(self, count: int, program: Path, limits: Limits, *arguments: Any) -> None:
        """See `Process` and `setup_frame`."""
        setup = setup_frame(limits, *arguments)
        self._processes = tuple(Process(program, limits, setup) for _ in range(count))
        self._free: LifoQueue[Process] = LifoQueue()  # the one that was used last: it has started
        for process in reversed(self._processes):
            self._free.put(process)

    def start(self) -> None:
        """Start the first process. Raises SandboxFailed."""
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


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its fork. If the process has ended by itself, its fork ends when the pipe is closed."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and take back what it held."""
    _kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _exit_status(process: subprocess.Popen[bytes]) -> int:
    """The status of a process that has closed its pipes, which it does just before it ends."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    _end(process)
    return process.returncode


def _pipes(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The files to write to a process and to read from it."""
    if process.stdin is None or process.stdout is None:
        raise SandboxFailed("the process has no pipes")
    return process.stdin.fileno(), process.stdout.fileno()


def _poll(file: int, events: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(file, events)
    return bool(poll.poll(milliseconds))
