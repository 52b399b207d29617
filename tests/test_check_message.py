"""The form of commit messages that pre-commit asks for."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_message import problem

TOOL = Path(__file__).parent.parent / "tools" / "check_message.py"


@pytest.mark.parametrize(
    "message",
    [
        "ops: check slopes",
        "server, ops: bound queues of clients\n\nBecause of this.\n",
        "SECURITY: document floors\n# Please enter the commit message\n",
        "Merge branch 'x'",
        "a: " + 69 * "b",
    ],
)
def test_allowed(message: str) -> None:
    assert problem(message) is None


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", "it must be 'area: verb object'"),
        ("Check slopes", "it must be 'area: verb object'"),
        ("ops: check slopes.", "without a full stop"),
        ("ops:check slopes", "it must be 'area: verb object'"),
        ("a: " + 70 * "b", "73 characters; it may have 72"),
        ("ops: check slopes\nof each head", "it must be empty"),
        ("ops: mend what a review found", "name the change instead of 'mend'"),
        ("docs: time leaps again", "name the change instead of 'again'"),
    ],
)
def test_refused(message: str, expected: str, tmp_path: Path) -> None:
    assert expected in (problem(message) or "")
    path = tmp_path / "message"
    path.write_text(message)
    ran = subprocess.run([sys.executable, TOOL, path], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, f"commit message: {problem(message)}\n")


def test_all_messages_of_a_branch_are_checked(tmp_path: Path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    def commit(message: str) -> None:
        run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--allow-empty", "-m", message)

    run("git", "init")
    commit("wrong, but on main")
    assert run(sys.executable, str(TOOL)).returncode == 0  # there is no origin/main
    run("git", "update-ref", "refs/remotes/origin/main", "HEAD")
    commit("ops: check slopes")
    assert run(sys.executable, str(TOOL)).returncode == 0
    commit("Fix it")
    ran = run(sys.executable, str(TOOL))
    assert (ran.returncode, ran.stderr.count("\n")) == (1, 1)
    assert "Fix it" in ran.stderr
