"""A monitor of a running server in a terminal."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING

from quire.errors import QuireError
from quire.terminal.client import Client, Refused
from quire.terminal.metrics import Change, Scrape
from quire.terminal.top_view import Snapshot, fleet_view, view

if TYPE_CHECKING:
    from rich.console import Console

ENDINGS = (b"q", b"Q", b"\x04")  # keys that end it
BELOW = 2  # lines under a view


class Top:
    """Polls a server."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._last: Scrape | None = None

    def look(self) -> list[str]:
        """Return the current lines, with changes since the last call. Raises QuireError if no server answers."""
        now = Scrape.of(self._client.get("/metrics"))
        snapshot = self._snapshot()
        if snapshot is not None and "replicas" in snapshot:
            return fleet_view(self._client.url, snapshot)
        if not now.values:
            raise QuireError(f"{self._client.url}/metrics has no numbers of a server of models")
        change = Change(self._last or now, now)
        self._last = now
        return view(self._client.url, change, snapshot)

    def _snapshot(self) -> Snapshot | None:
        """Return a snapshot of the inspector; None if the server has no inspector."""
        events = self._client.events("/inspector/events")
        try:
            found = json.loads(next(events, ""))
        except Refused as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return None
            raise
        except ValueError as error:
            if isinstance(error, QuireError):
                raise
            raise QuireError(f"{self._client.url}/inspector/events sends nothing; is the server stopping?") from error
        finally:
            self._client.stop()
            events.close()
        if not isinstance(found, dict):
            raise QuireError(f"{self._client.url}/inspector/events sends an event that is no object")
        return found


def show_once(top: Top, interval: float, show: Callable[[str], None]) -> None:
    """Show one view, with the changes within `interval` seconds."""
    top.look()
    time.sleep(interval)
    for line in top.look():
        show(line)


def show_always(top: Top, interval: float, console: Console) -> None:
    """Show view after view, until q or Ctrl-C. Raises QuireError if the server ends."""
    from rich.live import Live
    from rich.text import Text

    def picture() -> Text:
        lines = top.look()
        room = max(1, console.height - BELOW)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"... and {len(lines) - room + 1} more"]
        return Text("\n".join([*lines, "", f"every {interval:g} s; q ends"]), no_wrap=True, overflow="ellipsis")

    first = picture()  # an error must appear on the terminal, not on the alternate screen, which disappears
    with _keys() as key, Live(first, console=console, screen=True, auto_refresh=False) as live:
        while key(interval) not in ENDINGS:
            live.update(picture(), refresh=True)


@contextmanager
def _keys() -> Iterator[Callable[[float], bytes]]:
    """Yield a function that waits up to a number of seconds for a key and returns it, or empty bytes."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    terminal = sys.stdin.fileno()

    def key(seconds: float) -> bytes:
        return os.read(terminal, 1) if select.select([terminal], [], [], seconds)[0] else b""

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    try:
        yield key
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> bytes:
    time.sleep(seconds)
    return b""
