"""A sandbox's processes: what they withstand, how they are replaced, and how they end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from quire.sandbox import process as process_module
from quire.sandbox.process import (
    Died,
    Limits,
    OutOfCpuTime,
    OutOfTime,
    Process,
    Sandbox,
    SandboxFailed,
    setup_frame,
)
from tests.sandbox import sandbox_programs

PROGRAM = Path(sandbox_programs.__file__)
LIMITS = Limits(seconds=2.0, cpu_seconds=0.2, memory=2**26, stack=2**20, answer=2**20)


@pytest.fixture
def process() -> Iterator[Process]:
    made = started("hello")
    yield made
    made.close()


def started(*arguments: object) -> Process:
    return Process(PROGRAM, LIMITS, setup_frame(LIMITS, *arguments))


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not just ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_dead(*pids: int) -> None:
    deadline = time.monotonic() + 60
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


def test_a_program_does_not_see_the_servers_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIRE_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "TZ"):
        monkeypatch.setenv(name, f"the {name}")
    process = started("hello")
    seen = process.ask(["environment", None])
    process.close()
    assert {name: value for name, value in seen.items() if value.startswith("the ")} == {"TZ": "the TZ"}
    assert seen.keys() <= {*process_module.ENVIRONMENT, "LC_CTYPE"}  # which Python sets for itself


def test_a_server_that_was_stopped_reads_the_answer_that_came_meanwhile(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.ask(["say", 1]) == ["hello", 1]
    monkeypatch.setattr(process_module, "GRACE", -LIMITS.seconds)  # the time is over when it first looks
    monkeypatch.setattr(process_module, "LAST_LOOK", 60.0)
    assert process.ask(["say", 2]) == ["hello", 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "error", "seconds"),
    [
        (["loop", None], OutOfCpuTime, 0.2),
        (["sleep", 60], OutOfTime, 1.0),
        (["allocate", 2**28], Died, None),
        (["recurse", 100_000], Died, None),
        (["raise", "x"], Died, None),
        (["signal", signal.SIGSEGV], Died, None),
        (["signal", signal.SIGKILL], SandboxFailed, None),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_request_that_exceeds_a_limit_ends_its_fork_alone(
    request_: list[object], error: type[Exception], seconds: float | None
) -> None:
    limits = LIMITS if error is not OutOfTime else replace(LIMITS, seconds=1.0)
    process = Process(PROGRAM, limits, setup_frame(limits, "hello"))
    fork = process.ask(["fork", None])
    first = process._process
    with pytest.raises(error) as caught:
        process.ask(request_)
    assert getattr(caught.value, "seconds", None) == seconds
    assert process.ask(["say", 1]) == ["hello", 1]
    assert process._process is first
    assert process.ask(["fork", None]) != fork
    until_dead(fork)
    process.close()


def test_an_answer_that_is_too_long_ends_the_process(process: Process) -> None:
    process.ask(["say", 1])
    first = process._process
    with pytest.raises(Died, match="its answer has 2000"):
        process.ask(["long", 2 * 10**6])
    assert first.returncode == -signal.SIGKILL
    assert process.ask(["say", 1]) == ["hello", 1]


@pytest.mark.slow
def test_a_request_that_is_too_large_to_be_read(process: Process) -> None:
    with pytest.raises(Died):
        process.ask(["say", "x" * 2**26])
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


@pytest.mark.parametrize("greeting", ["fail", "exit"])
def test_a_program_that_cannot_start(greeting: str, caplog: pytest.LogCaptureFixture) -> None:
    """No request is to blame, and the log says what the process wrote."""
    process = started(greeting)
    for _ in range(2):
        with pytest.raises(SandboxFailed, match="cannot start, exit status 1"):
            process.ask(["say", 1])
    assert ["it does not load\n" in record.message for record in caplog.records] == [True, True]
    process.close()


def test_a_program_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    process = Process(PROGRAM.with_name("none.py"), LIMITS, setup_frame(LIMITS))
    process.start()
    with pytest.raises(SandboxFailed, match="the process of none cannot start"):
        process.ask(["say", 1])
    assert "FileNotFoundError" in caplog.text
    process.close()


def test_a_process_that_the_system_does_not_start(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(process_module.subprocess, "Popen", fail)
        with pytest.raises(SandboxFailed, match=r"cannot be started: .*Too many open files"):
            process.ask(["say", 1])
        with pytest.raises(SandboxFailed, match="cannot be started"):
            process.start()
    assert process.ask(["say", 1]) == ["hello", 1]


def test_a_program_that_writes_much_while_it_loads() -> None:
    process = started("chatter")
    assert process.ask(["say", 1]) == ["chatter", 1]
    process.close()


@pytest.mark.slow
def test_a_program_that_loads_for_long_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request finds the process further on, not started again."""
    monkeypatch.setattr(process_module, "LOAD", 0.2)
    process = started("slow")
    with pytest.raises(SandboxFailed, match=r"has not loaded within 0\.2 s"):
        process.ask(["say", 1])
    first = process._process
    monkeypatch.setattr(process_module, "LOAD", 60.0)
    assert process.ask(["say", 1]) == ["slow", 1]
    assert process._process is first
    process.close()


@pytest.mark.slow
def test_loading_takes_nothing_from_the_time_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose process does not end it is given up soon after its own time."""
    monkeypatch.setattr(process_module, "GRACE", 0.5)
    limits = replace(LIMITS, seconds=1.0)
    process = Process(PROGRAM, limits, setup_frame(replace(LIMITS, seconds=60.0), "slow"))  # the process waits longer
    assert process.ask(["say", 1]) == ["slow", 1]
    begin = time.monotonic()
    with pytest.raises(OutOfTime, match="longer than 1 s"):
        process.ask(["sleep", 60])
    assert time.monotonic() - begin < 30
    process.close()


def test_what_earlier_requests_left_does_not_count(process: Process) -> None:
    """A program that keeps some memory of each request."""
    first = None
    for _ in range(6):
        assert process.ask(["keep", 2**24]) == 2**24  # of four times that
        first = first or process._process
    assert process._process is first
    with pytest.raises(Died):
        process.ask(["keep", 2**27])


def test_close_ends_the_process_and_its_fork(process: Process) -> None:
    fork, first = process.ask(["fork", None]), process._process
    process.close()
    process.close()
    until_dead(fork, first.pid)
    for use in (process.start, lambda: process.ask(["say", 1])):
        with pytest.raises(SandboxFailed, match="is closed"):
            use()


@pytest.mark.parametrize("greeting", ["hello", "slow"])
def test_close_does_not_wait_for_requests(greeting: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither for one that runs, or whose process loads, nor for one that waits for it."""
    limits = replace(LIMITS, seconds=60.0)
    sandbox = Sandbox(1, PROGRAM, limits, greeting)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(sandbox.ask, ["sleep", 60]) for _ in range(2)]
        [its] = sandbox._processes
        deadline = time.monotonic() + 20
        while its._process is None or (greeting == "hello" and not its._is_ready):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        begin = time.monotonic()
        sandbox.close()
        for each in asked:
            with pytest.raises(SandboxFailed, match="is closed"):
                each.result(30)
        assert time.monotonic() - begin < 30
    assert its._process is None
    assert not caplog.records


OWNER = f"""
import os, signal, sys
from pathlib import Path
from quire.sandbox.process import Limits, Process, setup_frame
limits = Limits(seconds=1.0, cpu_seconds=1.0, memory=2**26, stack=2**20, answer=99)
process = Process(Path({str(PROGRAM)!r}), limits, setup_frame(limits, "a"))
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


def test_the_setup_is_held_once() -> None:
    sandbox = Sandbox(3, PROGRAM, LIMITS, "x" * 100)
    assert len({id(process._setup) for process in sandbox._processes}) == 1
