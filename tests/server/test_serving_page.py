"""docs/serving.md: its commands and its Python, against a server as the page starts it; and the container's file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import Process, Spawner
from tests.server.test_serve_command import lines, running

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text()
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ") for kind, body in BLOCK.findall(PAGE) if kind == "console" for line in body.splitlines()
]


@pytest.fixture(scope="module")
def server(forks: Spawner) -> Iterator[Process]:
    assert COMMANDS[0] == ".venv/bin/quire serve"  # what `running` starts, at a port of its own
    with running(forks) as found:
        yield found


@pytest.mark.parametrize("command", COMMANDS[1:])
def test_command(server: Process, command: str) -> None:
    if command.startswith("curl") and shutil.which("curl") is None:
        pytest.skip("this machine has no curl")
    command = command.replace(ADDRESS, server.url).replace(".venv/bin/quire", f"{sys.executable} -m quire")
    result = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    assert '"error"' not in result.stdout


def test_python(server: Process) -> None:
    names: dict[str, object] = {"__name__": "document"}
    for kind, body in BLOCK.findall(PAGE):
        if kind == "python":
            exec(compile(body.replace(ADDRESS, server.url), "serving.md", "exec"), names)


def test_the_lines_that_the_page_shows_are_those_of_the_server(server: Process) -> None:
    shown = next(body for body in PAGE.split("```") if body.startswith("\nQuire 0"))
    plain = [re.sub(r"[\d.,]+|a[vm]x\w*", "0", line).strip() for line in shown.strip().splitlines()]
    reported = [re.sub(r"[\d.,]+|a[vm]x\w*", "0", line).strip() for line in lines(server)]
    assert [line.split("(")[0] for line in plain] == [line.split("(")[0] for line in reported[: len(plain)]]


def test_the_container_file_copies_what_there_is_and_serves() -> None:
    text = (ROOT / "Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources), line
    assert 'ENTRYPOINT ["quire", "serve"' in text
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r"^readme = \"(.*)\"|^license-files = \[\"(.*?)\"", project, re.MULTILINE)  # others are in src
    assert all(name in text for pair in needed for name in pair if name)
