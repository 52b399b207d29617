"""Processes for untrusted programs: grammars from clients, and chat templates that come with a model.

Such a program may loop, use all memory, or overflow a stack, and no library prevents all of that. So it runs in a
separate process with limits. This module starts such processes, sends them requests, and ends them; `child.py` is their
code.
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
LAST_LOOK = 0.1  # seconds beyond these, because a suspended server has not read its pipes meanwhile
# Variables of the server's environment that a process inherits: those needed to find Python and its libraries, and the
# time zone for templates. An untrusted program must not see the others, such as keys.
ENVIRONMENT = (
    "HOME", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE",
    "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
MAX_STDERR = 4096  # most bytes of a process's stderr that are logged when it fails


class OutOfTime(QuireError):
    """A request took longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"it takes longer than {seconds:g} s")
        self.seconds = seconds


class OutOfCpuTime(OutOfTime):
    """A request took more CPU time than it may, independently of the machine's other load."""


class Died(QuireError):
    """A request took too much memory, overflowed the stack, or gave too long an answer."""


class SandboxFailed(QuireError):
    """No process can answer, whatever the request is: it cannot start, was killed from outside, or is closed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request."""

    seconds: float  # wall time
    cpu_seconds: float  # of all of the process's threads together
    memory: int  # bytes of address space, in addition to the program's own
    stack: int  # bytes
    answer: int  # bytes of JSON


def setup_frame(limits: Limits, *arguments: Any) -> bytes:
    """Return the first frame for a process. arguments: of the program's `prepare`; plain data, as in JSON."""
    fork_limits = asdict(limits)
    del fork_limits["answer"]
    return frame({"arguments": arguments, "limits": fork_limits})


class Process:
    """A process for one program. It starts at the first request, or with `start`, and restarts if it has ended."""

    def __init__(self, program: Path, limits: Limits, setup: bytes) -> None:
        """program: see `child`. setup: from `setup_frame`."""
        self._command = [sys.executable, child.__file__, str(program)]
        self._name = program.stem
        self._limits = limits
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = memoryview(b"")  # to the process
        self._stderr = b""  # the end of the process's stderr while it loaded
        self._is_ready = False  # the process has loaded its program
        self._is_used = False  # the fork has answered a request, which may have left data in its memory
        self._is_closed = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to load the program, so that the first request need not wait for it. Raises SandboxFailed."""
        with self._lock:
            self._running()

    def ask(self, request: object) -> Any:
        """Return the answer to a request, one request at a time. Both are plain data, as in JSON.

        Raises OutOfTime or Died if the request exceeds the limits, SandboxFailed if the process fails.
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
                if not was_used:  # else earlier requests may have used the memory: try it in a new fork
                    break
            if reply[DIED] == signal.SIGKILL:  # not sent by any limit
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
            # Output before a request means that something else, such as the system, ended an earlier request's fork.
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
                start_new_session=True,  # so that an interrupt of the server's terminal does not reach this process
            )
        except OSError as error:
            self._process = None
            raise self._failed(f"cannot be started: {error}") from error
        if self._is_closed:  # closed meanwhile, so `close` may not have seen the process
            _kill(process)
        os.set_blocking(_pipes(process)[0], False)
        self._unsent = memoryview(self._setup)
        self._stderr = b""
        self._is_ready = self._is_used = False
        return process

    def _loaded(self) -> subprocess.Popen[bytes]:
        """Return a process that has loaded its program."""
        process = self._running()
        if self._is_ready:
            return process
        try:
            self._exchange(process, LOAD)
        except TimeoutError:  # it continues loading, for the next request
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
        """Return the process's reply to a request."""
        self._unsent = memoryview(request)
        try:
            reply: dict[str, Any] = json.loads(self._exchange(process, self._limits.seconds + GRACE))
        except TimeoutError:
            _end(process)
            raise OutOfTime(self._limits.seconds) from None
        except OSError as error:
            raise self._failed(f"has ended, exit status {_exit_status(process)}") from error
        if self._unsent or reply.get(IS_CUT):  # a part of the request was read: the rest is no new request
            _end(process)
        return reply

    def _exchange(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        """Write the unsent data and read the JSON of a frame.

        Raises OSError, including TimeoutError, and Died if the answer is too long.
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
                        raise BrokenPipeError("it has closed its output")
                    reply += piece
                else:
                    with contextlib.suppress(BrokenPipeError):  # its last output is read nevertheless
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
        """Log an error that the request did not cause, and return it."""
        if self._is_closed:
            return SandboxFailed(f"the process of {self._name} is closed")
        message = f"the process of {self._name} {why}"
        log.error("%s\n%s", message, self._stderr.decode(errors="replace"))
        return SandboxFailed(message)


class Sandbox:
    """Several processes for the same program. Any number of threads may ask; those beyond the processes wait."""

    def __init__(self, count: int, program: Path, limits: Limits, *arguments: Any) -> None:
        """See `Process` and `setup_frame`."""
        setup = setup_frame(limits, *arguments)
        self._processes = tuple(Process(program, limits, setup) for _ in range(count))
        self._free: LifoQueue[Process] = LifoQueue()  # the last used one first, because it has started
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
    """Kill a process and its fork. If the process has already ended, its fork ends when the pipe is closed."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and release its resources."""
    _kill(process)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _exit_status(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of a process that has closed its pipes, which it does just before it ends."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1)
    _end(process)
    return process.returncode


def _pipes(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Return the file descriptors to write to a process and to read from it."""
    if process.stdin is None or process.stdout is None:
        raise SandboxFailed("the process has no pipes")
    return process.stdin.fileno(), process.stdout.fileno()


def _poll(file: int, events: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(file, events)
    return bool(poll.poll(milliseconds))
