"""End the process of a server after a signal."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def end(number: int) -> NoReturn:
    """End this process at once, with the exit status of a shell for the signal: 128 plus its number.

    Nothing is waited for or cleaned up: the engine's thread may be in a step, which reads memory that the interpreter
    would free at its regular exit.
    """
    os._exit(128 + number)


def obey_as_first_process() -> None:
    """Make SIGTERM end this process if it is the first of a container, where signals have no default effect."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: end(number))
