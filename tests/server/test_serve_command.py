"""`quire serve`, as a process: what it says, what it takes, how it ends."""

from __future__ import annotations

import json
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.forks import Process, Spawner

pytestmark = pytest.mark.slow


def lines(process: Process) -> list[str]:
    """What it says when it begins to serve."""
    process.said("limits.*\n")
    return process.log.read_text().splitlines()


def post(process: Process, **body: object) -> object:
    request = urllib.request.Request(
        f"{process.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return json.load(urllib.request.urlopen(request, timeout=60))


@contextmanager
def running(forks: Spawner, *arguments: str) -> Iterator[Process]:
    """`quire serve` with these arguments, at a port of its own."""
    with forks.running("serve", "--port", "0", *arguments) as process:
        yield process


def metrics(process: Process) -> str:
    with urllib.request.urlopen(f"{process.url}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def failing(forks: Spawner, *arguments: str) -> str:
    process = forks.start("serve", *arguments)
    assert process.wait() == 1
    said = process.log.read_text()
    assert "Traceback" not in said
    return said


def test_it_says_what_was_chosen_and_why_and_drains_at_sigterm(forks: Spawner) -> None:
    with running(forks, "--num-blocks", "60", "--max-num-seqs", "4", "--drain-grace", "0.1") as server:
        shown = "\n".join(lines(server))
        assert re.search(r"serves quire-embedded at http://127.0.0.1:\d+ \(ready in \d+\.\d s\)", shown)
        assert re.search(r"backend +cpu on cpu, .* kernels \(the fastest that runs here\)", shown)
        assert re.search(r"dtype +\w+ \(the checkpoint's\)", shown)
        assert re.search(r"weights +\d+ MiB, not quantised", shown)
        assert re.search(
            r"cache +60 blocks of 16 tokens, \d+ MiB \(as asked for\); too few for 1,024 tokens, which take 64:", shown
        )
        assert re.search(r"longest +[\d,]+ tokens \(the model's own limit\)", shown)
        assert "4 sequences at a time" in shown
        answers: list[object] = []
        asked = threading.Thread(
            target=lambda: answers.append(post(server, prompt="x", max_tokens=200, n=4, ignore_eos=True))
        )
        asked.start()
        while not re.search(r"quire:num_requests_running\S* 4", metrics(server)):
            assert asked.is_alive()
        urllib.request.urlopen(f"{server.url}/ready", timeout=30)
        server.send(signal.SIGTERM)
        server.said("requests are accepted for another 0.1 s, in which /ready answers 503")
        asked.join(60)
        assert answers[0]["usage"]["completion_tokens"] == 800  # type: ignore[index]
        assert server.wait() == -signal.SIGTERM


def test_a_yaml_file_gives_options_and_the_command_line_wins(tmp_path: Path, forks: Spawner) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text("num-blocks: 200\nmax_num_seqs: 3\nserved-model-name: [mine, too]\nenable-prefix-caching: false\n")
    with running(forks, "--config", str(path), "--max-num-seqs", "5") as server:
        shown = "\n".join(lines(server))
        assert "serves mine" in shown
        assert "200 blocks" in shown
        assert "5 sequences" in shown
        models = json.load(urllib.request.urlopen(f"{server.url}/v1/models", timeout=30))
        assert [model["id"] for model in models["data"]] == ["mine", "too"]
        answer = [post(server, prompt="import os\n" * 20, max_tokens=1) for _ in range(2)][1]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # type: ignore[index]
        server.send(signal.SIGINT)
        assert server.wait() == 130  # what a shell reports for an interrupt


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
def test_what_is_wrong_in_a_yaml_file_is_told(text: str, words: str, tmp_path: Path, forks: Spawner) -> None:
    path = tmp_path / "quire.yaml"
    path.write_text(text)
    assert words in failing(forks, "--config", str(path))


def test_options_that_cannot_be_honoured_end_it_with_a_sentence(forks: Spawner) -> None:
    assert "port is 70000" in failing(forks, "--port", "70000")
    with running(forks, "--num-blocks", "100") as server:
        port = server.url.rpartition(":")[2]
        assert f"cannot listen at 127.0.0.1 port {port}" in failing(forks, "--port", port)
