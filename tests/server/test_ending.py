"""How `quire serve` ends when a signal comes while the engine is in a step that does not end."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.interrupts import obey

pytestmark = pytest.mark.slow

# `quire serve` whose first step says so and then stays in the native attention kernel for good.
ENDLESS = """
import sys
import torch
from quire import ops
from quire.cli import main
from quire.engine.runner import Runner
from quire.server.api import worker

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
worker.STUCK_AFTER = 0.3  # seconds that the end waits for the step
main()
"""


def deaf() -> None:
    """For a process that is about to begin: SIGTERM means nothing, as to the first process of a container."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@contextmanager
def in_a_step(
    *options: str, prefix: tuple[str, ...] = (), prepare: Callable[[], None] = obey
) -> Iterator[subprocess.Popen[str]]:
    """A server that computes its first step."""
    command = [*prefix, sys.executable, "-c", ENDLESS, "serve", "--port", "0", "--num-blocks", "64", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=prepare)
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if "limits" in line:
                break
        found = re.search(r"http://([\d.]+):(\d+)", said)
        assert found, said
        client = http.client.HTTPConnection(found[1], int(found[2]), timeout=60)
        client.request("POST", "/v1/completions", b'{"prompt": [5, 6]}', {"Content-Type": "application/json"})
        for line in process.stderr:
            said += line
            if "in a step" in line:
                break
        assert "in a step" in said, said
        yield process
        client.close()
    finally:
        process.kill()
        process.communicate()


def test_an_interrupt_ends_it_with_130() -> None:
    with in_a_step("--shutdown-timeout", "0") as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_a_second_interrupt_ends_it_at_once() -> None:
    with in_a_step("--shutdown-timeout", "3600") as process:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)  # it drains
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130


def test_sigterm_ends_it_with_the_signal() -> None:
    with in_a_step("--shutdown-timeout", "0.5") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_where_sigterm_alone_ends_nothing_it_ends_with_143() -> None:
    with in_a_step("--shutdown-timeout", "0", prepare=deaf) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture
def _namespaces() -> None:
    if shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("no process of its own namespace can be started here")


def first_process(unshare: int) -> int:
    """The process that unshare has started."""
    return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split()[0])


@pytest.mark.usefixtures("_namespaces")
def test_the_first_process_of_a_container_ends_with_143_at_sigterm() -> None:
    with in_a_step("--shutdown-timeout", "0", prefix=NAMESPACE) as process:
        os.kill(first_process(process.pid), signal.SIGTERM)
        assert process.wait(60) == 143


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
