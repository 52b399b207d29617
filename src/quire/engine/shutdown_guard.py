"""Keep the interpreter's exit from interrupting a step.

At exit, the interpreter stops daemon threads wherever they next request its lock. If that is inside PyTorch's machine
code, PyTorch takes it for a fatal error and aborts the process (before Python 3.14).
"""

from __future__ import annotations

import atexit
import os
from threading import RLock
from weakref import WeakSet

LONGEST_WAIT = 60.0  # seconds, for a step that may never end


class _Entrance:
    """A gate that each step passes."""

    lock = RLock()


_guards: WeakSet[StepGuard] = WeakSet()


class StepGuard:
    """A lock held during each step of an engine: the exit waits for it, and no daemon thread acquires it afterwards."""

    def __init__(self) -> None:
        self._lock = RLock()  # not a Lock: exit handlers may still compute steps on their thread
        _guards.add(self)

    def __enter__(self) -> None:
        with _Entrance.lock:  # else a thread that computes step after step would starve the exit
            pass
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Wait for the current step, and keep other threads from beginning one."""
        self._lock.acquire(timeout=LONGEST_WAIT)


def _renew() -> None:
    """Replace the locks in a forked child, because the threads that may hold them exist only in the parent."""
    _Entrance.lock = RLock()
    for guard in list(_guards):
        guard._lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@atexit.register
def _close() -> None:
    _Entrance.lock.acquire()
    for guard in list(_guards):
        guard.close()
