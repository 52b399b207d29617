"""`quire serve` as a child process that never outlives its parent, even if the parent is killed."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire.errors import ModelError

log = logging.getLogger("quire.fleet")

ANSWER = 4.0  # seconds, timeout of a request to the server
LAST_LINES = 20  # lines of the server's output in the error when it does not start
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
TLS = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password")
SERVES = re.compile(r"^Quire .* at (http://\S+:\d+) \(ready in ")
# The kernel kills the process when the thread that started it ends. If the parent is gone already, nothing starts.
BOUND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, "-m", "quire", "serve", "--config", sys.argv[2]])
"""


class ServerProcess:
    """A running `quire serve`. Its output goes to this process's standard error."""

    def __init__(self, options: Mapping[str, Any], num_threads: int, on_end: Callable[[int], object]) -> None:
        """Start the server, and return when it listens.

        options: options of `quire serve`, by name. They are passed in a file that only this user can read and that is
        deleted when the server listens, so that no list of processes shows a secret. num_threads: compute threads, the
        number of cores that it was given. on_end: called from a separate thread, with the exit status, when the server
        ends without `stop`. Raises ModelError, with the server's last lines, if it ends before it listens.
        """
        self.url = ""
        self._options = dict(options)
        self._num_threads = num_threads
        self._on_end = on_end
        self._process: subprocess.Popen[str] | None = None
        self._is_stopped = False
        self._lines: list[str] = []
        self._is_up_or_over = threading.Event()
        threading.Thread(target=self._watch, name="quire-server", daemon=True).start()
        self._is_up_or_over.wait()
        if not self.url:
            said = "\n".join(self._lines[-LAST_LINES:])
            raise ModelError(f"quire serve ended before it listened; its last lines were:\n{said}")

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> bytes:
        """Return the server's answer. Raises OSError for a timeout and for a status other than 200."""
        return self._ask(urllib.request.Request(self.url + path, headers=dict(headers or {})), ANSWER)

    def post(self, path: str, headers: Mapping[str, str], timeout: float) -> bytes:
        """Post an empty JSON object and return the answer. Raises OSError like `get`. timeout: seconds."""
        headers = {"Content-Type": "application/json", **headers}
        return self._ask(urllib.request.Request(self.url + path, b"{}", headers), timeout)

    def stop(self, timeout: float) -> None:
        """Terminate the server; kill it if it is still running after `timeout` seconds."""
        self._is_stopped = True
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            log.warning("quire serve did not end within %g s; it is killed", timeout)
            process.kill()
            process.wait()

    def _ask(self, request: urllib.request.Request, timeout: float) -> bytes:
        with OPENER.open(request, timeout=timeout) as answer:
            return bytes(answer.read())

    def _watch(self) -> None:
        """Start the process and read its output until it ends. It is killed if this thread ends first."""
        try:
            with tempfile.TemporaryDirectory(prefix="quire-") as folder:
                process = self._process = self._start(Path(folder))
                for line in process.stderr or ():
                    sys.stderr.write(line)
                    self._lines.append(line.rstrip())
                    if (match := SERVES.match(line)) is not None:
                        self.url = match[1]
                        break
            self._is_up_or_over.set()
            for line in process.stderr or ():
                sys.stderr.write(line)
            status = process.wait()
        finally:
            self._is_up_or_over.set()
        if self.url and not self._is_stopped:
            self._on_end(status)

    def _start(self, folder: Path) -> subprocess.Popen[str]:
        """Start the process. folder: directory for the file of its options, needed until it listens."""
        config = folder / "serve.yaml"  # JSON is YAML
        config.touch(mode=0o600)
        config.write_text(json.dumps(self._options), encoding="utf-8")
        return subprocess.Popen(
            [
                "env",
                # Variables of this process that would take precedence, and those of a certificate: replicas speak HTTP.
                *(f"-uQUIRE_{name.replace('-', '_').upper()}" for name in (*self._options, *TLS)),
                f"OMP_NUM_THREADS={self._num_threads}",
                *(sys.executable, "-c", BOUND, str(os.getpid()), str(config)),
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
