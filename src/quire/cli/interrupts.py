"""Ctrl-C for every command: the first one prints a notice and stops the command, the second one ends the process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = "\nstopping as soon as the current step is done; Ctrl-C again ends it at once\n"


@contextmanager
def said_interrupts() -> Iterator[None]:
    """Print a notice and raise KeyboardInterrupt at the first Ctrl-C, and end the process at the second one.

    If interrupts are ignored, as in a background process of a shell, or handled by other code, nothing changes.
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
    signal.signal(signal.SIGINT, _second)  # also works while the interpreter exits, when exceptions are useless
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, STOPPING.encode())
    raise KeyboardInterrupt


def _second(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)
