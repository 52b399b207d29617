"""quire pull, list and rm, with a hub on the loopback interface."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.hub import since, size_of
from quire.models import EMBEDDED, locate
from tests.marks import of_long_runs
from tests.models.fake_hub import commit_of, fake_hub, filled_from

FILES = {
    path.name: path.read_bytes() if path.suffix != ".safetensors" else b"x" * 3000
    for path in EMBEDDED.iterdir()
    if path.is_file()
}
REPOSITORIES = {
    "someone/tiny": FILES | {"onnx/model.onnx": b"o" * 100},
    "someone/packed-GGUF": {"README.md": b"r", "a-Q4.gguf": b"g" * 10, "b-00001-of-00002.gguf": b"1",
                            "b-00002-of-00002.gguf": b"2"},
    "someone/notes": {"README.md": b"r"},
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a cache that is filled from such a hub."""
    with fake_hub(REPOSITORIES) as url:
        filled_from(url, tmp_path / "hub", monkeypatch)
        yield tmp_path / "hub"


def quire(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, arguments, input=stdin)


@pytest.mark.slow
def test_a_model_is_pulled_listed_and_removed(cache: Path) -> None:
    assert quire("list").stdout == "The cache has no models. quire pull OWNER/NAME downloads one.\n"
    pulled = quire("pull", "someone/tiny")
    assert pulled.exit_code == 0, pulled.output
    path = Path(pulled.stdout.strip())
    assert path == locate("someone/tiny")
    assert path.is_relative_to(cache)
    assert not (path / "onnx").exists()
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]

    [head, line] = quire("list").stdout.splitlines()
    assert head.split() == ["NAME", "REVISION", "SIZE", "MODIFIED"]
    assert re.fullmatch(r"someone/tiny +main +[\d.]+ kB +just now", line)
    [listed] = json.loads(quire("list", "--json").stdout)
    assert (listed["name"], listed["commit"], listed["missing"]) == ("someone/tiny", commit_of("someone/tiny"), [])

    refused = quire("rm", "someone/tiny")
    assert refused.exit_code == 1
    assert re.fullmatch(
        r"error: someone/tiny \(main\), [\d.]+ kB would be removed, and there is no terminal to ask at; "
        r"--yes does not ask\n",
        refused.stderr,
    )
    (path / "model.safetensors").unlink()
    assert quire("list").stdout.splitlines()[1].endswith("lacks weights")
    removed = quire("rm", "someone/tiny", "--yes")
    assert removed.exit_code == 0
    assert removed.stdout.startswith("removed someone/tiny (main), ")
    assert not path.exists()
    assert quire("list").stdout.startswith("The cache has no models")


@pytest.mark.parametrize(("answer", "remains"), [("n", True), ("y", False)])
def test_rm_asks_at_a_terminal(cache: Path, monkeypatch: pytest.MonkeyPatch, answer: str, remains: bool) -> None:
    path = Path(quire("pull", "someone/tiny", "--revision", "v1").stdout.strip())
    asked: list[str] = []

    def confirm(text: str) -> bool:
        asked.append(text)
        return answer == "y"

    monkeypatch.setattr("typer.confirm", confirm)
    monkeypatch.setattr("quire.cli.hub._can_ask", lambda: True)
    shown = quire("rm", "someone/tiny", "--revision", "v1")
    assert shown.exit_code == 0, shown.output
    assert path.exists() is remains
    assert re.fullmatch(r"Remove someone/tiny \(v1\), [\d.]+ kB\?", asked[0])
    assert ("Nothing was removed" in shown.stdout) is remains


def test_one_gguf_file_of_a_repository_is_pulled(cache: Path) -> None:
    refused = quire("pull", "someone/packed-GGUF")
    assert refused.exit_code == 1
    assert refused.stderr == (
        "error: 'someone/packed-GGUF' has GGUF files alone; name one with --gguf-file: a-Q4.gguf, "
        "b-00001-of-00002.gguf, b-00002-of-00002.gguf\n"
    )
    assert (
        Path(quire("pull", "someone/packed-GGUF", "--gguf-file", "a-Q4.gguf").stdout.strip()).read_bytes() == b"g" * 10
    )
    path = Path(quire("pull", "someone/packed-GGUF", "--gguf-file", "b-00001-of-00002.gguf").stdout.strip())
    assert (path.parent / "b-00002-of-00002.gguf").read_bytes() == b"2"
    assert "a-Q4.gguf, b-00001-of-00002.gguf" in quire("list").stdout
    assert "it has a-Q4.gguf, b-00001" in quire("pull", "someone/packed-GGUF", "--gguf-file", "c.gguf").stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pull", "someone/nothing"], "'someone/nothing' is not a directory, and the hub has no such repository"),
        (["pull", "someone/tiny", "--revision", "v9"], "'someone/tiny' has no such revision"),
        (["pull", "someone/notes"], "has no config.json and no GGUF file"),
        (["pull", "a b"], "'a b' is not the name of a Hugging Face repository, which is OWNER/NAME"),
        (["rm", "someone/tinny"], "'someone/tinny' is not in the hub's cache; did you mean 'someone/tiny'?"),
        (["rm", "other"], "'other' is not in the hub's cache; quire list shows its models"),
        (["rm", "someone/tiny", "--revision", "v9"], "has no revision 'v9' in the hub's cache"),
    ],
)
def test_what_is_not_there_is_a_sentence(cache: Path, arguments: list[str], words: str) -> None:
    quire("pull", "someone/tiny")
    result = quire(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert locate("someone/tiny").exists()


def test_what_was_pulled_is_used_without_the_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the copies lack files of their repositories, which are never downloaded."""
    path, file = (
        Path(quire("pull", *arguments).stdout.strip())
        for arguments in (["someone/tiny"], ["someone/packed-GGUF", "--gguf-file", "a-Q4.gguf"])
    )
    assert not (path / "onnx").exists()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert locate("someone/tiny") == path
    assert locate("someone/packed-GGUF", "a-Q4.gguf") == file


def test_a_hub_that_cannot_be_reached_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    result = quire("pull", "someone/tiny")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: 'someone/tiny' could not be looked up on the hub (")


@pytest.mark.slow
@pytest.mark.parametrize("at_a_terminal", [of_long_runs(False), True])
def test_progress_is_shown_at_a_terminal_alone(tmp_path: Path, at_a_terminal: bool) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with fake_hub(REPOSITORIES) as url:
        done = subprocess.run(
            [sys.executable, "-m", "quire", "pull", "someone/tiny"],
            env=os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=theirs if at_a_terminal else subprocess.PIPE,
            check=True,
        )
    os.close(theirs)
    assert Path(done.stdout.decode().strip()).is_dir()
    if at_a_terminal:
        assert b"100%" in os.read(ours, 65536)
    else:
        assert done.stderr == b""
    os.close(ours)


@pytest.mark.slow
def test_the_shell_completes_models_of_the_cache(cache: Path) -> None:
    quire("pull", "someone/tiny")
    for words in ("quire serve some", "quire chat some", "quire rm some", "quire info --model some"):
        environment = {"_QUIRE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        shown = CliRunner().invoke(app, [], env=environment, prog_name="quire")
        assert shown.stdout.split() == ["someone/tiny"], words


def test_sizes_and_times() -> None:
    assert [size_of(count) for count in (5, 1500, 4_700_000_000)] == ["5 B", "1.5 kB", "4.7 GB"]
    assert [since(s) for s in (1, 61, 7300, 90_000)] == ["just now", "1 minute ago", "2 hours ago", "1 day ago"]
