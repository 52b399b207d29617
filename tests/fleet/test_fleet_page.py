"""docs/fleet.md: its commands and its Python, against a fleet as the page starts it."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire.fleet.placement import PARTS
from quire_bench.fleet.running import fetch
from tests.forks import Spawner

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "fleet.md").read_text()
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.removeprefix("$ ") for kind, body in BLOCK.findall(PAGE) if kind == "console" for line in body.splitlines()
]
STARTED = [command for command in COMMANDS if command.startswith(".venv/bin/quire")]
PORT = re.compile(r"--port (\d+)")


@pytest.fixture(scope="module")
def addresses(forks: Spawner) -> Iterator[dict[str, str]]:
    """The page's addresses, and those of the same servers here, at ports of their own."""
    found: dict[str, str] = {}
    with ExitStack() as stack:
        for command in STARTED:
            port = PORT.search(command)
            assert port
            _, *arguments = shlex.split(here(PORT.sub("--port 0", command), found))
            process = stack.enter_context(forks.running(*arguments))
            found[f"http://127.0.0.1:{port[1]}"] = process.url
        yield found


def here(text: str, addresses: dict[str, str]) -> str:
    """A text of the page with the addresses of this machine's servers."""
    for address, url in addresses.items():
        text = text.replace(address, url)
    return text


def test_the_page_starts_two_replicas_and_a_gateway() -> None:
    assert [command.split()[1] for command in STARTED] == ["serve", "serve", "fleet"]
    assert COMMANDS[:3] == STARTED


def test_python(addresses: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """What the client puts together is the whole answer."""
    names: dict[str, object] = {"__name__": "document"}
    for kind, body in BLOCK.findall(PAGE):
        if kind == "python":
            exec(compile(here(body, addresses), "fleet.md", "exec"), names)
    answer = names["beginning"] + names["rest"]  # type: ignore[operator]
    assert capsys.readouterr().out == f"{answer}\n"
    assert len(names["rest"]) > 5  # type: ignore[arg-type]


@pytest.mark.parametrize("command", COMMANDS[3:])  # the last one drains a replica
def test_command(command: str, addresses: dict[str, str]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("this machine has no curl")
    assert command.startswith("curl ")
    command = here(command, addresses) + " --fail-with-body"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout
    assert '"error"' not in result.stdout


def test_the_parts_of_a_cost_are_all_there() -> None:
    found = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert [name for name in found if name in PARTS] == list(PARTS)


def test_metrics_are_those_of_a_gateway(addresses: dict[str, str]) -> None:
    named = set(re.findall(r"`(quire:fleet_\w+)`", PAGE))
    shown = fetch(f"{addresses['http://127.0.0.1:8100']}/metrics").decode()
    assert named
    assert all(f"# HELP {name}_total " in shown or f"# HELP {name} " in shown for name in named)
