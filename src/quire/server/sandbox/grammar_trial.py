"""Grammars are compiled on trial first, in a process that may die of them.

llguidance bounds what a grammar may cost, but not everywhere: rules that refer to one another in a long chain overflow
its stack, which kills the process, and a large multipleOf keeps it busy for hours, which nothing can interrupt. So
another process goes first, with less time, stack and memory than the server has. What it survives the server compiles
too.

This file is that process's program as well, so it imports nothing of quire.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this directory, whose names are not the world's

import contextlib
import json
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

STACK = 2**20  # bytes; threads of the server have at least twice as much
MEMORY = 2**27  # bytes that a grammar may take
MAX_STATES = 100_000  # of a grammar's lexer while it is used; a state takes some 600 bytes


def make_tokenizer(tokenizer_json: str, eos_tokens: list[int]) -> LLTokenizer:
    """Without end tokens it takes one by its name. Raises ValueError for a tokenizer that llguidance cannot use."""
    return LLTokenizer(tokenizer_json, eos_token=eos_tokens or None)


def make_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher that may be in its error state. The first mask, which takes longest, has been computed."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=MAX_STATES))
    matcher.compute_bitmask()
    return matcher


class Trial:
    """A process that goes first. It starts with the first grammar, and again after one that it did not survive."""

    def __init__(self, seconds: float, *tokenizer: Any) -> None:
        """seconds: that a grammar may take; tokenizer: arguments of `make_tokenizer`."""
        self._seconds = seconds
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def run(self, grammar: str) -> str:
        """What is wrong with a grammar, as far as a trial shows; empty if nothing is. One at a time gets in."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._started()
            return self._tried(self._process, grammar)

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._process is not None:
                self._end(self._process)
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # an interrupt of the server's terminal is not for this process
        )
        with contextlib.suppress(OSError):
            self._tell(process, [self._seconds, *self._tokenizer])
        return process

    def _tried(self, process: subprocess.Popen[str], grammar: str) -> str:
        with contextlib.suppress(OSError):  # of a process that has died: its answer is missing, too
            self._tell(process, grammar)
            if answer := process.stdout.readline() if process.stdout else "":
                return str(json.loads(answer))
        self._end(process)
        if process.returncode == -signal.SIGALRM:
            return f"it is not compiled within {self._seconds:g} s"
        return "it takes too much memory, or is too deeply nested, to be compiled"

    @staticmethod
    def _tell(process: subprocess.Popen[str], message: object) -> None:
        if process.stdin is not None:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what could not be written to it
                if pipe is not None:
                    pipe.close()


# --------------------------------------------------------------------------------------------- in that process


def _serve() -> None:
    """Try grammars, a line each, until there are no more."""
    seconds, *arguments = json.loads(sys.stdin.readline())
    tokenizer = make_tokenizer(*arguments)
    _limit_memory()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # kills this process, wherever it is
        matcher = make_matcher(tokenizer, json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.write(json.dumps(matcher.get_error()) + "\n")
        sys.stdout.flush()


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every system can
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    threading.stack_size(STACK)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()
