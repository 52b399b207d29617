"""The interpreter's exit while a thread computes, and that of a child that was forked meanwhile."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# First, a thread computes a step while the main thread forks; there is no such thread in the child, which then exits.
# Then a daemon thread computes steps;
# the main thread ends within the first one, and at its exit computes a step itself.
PROGRAM = """
import atexit, os, sys, threading, time
parent = os.getpid()
atexit.register(lambda: os.getpid() == parent and (spare.step(), os.write(1, b"a step at the exit, ")))
from tests.engine.fakes import fake_engine, request

def watched(engine, before):
    compute = engine.runner.run

    def run(batch):
        before()
        return compute(batch)

    engine.runner.run = run
    return engine

begun, gate = threading.Event(), threading.Event()
engine = watched(fake_engine(), lambda: (begun.set(), gate.wait()))
engine.add(request("r", [1, 2, 3], max_tokens=1))
thread = threading.Thread(target=engine.step)
thread.start()
begun.wait()
child = os.fork()
if not child:
    sys.exit()
_, status = os.waitpid(child, 0)
os.write(1, b"the child has ended with %d, " % status)
gate.set()
thread.join()

def slowly():
    os.write(1, b"begun, ")
    begun.set()
    time.sleep(1)
    os.write(1, b"ended, ")

begun.clear()
engine, spare = watched(fake_engine(), slowly), fake_engine()
spare.add(request("spare", [1], max_tokens=1))
engine.add(request("r", [1, 2, 3], max_tokens=5))

def serve():
    while engine.has_work:
        engine.step()

threading.Thread(target=serve, daemon=True).start()
begun.wait()
"""


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False, cwd=root
    )


def test_a_child_that_was_forked_waits_for_no_step_of_its_parent(done: subprocess.CompletedProcess[str]) -> None:
    assert done.stdout.startswith("the child has ended with 0, "), done.stderr


def test_the_exit_waits_for_a_step_and_lets_none_begin(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said = done.stdout.partition("the child has ended with 0, ")[2]
    assert re.fullmatch("(begun, ended, )+a step at the exit, ", said), done.stdout
