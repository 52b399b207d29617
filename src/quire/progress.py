"""Progress bars and notices on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(name: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps and yield a function that advances it by one.

    Nothing is shown if standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total)
        yield lambda: bar.advance(task)


def notice(text: str) -> None:
    """Report a fact that the caller should see: in the log if the process has set one up, else on standard error."""
    log = logging.getLogger("quire")
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")
