"""Defer interrupts until the scheduler's bookkeeping is consistent again.

Python runs a signal handler between any two bytecodes of the main thread. An exception raised there, such as
KeyboardInterrupt on Ctrl-C, could leave blocks that belong to no request, or requests that are in no list.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal takes 40 µs for all, this 2
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, ClassVar

# Signals that a fault of the machine code raises cannot be deferred, and belong to faulthandler.
FAULTS = {getattr(signal, name, None) for name in ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL")}
DEFAULT = _signal.SIG_DFL
SIGNALS = tuple(sorted(int(number) for number in signal.valid_signals() if number not in FAULTS))


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Defer the signal handlers written in Python until the end of the block.

    They then run in the order in which their signals first arrived, each once, as with pending signals. An exception
    that a handler raises is raised there. The block has no effect inside another one, nor on a thread other than the
    main one, where these handlers never run. It takes about 7 µs.
    """
    if _Deferral.current is not None or get_ident() != main_thread().ident:
        yield
        return
    deferral = _Deferral()
    try:
        deferral.begin()
        yield
    finally:
        deferral.end()


class _Deferral:
    """Replaces all handlers, records the arguments of their calls, and calls them at the end."""

    current: ClassVar[_Deferral | None] = None  # the one whose block the main thread is in

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._taken: list[int] = []  # signals whose handler is to be restored
        self._caught: dict[int, FrameType | None] = {}  # in order of arrival

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record a signal. Outside the block, pass it on: other code may have saved this object as a handler."""
        if _Deferral.current is self:
            self._caught.setdefault(number, frame)
        else:
            self._handlers[number](number, frame)

    def begin(self) -> None:
        """Replace the handlers. If one of them raises meanwhile, this ends; then only `end` may be called."""
        for number in SIGNALS:
            handler = _signal.getsignal(number)
            if handler is not DEFAULT and callable(handler):
                self._handlers[number] = handler  # first, so that it is never lost
                self._taken.append(number)
                _signal.signal(number, self)
        _Deferral.current = self

    def end(self) -> None:
        """Restore the handlers, and call those whose signals arrived."""
        try:
            # From here on a signal is passed on, or received by a restored handler.
            _Deferral.current = None
            while self._taken:
                number = self._taken[-1]
                if _signal.getsignal(number) is self:  # else the block changed it, and the change stays
                    _signal.signal(number, self._handlers[number])
                self._taken.pop()
        finally:
            if self._taken:  # one of them has just raised
                self.end()
            else:
                self._deliver()

    def _deliver(self) -> None:
        if self._caught:
            try:
                number = next(iter(self._caught))
                self._handlers[number](number, self._caught.pop(number))
            finally:
                self._deliver()  # an exception in one handler must not keep the others from running
