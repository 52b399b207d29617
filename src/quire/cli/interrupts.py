"""Ctrl-C, for every command: the first one says what happens now, the second one ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = "\nstopping as soon as the present step is done; Ctrl-C again ends it at once\n"


@contextmanager
def said_interrupts() -> Iterator[None]:
    """Within it the first interrupt is said on standard error and raised, and the second one ends the process.

    Where interrupts are ignored, as for what a shell starts in the background, or other code handles them, nothing
    changes.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _first:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _first(_: int, __: FrameType | None) -> None:
    signal.signal(signal.SIGINT, _second)  # also while the interpreter ends, when nothing may be raised any more
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, STOPPING.encode())
    raise KeyboardInterrupt


def _second(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)
