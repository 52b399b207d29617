"""`quire serve` in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.errors import QuireError

ADDRESS = re.compile(rb"http://127\.0\.0\.1:\d+(?=\D)")  # of the listening line, once it is written to its end
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 120.0, 30.0, 0.05


@dataclass
class Process:
    """A running `quire serve`."""

    url: str
    pid: int
    # Once it has ended:
    status: int | None = None
    said: str = ""  # on standard error


@contextmanager
def server(*options: str) -> Iterator[Process]:
    """`quire serve` in a process of its own, on a free port, once it is ready. It is stopped at the end.

    Raises QuireError with what it said last where it does not get ready.
    """
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *options]
    with TemporaryDirectory() as directory, (said := Path(directory, "stderr")).open("wb") as stderr:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)
        running = Process("", process.pid)
        try:
            running.url = ready(process, said)
            yield running
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                running.status = process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                running.status = process.wait()
            running.said = said.read_text(errors="replace")


def ready(process: subprocess.Popen[bytes], said: Path) -> str:
    """The URL at which that `quire serve` answers, once it does; `said` has its standard error. Raises QuireError."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = ADDRESS.search(said.read_bytes())
        if found is not None and _healthy(url := found[0].decode()):
            return url
        time.sleep(POLL_SECONDS)
    raise QuireError(f"quire serve did not get ready: {last_line(said.read_text(errors='replace'))}")


def _healthy(url: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def last_line(text: str) -> str:
    """The last line that a process wrote."""
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("error: ") if lines else "it said nothing"
