"""PatientTimer: a deadline for a peer's data that does not count the time for which this process was stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LOOK_AGAIN = 0.01  # s for which the sockets are read after a timer is due
LONGEST_LOOK = 1.0  # s, however late the timer is


class PatientTimer:
    """Calls a function after some seconds, but not before the sockets were read once more.

    A process may be stopped for any time: by a signal, by its container, by swapping. When it resumes, the event loop
    runs due timers before it reads the sockets, which may already have the peers' data. So the function is called
    LOOK_AGAIN seconds after the timer, or by as much as the timer itself was late, since peers may have been stopped
    together with this process.
    """

    def __init__(self, seconds: float, function: Callable[..., object], *arguments: Any) -> None:
        """Start the timer in the running event loop. `function` is called with the arguments."""
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + seconds
        self._call = (function, *arguments)
        self._handle = self._loop.call_later(seconds, self._look)

    def cancel(self) -> None:
        """Cancel the call."""
        self._handle.cancel()

    def _look(self) -> None:
        late = self._loop.time() - self._due
        self._handle = self._loop.call_later(min(max(LOOK_AGAIN, late), LONGEST_LOOK), *self._call)
