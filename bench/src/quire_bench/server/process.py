"""`quire serve`, or `quire fleet`, in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.errors import QuireError

# Of the listening line, once it is written to its end; lines of a gateway's log name its replicas.
ADDRESS = re.compile(rb"(?<!replica )http://127\.0\.0\.1:\d+(?=\D)")
START_SECONDS, STOP_SECONDS, POLL_SECONDS = 120.0, 30.0, 0.05


@dataclass
class Process:
    """A running server."""

    url: str
    pid: int
    log: Path = Path(os.devnull)  # where its standard error goes while it runs
    # Once it has ended:
    status: int | None = None
    said: str = ""  # on standard error


def server(
    *options: str, port: str = "0", environment: Mapping[str, str] | None = None
) -> AbstractContextManager[Process]:
    """`quire serve` as `running` has it, on a free port by default.

    Tokens are chosen as a request says, whatever the checkpoint's generation_config.json does.
    """
    return running("serve", "--port", port, "--generation-config", "none", *options, environment=environment)


@contextmanager
def running(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Process]:
    """`quire` with these arguments in a process of its own, once it is ready. It is stopped at the end.

    environment: variables that it has besides those of this process.
    Raises QuireError with what it said last where it does not get ready.
    """
    command, variables = [sys.executable, "-m", "quire", *arguments], os.environ | dict(environment or {})
    with TemporaryDirectory() as directory, (said := Path(directory, "stderr")).open("wb") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=variables
        )
        found = Process("", process.pid, said)
        try:
            found.url = ready(process, said)
            yield found
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                found.status = process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                found.status = process.wait()
            found.said = said.read_text(errors="replace")


def ready(process: subprocess.Popen[bytes], said: Path) -> str:
    """The URL at which that server answers, once it does; `said` has its standard error. Raises QuireError."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        found = ADDRESS.search(said.read_bytes())
        if found is not None and _healthy(url := found[0].decode()):
            return url
        time.sleep(POLL_SECONDS)
    raise QuireError(f"the server did not get ready: {last_line(said.read_text(errors='replace'))}")


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
