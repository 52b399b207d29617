"""How the process of a server ends at a signal."""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def end(number: int) -> NoReturn:
    """End this process at once, with the status that a shell shows for that signal: 128 and its number.

    Nothing else is waited for or taken down: the engine's thread may be in a step, which reads memory that the
    interpreter's own end would free.
    """
    os._exit(128 + number)


def obey_as_first_process() -> None:
    """Let SIGTERM end this process if it is the first one of a container, where no signal does so by itself."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _: end(number))
