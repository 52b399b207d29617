"""`quire serve`, as a process: what it says, what it takes, how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.interrupts import obey

pytestmark = pytest.mark.slow


class Process:
    """A running `quire serve`."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "quire", "serve", "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=obey
        )
        self.lines: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if "limits" in line:
                break
        found = re.search(r"http://[\d.]+:\d+", "\n".join(self.lines))
        assert found, self.lines
        self.url = found[0]

    def post(self, **body: object) -> object:
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return json.load(urllib.request.urlopen(request, timeout=60))


@contextmanager
def running(*arguments: str) -> Iterator[Process]:
    found = Process(*arguments)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.communicate()


def failing(*arguments: str) -> str:
    command = [sys.executable, "-m", "quire", "serve", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr


def test_it_says_what_was_chosen_and_why_and_drains_at_sigterm() -> None:
    with running("--num-blocks", "300", "--max-num-seqs", "4") as server:
        shown = "\n".join(server.lines)
        assert re.search(r"serves quire-embedded at http://127.0.0.1:\d+ \(ready in \d+\.\d s\)", shown)
        assert re.search(r"backend +cpu on cpu, .* kernels \(the fastest that runs here\)", shown)
        assert re.search(r"dtype +\w+ \(the checkpoint's\)", shown)
        assert re.search(r"weights +\d+ MiB, not quantised", shown)
        assert re.search(r"cache +300 blocks of 16 tokens, \d+ MiB \(as asked for\)", shown)
        assert re.search(r"longest +[\d,]+ tokens \(what the model was made for\)", shown)
        assert "4 sequences at a time" in shown
        answers: list[object] = []
        asked = threading.Thread(
            target=lambda: answers.append(server.post(prompt="x", max_tokens=450, n=4, ignore_eos=True))
        )
        asked.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        asked.join(60)
        assert answers[0]["usage"]["completion_tokens"] == 1800  # type: ignore[index]
        assert server.process.wait(30) == -signal.SIGTERM


def test_a_yaml_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("num-blocks: 200\nmax_num_seqs: 3\nserved-model-name: [mine, too]\nenable-prefix-caching: false\n")
    with running("--config", str(path), "--max-num-seqs", "5") as server:
        shown = "\n".join(server.lines)
        assert "serves mine" in shown
        assert "200 blocks" in shown
        assert "5 sequences" in shown
        models = json.load(urllib.request.urlopen(f"{server.url}/v1/models", timeout=30))
        assert [model["id"] for model in models["data"]] == ["mine", "too"]
        answer = [server.post(prompt="import os\n" * 20, max_tokens=1) for _ in range(2)][1]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # type: ignore[index]
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 130  # as a shell tells of an interrupt


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seq: 3", "did you mean 'max-num-seqs'?"),
        ("conf: 1", "there is no option 'conf'; see quire serve --help"),
        ("api-key: secret\nport: 70000", "port is 70000"),
        ("- a", "must hold options"),
        ("a: [", "cannot be read as YAML"),
        ("port: {a: 1}", "plain value"),
    ],
)
def test_what_is_wrong_in_a_yaml_file_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    assert words in failing("--config", str(path))


def test_options_that_cannot_be_honoured_end_it_with_a_sentence() -> None:
    assert "port is 70000" in failing("--port", "70000")
    with running("--num-blocks", "100") as server:
        port = server.url.rpartition(":")[2]
        assert f"cannot listen at 127.0.0.1 port {port}" in failing("--port", port)
