"""A sandbox's processes: what they withstand, how they are replaced, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.server.sandbox.process import Died, Limits, OutOfTime, Process, Sandbox
from tests.server import sandbox_programs

PROGRAM = Path(sandbox_programs.__file__)
LIMITS = Limits(seconds=2.0, cpu_seconds=0.2, memory=2**26, stack=2**20, answer=2**20)


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process(PROGRAM, LIMITS, "hello")
    yield made
    made.close()


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not just ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_dead(*pids: int) -> None:
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_are_answered_in_one_fork(process: Process) -> None:
    assert process._process is None
    assert process.ask(["say", "\ud800é"]) == ["hello", "\ud800é"]
    first = process._process
    assert process.ask(["fork", None]) == process.ask(["fork", None]) != first.pid
    assert process.ask(["say", "x" * 500_000]) == ["hello", "x" * 500_000]
    assert process._process is first


@pytest.mark.parametrize(
    ("request_", "error", "seconds"),
    [
        (["loop", None], OutOfTime, 0.2),
        (["sleep", 60], OutOfTime, 2.0),
        (["allocate", 2**28], Died, None),
        (["recurse", 100_000], Died, None),
        (["raise", "x"], Died, None),
        (["signal", signal.SIGSEGV], Died, None),
        (["signal", signal.SIGKILL], Died, None),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_request_that_exceeds_a_limit_ends_its_fork_alone(
    process: Process, request_: list[object], error: type[Exception], seconds: float | None
) -> None:
    fork = process.ask(["fork", None])
    first = process._process
    with pytest.raises(error) as caught:
        process.ask(request_)
    assert getattr(caught.value, "seconds", None) == seconds
    assert process.ask(["say", 1]) == ["hello", 1]
    assert process._process is first
    assert process.ask(["fork", None]) != fork
    until_dead(fork)


def test_an_answer_that_is_too_long_ends_the_process(process: Process) -> None:
    process.ask(["say", 1])
    first = process._process
    with pytest.raises(Died, match="its answer has 20000"):
        process.ask(["long", 2 * 10**7])
    assert first.returncode == -signal.SIGKILL
    assert process.ask(["say", 1]) == ["hello", 1]


def test_a_request_that_is_too_large_to_be_read(process: Process) -> None:
    with pytest.raises(Died):
        process.ask(["say", "x" * 2**27])
    assert process.ask(["say", 1]) == ["hello", 1]


def test_what_is_killed_from_outside_is_replaced(process: Process) -> None:
    fork, first = process.ask(["fork", None]), process._process
    os.kill(fork, signal.SIGKILL)
    until_dead(fork)
    time.sleep(0.1)  # until its parent has said so
    assert process.ask(["say", 1]) == ["hello", 1]
    first = process._process
    first.kill()
    first.wait()
    assert process.ask(["say", 2]) == ["hello", 2]
    assert process._process is not first


def test_a_program_that_cannot_start() -> None:
    process = Process(PROGRAM.with_name("none.py"), LIMITS)
    for _ in range(2):
        with pytest.raises(Died, match="the process has ended"):
            process.ask(["say", 1])
    process.close()


def test_close_ends_the_process_and_its_fork(process: Process) -> None:
    fork, first = process.ask(["fork", None]), process._process
    process.close()
    process.close()
    until_dead(fork, first.pid)
    assert process.ask(["say", 1]) == ["hello", 1]


OWNER = f"""
import os, signal, sys
from pathlib import Path
from quire.server.sandbox.process import Limits, Process
limits = Limits(seconds=1.0, cpu_seconds=1.0, memory=2**26, stack=2**20, answer=99)
process = Process(Path({str(PROGRAM)!r}), limits, "a")
print(process.ask(["fork", None]), process._process.pid, flush=True)
if sys.argv[1] == "busy":
    process.ask(["loop", None])
signal.pause()
"""


@pytest.mark.parametrize("what", ["idle", "busy"])
def test_no_process_survives_its_owner(what: str) -> None:
    """Not even one that is killed, with no time to close anything."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, what], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert all(map(is_alive, pids))
    owner.kill()
    owner.wait()
    until_dead(*pids)


def test_many_threads_share_the_processes() -> None:
    sandbox = Sandbox(2, PROGRAM, LIMITS, "hello")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: sandbox.ask(["say", i] if i % 5 else ["fork", 0]), range(100)))
    assert [each for i, each in enumerate(found) if i % 5] == [["hello", i] for i in range(100) if i % 5]
    assert len(set(found[::5])) <= 2
    sandbox.close()
