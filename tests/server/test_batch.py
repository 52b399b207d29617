"""`quire batch`: order, errors, and the same bytes after any interruption."""

from __future__ import annotations

import dataclasses
import errno
import json
import random
import shutil
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cache.groups import CacheGroup
from quire.cache.manager import BlockManager
from quire.cli import app
from quire.engine.plan import StepOutput
from quire.engine.policy import ORDERS
from quire.engine.scheduler import Scheduler
from quire.errors import ConfigError
from quire.request import BACKGROUND_PRIORITY, Request, SamplingParams
from quire.server.batch import answering, runner
from quire.server.batch.results import NotThisBatch, Output, Results
from tests.forks import QUIRE, SLOWLY, Spawner
from tests.server.batches import answered, mixed, request
from tests.server.serving import Serving

KILLS = 20


def test_an_answer_is_that_of_its_route(server: Serving, tmp_path: Path) -> None:
    """But for what must not depend on the time, on earlier requests, and on chance."""
    bodies: list[tuple[str, dict[str, Any]]] = [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a stack"}], "max_tokens": 6, "temperature": 0},
        ),
        ("/v1/completions", {"prompt": "import ", "max_tokens": 6, "seed": 3, "logprobs": 1, "echo": True}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/completions", {"prompt": "a", "temperature": -1}),
    ]
    found = answered(server, [request(i, url, **body) for i, (url, body) in enumerate(bodies)], tmp_path)
    lines = [json.loads(line) for line in b"".join(found).splitlines()]
    assert [line["custom_id"] for line in lines] == ["r0", "r1", "r2", "r3", "r4"]
    for (url, body), line in zip(bodies, lines, strict=True):
        live = server.post(url, **body)
        expected, given = live.json(), line["response"]["body"]
        assert line["response"]["status_code"] == live.status
        if live.status != 200:
            assert given == expected
            assert line["error"]["message"] == "line 5: temperature is -1; it must be at least 0.0"
            continue
        assert line["error"] is None
        for name in ("id", "created"):
            assert (name in given) == (name in expected)
            given.pop(name, None), expected.pop(name, None)
        expected["usage"]["prompt_tokens_details"]["cached_tokens"] = 0
        assert given == expected


def test_lines_without_a_seed_are_drawn_apart(server: Serving, tmp_path: Path) -> None:
    lines = [request(i, "/v1/completions", prompt=["x", "x"], max_tokens=8, n=2) for i in range(2)]
    answers, _ = answered(server, lines, tmp_path)
    texts = [
        choice["text"] for line in answers.splitlines() for choice in json.loads(line)["response"]["body"]["choices"]
    ]
    assert len(set(texts)) == 8


def test_wrong_lines_are_told_and_the_others_answered(server: Serving, tmp_path: Path) -> None:
    good = request(0, "/v1/embeddings", input="a", dimensions=1)
    lines = {
        b"{": "it is not JSON: Expecting property name enclosed in double quotes at character 1",
        b"\xff": "it is not UTF-8, nests too deeply, or has a number with too many digits",
        b"7": "it is 7; it must be an object with custom_id, method, url and body",
        b'{"url": 1}': "custom_id is missing; it must be a text that no other line has",
        good: "custom_id is 'r0', which line 1 has already; each line needs its own",
        good.replace(b"POST", b"GET").replace(b"r0", b"a"): "method is 'GET'; it must be 'POST'",
        request(1, "/v1/models"): "url is '/v1/models'; a batch may use /v1/completions, /v1/chat/completions, "
        "/v1/embeddings, /v1/score, /score",
        request(2, "/score").replace(b"{}", b"[]"): "body is []; it must be an object, the body of the request",
        request(
            3, "/v1/completions", prompt="a", stream=True
        ): "stream is true; answers of a batch are whole, so leave it out",
        request(
            4, "/v1/completions", prompt="a", priority=1
        ): "priority is 1; all lines of a batch have the lowest, so leave it out",
        request(5, "/v1/embeddings", input="a" * 2**22): f"it has {2**22 + 85} bytes; this server takes 4194304 "
        f"(--max-body-size)",
    }
    answers, errors = answered(server, [good, b"", *lines, request(9, "/v1/embeddings", input="b")], tmp_path)
    assert [json.loads(line)["custom_id"] for line in answers.splitlines()] == ["r0", "r9"]
    found = [json.loads(line)["error"] for line in errors.splitlines()]
    assert [one["message"] for one in found] == [f"line {i}: {text}" for i, text in enumerate(lines.values(), 3)]
    assert [one["line"] for one in found] == [*range(3, 14)]
    assert [one["param"] for one in found] == [
        None
    ] * 3 + "custom_id custom_id method url body stream priority".split() + [None]


class Killed(Exception):
    """The process ended here."""


@pytest.mark.slow
def test_killed_at_any_write(server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a write, before it or after it; half of the times the power goes, and the disk lacks the end of a file."""
    (tmp_path / "whole").mkdir()
    lines = mixed(48)
    whole = answered(server, lines, tmp_path / "whole", width=16)
    assert [part.count(b"\n") for part in whole] == [43, 5]
    monkeypatch.setattr(runner, "SYNC_EVERY", 0.0)
    write, sync, left = Output.write, Output.sync, 0
    rng = random.Random(57)

    def dying_write(output: Output, data: bytes) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            if left == 0:
                write(output, data[: rng.randrange(len(data) + 1)])
            raise Killed
        write(output, data)

    def dying_sync(output: Output) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise Killed
        sync(output)

    monkeypatch.setattr(Output, "write", dying_write)
    monkeypatch.setattr(Output, "sync", dying_sync)
    kills = rounds = 0
    while kills < KILLS or rounds < 2:
        directory = tmp_path / f"{rounds}"
        directory.mkdir()
        rounds += 1
        while True:
            left = rng.randrange(1, 16)
            try:
                found = answered(server, lines, directory, width=rng.choice((1, 4, 16)))
                break
            except Killed:
                kills += 1
            if rng.random() < 0.5:
                for path in directory.iterdir():
                    size = path.stat().st_size
                    with path.open("r+b") as file:
                        file.truncate(rng.randrange(size // 2, size + 1))
        assert found == whole, f"round {rounds}"


@pytest.mark.slow
def test_killed_by_a_signal(forks: Spawner, server: Serving, tmp_path: Path) -> None:
    """Twice, and started again with the same arguments."""
    (tmp_path / "whole").mkdir()
    lines = mixed(40)
    whole = answered(server, lines, tmp_path / "whole")
    paths = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl", "errors.jsonl")]
    Path(paths[0]).write_bytes(b"\n".join(lines))
    arguments = ["batch", *paths[:2], "--errors", paths[2], "--num-blocks", "512", "--generation-config", "none"]
    out, errors = (Path(path) for path in paths[1:])
    for count in (5, 15):
        process = forks.start(*arguments, "--max-num-seqs", "2", program=SLOWLY + QUIRE)
        while not out.exists() or out.read_bytes().count(b"\n") < count:
            assert process.is_alive, process.log.read_text()
            time.sleep(0.005)
        process.kill()
        process.wait()
        assert out.read_bytes() != whole[0]
    assert forks.start(*arguments).wait() == 0
    assert (out.read_bytes(), errors.read_bytes()) == whole


def test_results_of_others_are_left_alone(server: Serving, tmp_path: Path) -> None:
    lines = mixed(6)
    answered(server, lines, tmp_path)
    path = tmp_path / "answers"
    before = path.read_bytes()
    for other in (lines[1:], [lines[0]], [*lines[:3], lines[0].replace(b"a 0", b"b 0"), *lines[4:]]):
        with pytest.raises(NotThisBatch, match=rf"{path} exists, and its line \d is not a result of this batch"):
            answered(server, other, tmp_path)
        assert path.read_bytes() == before
    path.write_text("notes\n")
    with pytest.raises(NotThisBatch, match=r"its line 1 is not"):
        answered(server, lines, tmp_path)
    held = Results(path, path)
    with pytest.raises(ConfigError, match="is written by another batch"):
        Results(path, path)
    held.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_call_parser", "hermes"),
        ("reasoning_parser", "qwen3"),
        ("reranker", "similarity"),
        ("max_logprobs", 3),
        ("max_body_size", 2048),
        ("unknown_fields", "refuse"),
    ],
)
def test_results_of_other_options_are_told(
    server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    lines = [request(0, "/v1/embeddings", input="a", dimensions=1)]
    answered(server, lines, tmp_path)
    config = server.service.config
    assert getattr(config, name) != value
    monkeypatch.setattr(server.service, "config", dataclasses.replace(config, **{name: value}))
    with pytest.raises(NotThisBatch, match="the model or its options were others"):
        answered(server, lines, tmp_path)


def test_without_a_fingerprint_only_the_same_process_continues(
    server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(weights_version: str | None = None) -> None:
        """The model may be another one after a restart."""

    lines = mixed(6)
    monkeypatch.setattr(server.service.engine_client, "fingerprint", unknown)
    whole = answered(server, lines, tmp_path)
    (tmp_path / "answers").write_bytes(whole[0][:1000])
    assert answered(server, lines, tmp_path) == whole
    monkeypatch.setattr(answering, "PROCESS", "another one")
    with pytest.raises(NotThisBatch, match="the model has no fingerprint"):
        answered(server, lines, tmp_path)
    assert (tmp_path / "answers").read_bytes() == whole[0]


def test_a_full_disk_is_told_and_continued(server: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = mixed(20)
    (tmp_path / "whole").mkdir()
    whole = answered(server, lines, tmp_path / "whole")

    def full(output: Output, data: bytes, write: Any = Output.write) -> None:
        if output.path.stat().st_size > 2000:
            write(output, data[:40])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(output, data)

    with monkeypatch.context() as patched:
        patched.setattr(Output, "write", full)
        with pytest.raises(OSError, match="No space left on device"):
            answered(server, lines, tmp_path)
    assert answered(server, lines, tmp_path) == whole


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With files and with standard streams, in which errors are where their lines are."""
    monkeypatch.chdir(tmp_path)
    given = b"\n".join(mixed(12))
    Path("in.jsonl").write_bytes(given)

    def quire(*arguments: str, status: int = 0) -> Any:
        result = CliRunner().invoke(app, ["batch", *arguments], input=given)
        assert result.exit_code == status, result.output
        return result

    assert quire("in.jsonl", "out.jsonl").stdout == "11 answers, 1 errors: out.jsonl, errors in out.errors.jsonl\n"
    result = quire("-", "-")
    lines = result.stdout.splitlines(keepends=True)
    assert [json.loads(line)["error"] is None for line in lines] == [i % 9 != 4 for i in range(12)]
    assert "".join(lines[:4] + lines[5:]) == Path("out.jsonl").read_text()
    assert lines[4] == Path("out.errors.jsonl").read_text()
    shutil.copy("out.jsonl", "part.jsonl")
    with open("part.jsonl", "r+b") as file:
        file.truncate(1000)
    quire("-", "part.jsonl")
    assert Path("part.jsonl").read_bytes() == Path("out.jsonl").read_bytes()
    assert "in.jsonl is the input and an output" in quire("in.jsonl", "in.jsonl", status=1).stderr
    assert "none.jsonl is no file of requests" in quire("none.jsonl", "o", status=1).stderr
    assert "error: / cannot be written: Is a directory" in quire("in.jsonl", "/", "--errors", "e", status=1).stderr

    def full(output: Output, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Output, "write", full)
    assert quire("in.jsonl", "new.jsonl", status=1).stderr.endswith(
        "error: new.jsonl: No space left on device, after the results of 0 lines; the same command continues there\n"
    )


@pytest.mark.parametrize("name", ORDERS)
def test_live_requests_are_before_those_of_batches(name: str) -> None:
    """By every policy, however late they come."""
    manager = BlockManager((CacheGroup((0,)),), 8, 16, 64)
    scheduler = Scheduler(manager, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64, order=ORDERS[name])
    for number, priority in enumerate((BACKGROUND_PRIORITY, BACKGROUND_PRIORITY, 0)):
        scheduler.add(Request(f"{number}", array("i", [1] * 9), 9, SamplingParams(max_tokens=1), priority=priority))
    order = []
    while scheduler.has_work:
        plan = scheduler.plan()
        order += [item.request.id for item in plan.items]
        scheduler.commit(plan, StepOutput({item.request.id: 1 for item in plan.items}))
    assert order == ["2", "0", "1"]
