"""quire bench startup: seconds to the first token, and the memory that loading takes."""

from __future__ import annotations

import json
import statistics
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import AsJson, fail
from quire.errors import QuireError
from quire.progress import progress_bar
from quire_bench.cli.options import Model, Save


def startup(
    model: Model = None,
    runs: Annotated[int, typer.Option(min=1, help="Fresh processes; their median is reported.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Draw the runs into this file.")] = None,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Seconds from the start of a process to the first token, with a warm page cache, and the memory of loading."""
    from quire_bench.engine import loading
    from quire_bench.engine.startup import measure, measured
    from quire_bench.plot import check_path, plot_runs
    from quire_bench.tables import save as write

    try:
        check_path(plot)
        with progress_bar("processes", len(measured(model)) * (1 + runs) + 1) as advance:
            figures = measure(model, runs, advance)
            memory = loading.measure(model)
            advance()
        if plot is not None:
            plot_runs(plot, "seconds", figures)
        rows = [{"what": name, "median_seconds": statistics.median(taken)} for name, taken in figures.items()]
        write(save, "Start-up", [*rows, {"what": "memory of loading"} | ({} if memory is None else memory.as_dict())])
    except QuireError as error:
        fail(error)
    except subprocess.CalledProcessError as error:
        fail(error.stderr.strip().splitlines()[-1])
    for name, seconds in figures.items():
        if as_json:
            print(json.dumps({"what": name, "seconds": seconds, "median_seconds": statistics.median(seconds)}))
        else:
            print(f"{name:36s} {statistics.median(seconds):6.2f} s   ({seconds[0]:.2f} to {seconds[-1]:.2f})")
    if as_json:
        print(json.dumps({"what": "memory of loading", "bytes": None if memory is None else memory.as_dict()}))
    else:
        print(f"{'memory of loading':36s} {loading.told(memory)}")
