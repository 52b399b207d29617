"""The program of a sandbox's process: it answers requests, one at a time, and survives requests that crash.

It is started as `child.py PROGRAM`. PROGRAM is a file with a function `prepare`, which takes the sandbox's arguments
and returns the function that answers a request. Requests are answered in a fork of this process, within limits. If the
fork dies, another one takes its place, and nothing has to be loaded again.

This file is run by its path and imports nothing from quire, and nothing that is slow to import.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this directory: its modules are not top-level ones

import contextlib
import importlib.util
import json
import os
import resource
import select
import signal
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADER = struct.Struct(">Q")  # of a frame: the length of the JSON that follows
# Keys of a frame to the server: the program is loaded; an answer; the signal that ended the fork; whether the fork had
# read a part of its request.
READY, ANSWER, DIED, IS_CUT = "ready", "answer", "died", "is_cut"
STDIN, STDOUT, STDERR = 0, 1, 2


def frame(value: object) -> bytes:
    """Return a message in the format of the pipe."""
    text = json.dumps(value).encode("ascii")
    return HEADER.pack(len(text)) + text


def serve(program: Path) -> None:
    """Answer requests until there are no more."""
    prepare = _load(program).prepare
    setup = json.loads(_read_frame() or b"null")
    if setup is None:
        return
    answer = prepare(*setup["arguments"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)  # the server reads it only to report why a program does not load
    _write(frame({READY: True}))
    while True:
        _is_readable(None)
        fork = os.fork()
        if fork == 0:
            _answer_in_thread(answer, **setup["limits"])
        _, status = os.waitpid(fork, 0)
        if status == 0:
            return
        is_cut = _is_readable(0)  # the fork has read a part of its request: no other fork can read the rest
        _write(frame({DIED: os.WTERMSIG(status), IS_CUT: is_cut}))
        if is_cut:
            return


def _load(program: Path) -> Any:
    spec = importlib.util.spec_from_file_location(program.stem, program)
    if spec is None or spec.loader is None:
        raise ImportError(f"{program} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------ in the fork


def _answer_in_thread(answer: Callable[[Any], Any], stack: int, **limits: Any) -> None:
    """Answer requests on a thread with a stack of `stack` bytes, and end the fork."""
    ended = []

    def run() -> None:
        _answer(answer, **limits)
        ended.append(True)

    threading.stack_size(stack)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    os._exit(0 if ended else 1)


def _answer(answer: Callable[[Any], Any], seconds: float, cpu_seconds: float, memory: int) -> None:
    _limit_memory(memory)
    try:
        while (request := _read_frame()) is not None:
            signal.setitimer(signal.ITIMER_REAL, seconds)  # their signals end the fork, whatever it is doing
            signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
            reply = frame({ANSWER: answer(json.loads(request))})
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _write(reply)
    except MemoryError:
        os._exit(1)


def _limit_memory(memory: int) -> None:
    """Limit this process to that many bytes of address space in addition to its current ones."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not supported by every system
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# ------------------------------------------------------------------------------------------------------ pipes


def _is_readable(milliseconds: int | None) -> bool:
    """Wait until there is something to read, or the end of input. Return whether there is."""
    poll = select.poll()
    poll.register(STDIN, select.POLLIN)
    return bool(poll.poll(milliseconds))


def _read_frame() -> bytes | None:
    """Return the JSON of the next frame; None at the end of input."""
    header = _read(HEADER.size)
    return None if len(header) < HEADER.size else _read(*HEADER.unpack(header))


def _read(size: int) -> bytes:
    found = bytearray()
    while len(found) < size and (piece := os.read(STDIN, min(size - len(found), 2**20))):
        found += piece
    return bytes(found)


def _write(data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(STDOUT, left) :]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
