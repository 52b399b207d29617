"""Drawing figures into a file, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.errors import ConfigError


def check_path(path: Path) -> None:
    """Raise ConfigError if nothing can be drawn there: to be asked before what is drawn is measured."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from error
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"--plot is {path}; its ending must be one of {', '.join(known)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot is {path}; there is no directory {path.parent}")


@contextmanager
def drawn(path: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """A figure of that size in inches and its axes, [rows, columns], to be filled; then it is written to the file.

    Raises ConfigError where that cannot be.
    """
    check_path(path)
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    try:
        yield figure, axes
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
