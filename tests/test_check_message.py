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
        "server, ops: answer what two reviews found\n\nBecause of this.\n",
        "SECURITY: say what a floor keeps out\n# Please enter the commit message\n",
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
    ],
)
def test_refused(message: str, expected: str, tmp_path: Path) -> None:
    assert expected in (problem(message) or "")
    path = tmp_path / "message"
    path.write_text(message)
    ran = subprocess.run([sys.executable, TOOL, path], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (1, f"commit message: {problem(message)}\n")
