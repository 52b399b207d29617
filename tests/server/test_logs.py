"""What servers log, as text and as JSON."""

from __future__ import annotations

import json
import logging
import signal
import sys
import urllib.request
from typing import Any

import pytest

from quire.server.logs import JsonFormatter, fields
from tests.forks import Process, Spawner


def test_a_record_is_one_line_of_json() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        exception = sys.exc_info()
    record = logging.LogRecord("quire.x", logging.WARNING, "", 0, "%s is\n%d", ("a", 5), exception)
    record.fields = fields(status=200, message="not this")["fields"]
    line = JsonFormatter().format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert list(found) == ["time", "level", "logger", "message", "status", "exception"]
    assert (found["level"], found["logger"], found["message"], found["status"]) == (
        "WARNING",
        "quire.x",
        "a is\n5",
        200,
    )
    assert found["exception"].endswith("ValueError: two\nlines")
    assert found["time"].endswith("+00:00")


def records(process: Process) -> list[dict[str, Any]]:
    """What a process has logged: nothing but JSON."""
    return [json.loads(line) for line in process.log.read_text().splitlines()]


@pytest.mark.slow
def test_a_server_logs_json_alone(forks: Spawner) -> None:
    with forks.running("serve", "--port", "0", "--num-blocks", "64", "--log-format", "json") as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions",
            b'{"prompt": "import os", "max_tokens": 3, "ignore_eos": true}',
            {"Content-Type": "application/json", "X-Request-Id": "mine"},
        )
        urllib.request.urlopen(request, timeout=60).read()
        server.said('"quire.access"')
        server.send(signal.SIGINT)
        assert server.wait() == 130
        started, note, access, stopping = records(server)
    assert started["message"].startswith("Quire ")
    assert {"backend", "threads", "dtype", "weights", "cache", "longest", "limits"} < started.keys()
    assert note["message"].startswith("No model was named")
    assert access["logger"] == "quire.access"
    assert access["seconds"] > 0
    expected = {"request_id": "mine", "method": "POST", "path": "/v1/completions", "status": 200, "new_tokens": 3}
    assert expected.items() <= access.items()
    assert access["prompt_tokens"] > 0
    assert (stopping["level"], stopping["message"]) == ("INFO", "stopping: no request is open")
    assert (started["model"], started["decoder"]) == ("quire-embedded", "own decoder")


@pytest.mark.slow
def test_what_ends_a_server_or_a_gateway_is_json_too(forks: Spawner) -> None:
    for arguments, words in (
        (["serve", "--dtype", "int3"], "dtype is 'int3'"),
        (["fleet", "--replicas", "x", "--fleet-secret", "s"], "replica 'x' has no scheme"),
    ):
        process = forks.start(*arguments, "--port", "0", "--log-format", "json")
        assert process.wait() == 1
        *_, last = records(process)
        assert last["level"] == "ERROR"
        assert words in last["message"]


@pytest.mark.slow
def test_text_is_the_default_and_another_format_is_refused(forks: Spawner) -> None:
    with forks.running("serve", "--port", "0", "--num-blocks", "64") as server:
        server.said(r"^No model was named, so this is the small one .*\n  model    quire-embedded\n  decoder  own")
        server.said(r"^  threads  \d+$")
        server.send(signal.SIGINT)
        assert server.wait() == 130
        server.said("INFO stopping: no request is open")
    process = forks.start("serve", "--log-format", "xml")
    assert process.wait() == 1
    process.said("log_format is 'xml'; it must be 'text' or 'json'")
