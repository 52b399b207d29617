"""Prompts that clients ask to keep: OpenAI's prompt_cache_key and Anthropic's cache_control, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.server.observability.inspector import Watcher
from tests.server.serving import Serving, serving

SYSTEM = "You are the agent of one session. " * 12  # long enough for many blocks, short enough for a small pool
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture
def server() -> Iterator[Serving]:
    with serving({"num_blocks": 64, "prompt_cache_share": 0.5}) as one:
        yield one


def chat(server: Serving, text: str, **fields: Any) -> int:
    """Ask for one token after a conversation, and return the number of its tokens that were cached."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    answer = server.post(CHAT, messages=messages, max_tokens=1, **fields)
    assert answer.status == 200, answer.body
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def crowd(server: Serving, first: int) -> None:
    """Use up the pool with prompts that share nothing."""
    for i in range(first, first + 6):
        answer = server.post("/v1/completions", prompt=[(7 * i + j * (i + 3)) % 400 for j in range(200)], max_tokens=1)
        assert answer.status == 200, answer.body


def pass_time(server: Serving, seconds: float) -> None:
    """Move the clock of the engine."""

    def move() -> None:
        scheduler = server.service.engine_client.engine.scheduler
        clock = scheduler.clock
        scheduler.clock = lambda: clock() + seconds

    server.on_engine(move)


def snapshot(server: Serving) -> dict[str, Any]:
    """Return the inspector's snapshot."""
    parts: list[bytes] = []
    server.on_engine(partial(server.inspector.subscribe, Watcher(parts.append)))
    found: dict[str, Any] = json.loads(parts[0].split(b"data: ")[1])
    return found


def reports(server: Serving) -> list[dict[str, Any]]:
    """Return the prefix cache's reports that the inspector shows, the latest last."""
    return [event[3] for event in snapshot(server)["history"] if event[0] == "ran"]


def test_a_key_keeps_a_prompt_until_its_time(server: Serving) -> None:
    chat(server, "first")
    crowd(server, 0)
    assert chat(server, "first") == 0  # without a key it is evicted
    assert chat(server, "first", prompt_cache_key="s1") > 100
    crowd(server, 6)
    [(key, count, left)] = snapshot(server)["gauges"]["kept"]
    assert (key, 590 < left <= 600) == ("s1", True)
    assert chat(server, "first", prompt_cache_key="s1", prompt_cache_retention="24h") == count * 16
    pass_time(server, 86_000)
    crowd(server, 12)
    assert chat(server, "first") == count * 16  # found by all clients of the same salt
    pass_time(server, 500)
    crowd(server, 18)
    assert chat(server, "first") == 0
    report = reports(server)[-1]
    assert report["miss"] == "expired"
    assert "was kept until its time, and was evicted" in report["text"]
    assert snapshot(server)["gauges"]["kept"] == []
    assert server.is_idle()


def test_sessions_of_agents_are_found_again_after_eviction_and_a_restart(tmp_path: Path) -> None:
    """A conversation that grows in every turn, in a pool that has room for half of them, and a disk for all."""
    options = {"num_blocks": 84, "kv_disk": str(tmp_path / "kv"), "max_num_batched_tokens": 2048}
    talks = [[{"role": "system", "content": f"agent {i}"}] for i in range(3)]
    before, sent, found = [0] * len(talks), 0, 0
    for part in range(2):
        with serving(options) as server:
            manager = server.service.engine_client.engine.scheduler.manager
            for turn in range(5 * part, 5 * part + 5):
                for i, talk in enumerate(talks):
                    talk.append({"role": "user", "content": f"result {i}{turn}: " + "def f(x): return x\n" * 9})
                    body = {"messages": talk, "max_tokens": 8, "ignore_eos": True, "prompt_cache_key": f"agent {i}"}
                    answer = server.post(CHAT, **body).json()
                    talk.append(answer["choices"][0]["message"])
                    usage = answer["usage"]
                    sent += before[i]
                    found += min(before[i], usage["prompt_tokens_details"]["cached_tokens"])
                    before[i] = usage["total_tokens"]
                    assert manager.disk.flush(20)
            assert server.is_idle()
    assert sum(before) > 84 * 16 * 1.5
    assert found / sent >= 0.96


def test_messages_report_tokens_that_are_written_and_read(server: Serving) -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    system = [{"type": "text", "text": SYSTEM, "cache_control": mark}]
    body = {"messages": [{"role": "user", "content": "hello"}], "system": system, "max_tokens": 1}
    plain = {**body, "system": SYSTEM}
    counted = server.post("/v1/messages/count_tokens", messages=body["messages"], system=SYSTEM).json()["input_tokens"]
    full = counted // 16 * 16
    usages = []
    for asked in (body, body, plain):
        answer = server.post(MESSAGES, **asked, metadata={"user_id": "me"})
        assert answer.status == 200, answer.body
        usages.append([value for name, value in sorted(answer.json()["usage"].items()) if "input" in name])
    assert usages == [[full, 0, counted - full], [0, full, counted - full], [0, full, counted - full]]
    [(key, count, left)] = snapshot(server)["gauges"]["kept"]
    assert (key, count) == ("me", full // 16)
    assert 3_590 < left <= 3_600


def test_responses_report_tokens_that_are_written(server: Serving) -> None:
    body = {"input": SYSTEM, "max_output_tokens": 1, "prompt_cache_key": "r", "prompt_cache_retention": "in-memory"}
    first, second = (server.post(RESPONSES, **body).json()["usage"] for _ in range(2))
    written = first["input_tokens"] // 16 * 16
    assert first["input_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": written}
    assert second["input_tokens_details"] == {"cached_tokens": written, "cache_write_tokens": 0}
