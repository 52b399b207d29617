"""How `quire serve` ends when a signal comes while the engine is in a step that does not end."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.forks import Process, Spawner
from tests.server.interrupts import obey

pytestmark = pytest.mark.slow

# `quire serve` whose first step says so and then stays in the native attention kernel for good.
ENDLESS = """
import sys
import torch
from quire import ops
from quire.cli import main
from quire.engine.runner import Runner
from quire.server.api import local_engine_client

S, H, D, B = 64, 8, 64, 16
shape = dict(num_heads=H, num_kv_heads=H, head_dim=D, block_size=B, num_blocks=S * 8, dtype=torch.float32)

def run(self, batch):
    backend = ops.load("cpu", "cpu")
    kv = ops.PagedKV(torch.zeros(S * 8, H, B, D), torch.zeros(S * 8, H, B, D))
    tables = torch.arange(S * 8, dtype=torch.int32).view(S, 8)
    lengths = torch.full((S,), 8 * B, dtype=torch.int32)
    plan = backend.plan(ops.AttentionSpec(**shape), torch.arange(S + 1, dtype=torch.int32), lengths, tables)
    q = torch.zeros(S, H, D)
    print("in a step", file=sys.stderr, flush=True)
    while True:
        backend.attention(q, kv, plan)

Runner.run = run
local_engine_client.STUCK_AFTER = 0.3  # seconds that the end waits for the step
main()
"""


# SIGTERM means nothing, as to the first process of a container.
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SERVE = ("serve", "--port", "0", "--num-blocks", "64")


@contextmanager
def in_a_step(process: Process) -> Iterator[Process]:
    """A server, while it computes its first step."""
    try:
        found = process.said(r"http://([\d.]+):(\d+) ")
        client = http.client.HTTPConnection(found[1], int(found[2]), timeout=60)
        client.request("POST", "/v1/completions", b'{"prompt": [5, 6]}', {"Content-Type": "application/json"})
        process.said("in a step")
        yield process
        client.close()
    finally:
        process.kill()


def test_an_interrupt_ends_it_with_130(forks: Spawner) -> None:
    with in_a_step(forks.start(*SERVE, "--shutdown-timeout", "0", program=ENDLESS)) as process:
        process.send(signal.SIGINT)
        assert process.wait() == 130


def test_a_second_interrupt_ends_it_at_once(forks: Spawner) -> None:
    with in_a_step(forks.start(*SERVE, "--shutdown-timeout", "3600", program=ENDLESS)) as process:
        process.send(signal.SIGINT)
        time.sleep(0.5)
        assert process.is_alive  # it drains
        process.send(signal.SIGINT)
        assert process.wait() == 130


def test_sigterm_ends_it_with_the_signal(forks: Spawner) -> None:
    with in_a_step(forks.start(*SERVE, "--shutdown-timeout", "0.5", program=ENDLESS)) as process:
        process.send(signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM


def test_where_sigterm_alone_ends_nothing_it_ends_with_143(forks: Spawner) -> None:
    with in_a_step(forks.start(*SERVE, "--shutdown-timeout", "0", program=DEAF + ENDLESS)) as process:
        process.send(signal.SIGTERM)
        assert process.wait() == 143


NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def _namespaces() -> None:
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("no process of its own namespace can be started here")


def first_process(unshare: int) -> int:
    """The process that unshare has started."""
    return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])


@pytest.mark.long  # which starts from nothing; above, SIGTERM means as little
@pytest.mark.usefixtures("_namespaces")
def test_the_first_process_of_a_container_ends_with_143_at_sigterm(tmp_path: Path) -> None:
    command = [*NAMESPACE, sys.executable, "-c", ENDLESS, *SERVE, "--shutdown-timeout", "0"]
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        started = subprocess.Popen(command, stderr=stderr, preexec_fn=obey)
    with in_a_step(Process(started.pid, log)):
        os.kill(first_process(started.pid), signal.SIGTERM)
        assert started.wait(60) == 143


@pytest.mark.long
@pytest.mark.usefixtures("_namespaces")
def test_sigterm_ends_the_first_process_of_a_container_while_it_loads() -> None:
    """Where the system would do nothing."""
    script = """
import signal
from quire import llm
from quire.cli import main

def load(self, **options):
    print("loading", flush=True)
    while True:
        signal.pause()

llm.LLM.__init__ = load
main()
"""
    command = [*NAMESPACE, sys.executable, "-c", script, "serve", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=obey)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        os.kill(first_process(process.pid), signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.communicate()
