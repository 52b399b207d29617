"""The interpreter's exit while a daemon thread computes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# A daemon thread computes steps; the main thread ends within the first one, and at its exit computes a step itself.
STEPS = """
import atexit, os, threading, time
atexit.register(lambda: (spare.step(), os.write(1, b"a step at the exit, ")))
from tests.engine.fakes import fake_engine, request

engine, spare = fake_engine(), fake_engine()
spare.add(request("spare", [1], max_tokens=1))
engine.add(request("r", [1, 2, 3], max_tokens=5))
compute, begun = engine.runner.run, threading.Event()

def slowly(batch):
    os.write(1, b"begun, ")
    begun.set()
    time.sleep(1)
    os.write(1, b"ended, ")
    return compute(batch)

engine.runner.run = slowly

def serve():
    while engine.has_work:
        engine.step()

threading.Thread(target=serve, daemon=True).start()
begun.wait()
"""


def test_the_exit_waits_for_a_step_and_lets_none_begin() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.fullmatch("(begun, ended, )+a step at the exit, ", done.stdout), done.stdout


# A thread computes a step while the main thread forks; there is no such thread in the child, which then exits.
FORK = """
import os, threading
from tests.engine.fakes import fake_engine, request

engine, begun, gate = fake_engine(), threading.Event(), threading.Event()
engine.add(request("r", [1, 2, 3], max_tokens=1))
compute = engine.runner.run

def slowly(batch):
    begun.set()
    gate.wait()
    return compute(batch)

engine.runner.run = slowly
thread = threading.Thread(target=engine.step)
thread.start()
begun.wait()
child = os.fork()
if child:
    _, status = os.waitpid(child, 0)
    os.write(1, b"the child has ended with %d" % status)
    gate.set()
    thread.join()
"""


def test_a_child_that_was_forked_waits_for_no_step_of_its_parent() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=50, check=False, cwd=root
    )
    assert done.stdout == "the child has ended with 0", done.stderr
