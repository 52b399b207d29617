"""The interpreter's exit, which must not come within a step.

It stops daemon threads wherever they next want its lock: in the middle of a step that is machine code of PyTorch, which
takes this for a fatal error and aborts the process (before Python 3.14).
"""

from __future__ import annotations

import atexit
import os
from threading import RLock
from weakref import WeakSet

LONGEST_WAIT = 60.0  # seconds, for a step that may never end


class _Entrance:
    """Each step goes through it."""

    lock = RLock()


_guards: WeakSet[StepGuard] = WeakSet()


class StepGuard:
    """Held during each step of an engine: the exit waits for it, and no daemon thread gets it after that."""

    def __init__(self) -> None:
        self._lock = RLock()  # not a Lock: what runs at the exit, on its thread, may still compute steps
        _guards.add(self)

    def __enter__(self) -> None:
        with _Entrance.lock:  # else a thread that computes one step after the other would leave the exit no turn
            pass
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def close(self) -> None:
        """Wait for the step that is being computed, and let no other thread begin one."""
        self._lock.acquire(timeout=LONGEST_WAIT)


def _renew() -> None:
    """In a forked child: the threads that may have held a lock exist in the parent only."""
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
