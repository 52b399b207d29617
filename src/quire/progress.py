"""Progress bars and notices on standard error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Advances a progress bar."""

    def __call__(self, count: int = 1) -> None:
        """Advance it by that number of steps."""


@contextmanager
def progress_bar(name: str, total: int | None, done: int = 0, unit: str = "") -> Iterator[Advance]:
    """Show a bar of `total` steps and yield a function that advances it, by one or by the number that it is given.

    Nothing is shown if standard error is not a terminal. total: None if unknown. done: steps before this process.
    unit: show the rate, in this unit per second.
    """
    if not sys.stderr.isatty():
        yield lambda count=1: None  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, ProgressColumn, Task, TimeElapsedColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.speed or 0.0:.1f} {unit}/s" if unit else "")

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, Rate(), console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=total, completed=done)
        yield lambda count=1: bar.advance(task, count)


def notice(text: str) -> None:
    """Report a fact that the caller should see: in the log if the process has set one up, else on standard error."""
    log = logging.getLogger("quire")
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info("%s", text)
    else:
        sys.stderr.write(f"{text}\n")
