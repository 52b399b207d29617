"""A test that fails runs once more alone: whole runs of pytest, on files of a few lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
# A test that fails when it runs for the first time. It leaves a file, so that it passes the second time.
FIRST = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("seed", [{seeds}])
def test_first(seed):
    print("drawn from seed", seed)
    seen = Path(__file__).with_name(f"seen-{{seed}}")
    fails = not seen.exists()
    seen.touch()
    assert not fails, f"seed {{seed}} fails the first time"
"""
ALWAYS = "def test_always():\n    assert 1 == 2\n"
PASSES = "def test_passes():\n    pass\n"
# A fixture that fails when it is made for the first time.
SHARED = """
import pytest
from pathlib import Path

@pytest.fixture
def made():
    seen = Path("seen")
    fails = not seen.exists()
    seen.touch()
    assert not fails

def test_first(made):
    pass
"""
XDIST = ("--numprocesses=2", "--dist=worksteal")


def run(directory: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the plugin on these files."""
    for name, text in files.items():
        (directory / f"test_{name}.py").write_text(text)
    (directory / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.flaky", "-p", "no:cacheprovider", *options, "."]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, check=False, cwd=directory, env=environment, capture_output=True, text=True)


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """What pytest's last line counts."""
    return {name: int(count) for count, name in re.findall(r"(\d+) (\w+)", done.stdout.splitlines()[-1])}


def test_what_passes_alone_is_listed_with_both_outputs(tmp_path: Path) -> None:
    done = run(tmp_path, first=FIRST.format(seeds="17"), shared=SHARED, passes=PASSES)
    assert done.returncode == 0, done.stdout
    assert {"flaky": 2, "passed": 1}.items() <= counts(done).items()
    assert "FAILURES" not in done.stdout
    [listed] = re.findall(r"=+ flaky: test_first.py::test_first\[17\] =+\n(.*?1 passed)", done.stdout, re.DOTALL)
    before, after = listed.split("--- passed alone:")
    assert "seed 17 fails the first time" in before
    assert "drawn from seed 17" in before
    assert "drawn from seed 17" in after
    assert "setup failed among the others" in done.stdout


def test_what_fails_again_fails(tmp_path: Path) -> None:
    done = run(tmp_path, first=FIRST.format(seeds="17"), always=ALWAYS)
    assert done.returncode == 1, done.stdout
    assert {"flaky": 1, "failed": 1}.items() <= counts(done).items()
    assert "FAILED test_always.py::test_always" in done.stdout
    assert "FAILED test_first.py" not in done.stdout


def test_three_flaky_tests_fail_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, first=FIRST.format(seeds="1, 2, 3"))
    assert done.returncode == 1, done.stdout
    assert counts(done)["flaky"] == 3
    assert "3 tests are flaky; a run passes with at most 2" in done.stdout


def test_eleven_failures_are_not_run_again(tmp_path: Path) -> None:
    done = run(tmp_path, first=FIRST.format(seeds=", ".join(map(str, range(11)))))
    assert done.returncode == 1, done.stdout
    assert counts(done)["failed"] == 11
    assert "once more, alone" not in done.stdout


def test_an_error_of_collection_fails(tmp_path: Path) -> None:
    done = run(
        tmp_path, "--continue-on-collection-errors", first=FIRST.format(seeds="17"), broken="import nothing_such"
    )
    assert done.returncode == 1, done.stdout
    assert {"flaky": 1, "error": 1}.items() <= counts(done).items()


def test_a_run_that_stopped_at_a_failure_fails(tmp_path: Path) -> None:
    """What it left out may fail, too."""
    done = run(tmp_path, "--exitfirst", first=FIRST.format(seeds="17"), passes=PASSES)
    assert done.returncode == 1, done.stdout
    assert "once more, alone" not in done.stdout


def test_with_workers(tmp_path: Path) -> None:
    done = run(tmp_path, "-p", "xdist", *XDIST, first=FIRST.format(seeds="17, 18"), passes=PASSES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"flaky": 2, "passed": 1}.items() <= counts(done).items()


def test_a_worker_that_crashes_fails_the_run(tmp_path: Path) -> None:
    crash = "import os\n\ndef test_crash():\n    os._exit(3)\n"
    done = run(tmp_path, "-p", "xdist", *XDIST, first=FIRST.format(seeds="17"), crash=crash)
    assert done.returncode == 1, done.stdout + done.stderr
    assert {"flaky": 1, "failed": 1}.items() <= counts(done).items()
