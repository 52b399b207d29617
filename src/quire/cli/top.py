"""quire top: a running server in the terminal."""

from __future__ import annotations

import signal
from typing import Annotated

import typer

from quire.cli.options import ApiKey, ServerUrl


def top(
    url: ServerUrl,
    api_key: ApiKey = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds from one view to the next.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view, and end.")] = False,
) -> None:
    """Monitor a running server: throughput, queue, cache, steps, and the requests that wait. q ends it."""
    from quire.terminal.client import Client
    from quire.terminal.display import console_at
    from quire.terminal.top import Top, show_always, show_once

    console = console_at()
    try:
        looks = Top(Client(url, api_key))
        if once or not console.is_terminal or console.is_dumb_terminal:
            width = console.width if console.is_terminal else None
            show_once(looks, interval, lambda line: print(line[:width]))
            return
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ends like q, without a notice
        show_always(looks, interval, console)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
