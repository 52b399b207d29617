"""Memory that loading a model takes: in its fullest moment, and for good."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from quire import ops
from quire.config import engine_config
from quire.models import load_model, locate
from quire.models.weights import Checkpoint
from quire_bench.proc import sizes

PROGRAM = "import sys; from quire_bench.engine.loading import report; report(sys.argv[1], sys.argv[2])"
STATUS = Path("/proc/self/status")  # where Linux tells how much memory a process has
INTERVAL = 0.001  # seconds from one look to the next


@dataclass(frozen=True)
class Loading:
    """Bytes that one load gave to a fresh process, beyond those of the interpreter and its libraries."""

    weights: int  # of the checkpoint's tensors, each counted once, in the model's dtype
    peak: int  # anonymous memory in the fullest moment
    resident: int  # anonymous memory that stays
    mapped: int  # pages of files in the fullest moment: the checkpoint's, which the system can take back

    @property
    def ratio(self) -> float:
        """The fullest moment over what stays."""
        return self.peak / self.resident

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"ratio": self.ratio}


def measure(model: str | None, **options: Any) -> Loading | None:
    """One load on the CPU in a fresh process, as the checkpoint says; None where no /proc tells of memory.

    options: of the engine's configuration. Raises CalledProcessError where the model does not load.
    """
    if not STATUS.exists():
        return None
    command = [sys.executable, "-c", PROGRAM, model or "", json.dumps(options)]
    return Loading(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def told(found: Loading | None) -> str:
    """A line for people."""
    if found is None:
        return "this system does not tell"
    weights, peak, resident, mapped = (f"{amount / 2**20:,.1f} MiB" for amount in astuple(found))
    return (
        f"{peak} at most, {found.ratio:.2f} times the {resident} that stay; of them weights {weights}; "
        f"{mapped} of files are read"
    )


def report(model: str, options: str) -> None:
    """Load the model into this process, which has loaded none yet, and print what that took. options: JSON."""
    directory, config = locate(model or None), engine_config(**json.loads(options))
    backend = ops.load(config.attention_backend, config.device)
    before = anonymous, files = _memory()
    highest, done = list(before), Event()

    def watch() -> None:
        while not done.wait(INTERVAL):
            highest[:] = map(max, highest, _memory())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        loaded = load_model(directory, config, backend)
    finally:
        done.set()
        watcher.join()
    gc.collect()
    resident = _memory()[0]
    checkpoint = Checkpoint(directory)
    found = Loading(
        weights=sum(checkpoint[name].numel() for name in checkpoint.names) * loaded.dtype.itemsize,
        peak=max(highest[0], resident) - anonymous,
        resident=resident - anonymous,
        mapped=highest[1] - files,
    )
    sys.stdout.write(json.dumps(asdict(found)))


def _memory() -> tuple[int, int]:
    """Bytes of this process in memory: anonymous ones, and pages of files."""
    found = sizes(STATUS)
    return found["RssAnon"], found["RssFile"]
