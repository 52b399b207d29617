"""Drawing figures into a file, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.simulate.plot import check_plot


def check_path(path: Path | None) -> None:
    """Raise ConfigError if nothing can be drawn there: to be asked before what is drawn is measured. None: no plot."""
    if path is not None:
        check_plot(path)


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


def plot_runs(path: Path, unit: str, runs: Mapping[str, Sequence[float]]) -> None:
    """Each run a dot, in a row for each name. Raises ConfigError where that cannot be drawn."""
    with drawn(path, 1, 1, (8, 1 + 0.5 * len(runs))) as (_, [[panel]]):
        for at, values in enumerate(runs.values()):
            panel.plot(values, [at] * len(values), "o", alpha=0.5)
        panel.set_yticks(range(len(runs)), list(runs))
        panel.set_ylim(len(runs) - 0.5, -0.5)
        panel.set_xlim(left=0)
        panel.set_xlabel(unit)
