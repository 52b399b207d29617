"""The server that a replica starts: where it listens, how it gets its options, and that it never stays alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

import pytest

from quire.errors import ModelError
from quire.fleet import process as process_module
from quire.fleet.process import ServerProcess

pytestmark = pytest.mark.slow

OPTIONS = {"port": 0, "num_blocks": 64, "api-key": ["hidden-from-ps"], "shutdown_timeout": 1.0}


def alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be asked for its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pid)


@pytest.fixture
def ended() -> list[int]:
    return []


@pytest.fixture
def server(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    for name in ("PORT", "API_KEY"):  # of the process that starts it
        monkeypatch.setenv(f"QUIRE_{name}", "1")
    found = ServerProcess(OPTIONS, 2, ended.append)
    yield found
    found.stop(20)


def pid_of(server: ServerProcess) -> int:
    assert server._process is not None
    return server._process.pid


def test_it_serves_where_it_says_with_its_options(server: ServerProcess, ended: list[int]) -> None:
    assert server.get("/health") == b""
    with pytest.raises(HTTPError, match="401"):
        server.get("/v1/models")
    headers = {"Authorization": "Bearer hidden-from-ps"}
    assert json.loads(server.get("/v1/models", headers))["data"][0]["id"] == "quire-embedded"
    tokens = json.loads(server.get("/tokenizer_info", headers))
    assert tokens
    with pytest.raises(HTTPError, match="404"):
        server.post("/fleet/none", headers, 5.0)
    process = Path("/proc") / str(pid_of(server))
    assert b"hidden-from-ps" not in (process / "cmdline").read_bytes()
    assert b"OMP_NUM_THREADS=2" in (process / "environ").read_bytes().split(b"\0")  # as many as it has cores
    config = Path(process.joinpath("cmdline").read_bytes().split(b"\0")[-2].decode())
    assert not config.parent.exists()  # it was read, and nothing is left of it
    server.stop(20)
    assert gone(pid_of(server))
    assert ended == []  # it was stopped on purpose


# What stands for `quire` where only the process counts. It listens, says so, and stays.
IDLE = """
import signal, socket, sys
listening = socket.create_server(("127.0.0.1", 0))
port = listening.getsockname()[1]
print(f"Quire serves nothing at http://127.0.0.1:{port} (ready in 0 s)", file=sys.stderr, flush=True)
signal.pause()
"""


COMMAND = '"-m", "quire", "serve", "--config", sys.argv[2]'
BOUND_IDLE = process_module.BOUND.replace(COMMAND, f'"-c", {IDLE!r}')


def test_its_end_is_reported(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMMAND in process_module.BOUND
    monkeypatch.setattr(process_module, "BOUND", BOUND_IDLE)
    server, heard = ServerProcess(OPTIONS, 2, ended.append), threading.Event()
    socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))).close()
    server._on_end = lambda status: (ended.append(status), heard.set())
    os.kill(pid_of(server), signal.SIGKILL)
    assert heard.wait(30)
    assert ended == [-signal.SIGKILL]
    with pytest.raises(OSError):
        server.get("/health")


@pytest.mark.long
def test_one_that_hangs_is_killed(server: ServerProcess) -> None:
    os.kill(pid_of(server), signal.SIGSTOP)
    server.stop(0.5)
    assert not alive(pid_of(server))


def test_why_it_does_not_start_is_said(ended: list[int]) -> None:
    with pytest.raises(ModelError, match=r"(?s)ended before it listened; its last lines were:.*did you mean"):
        ServerProcess({"max-num-seq": 3}, 1, ended.append)
    assert ended == []


def test_it_ends_with_the_process_that_started_it() -> None:
    """However that ends."""
    program = f"""
import time
from quire.fleet import process
process.BOUND = {BOUND_IDLE!r}
server = process.ServerProcess({OPTIONS!r}, 1, print)
print(server._process.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    assert gone(pid)
