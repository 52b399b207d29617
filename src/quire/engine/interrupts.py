"""Interrupts that come while the books are being changed wait until these are right again.

A signal handler written in Python runs between any two bytecodes of the main thread. What it raises, as Ctrl-C does,
would leave blocks that belong to no request, or requests that stand in no list.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what signal wraps; looking at all signals there takes 40 µs, here 2
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, ClassVar

# Those that a fault of the machine code raises cannot wait, and are faulthandler's.
FAULTS = {getattr(signal, name, None) for name in ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL")}
DEFAULT = _signal.SIG_DFL
SIGNALS = tuple(sorted(int(number) for number in signal.valid_signals() if number not in FAULTS))


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Let the handlers of signals that are written in Python wait until the end of the block.

    They run then, in the order in which their signals first came, each once as with signals that are pending; what one
    raises is raised there. Inside another such block this one changes nothing, nor does it on a thread other than the
    main one, where these handlers never run. It takes some 7 µs.
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
    """Stands in for all handlers, notes what they would have been called with, and calls them at the end."""

    current: ClassVar[_Deferral | None] = None  # the one whose block the main thread is in

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._taken: list[int] = []  # signals whose handler is to be put back
        self._caught: dict[int, FrameType | None] = {}  # in the order in which they came

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal. Before and after the block it is passed on: others may have saved this as a handler."""
        if _Deferral.current is self:
            self._caught.setdefault(number, frame)
        else:
            self._handlers[number](number, frame)

    def begin(self) -> None:
        """Take the place of the handlers. What one of them raises meanwhile ends this; then only `end` is to follow."""
        for number in SIGNALS:
            handler = _signal.getsignal(number)
            if handler is not DEFAULT and callable(handler):
                self._handlers[number] = handler  # first, so that it is never lost
                self._taken.append(number)
                _signal.signal(number, self)
        _Deferral.current = self

    def end(self) -> None:
        """Put the handlers back, and call those whose signals came."""
        try:
            # From here on a signal is passed on, or taken by a handler that is back in its place.
            _Deferral.current = None
            while self._taken:
                number = self._taken[-1]
                if _signal.getsignal(number) is self:  # else it was changed inside the block, and stays so
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
                self._deliver()  # what one raises keeps no other from being called
