"""Numbers that JSON does not have, and streams that cannot be continued: what a client is told instead."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.frontend import output_processor as text
from quire.frontend.outputs import Logprob, RequestOutput
from quire.server.api import chat, completions, embeddings
from quire.server.observability import inspector
from tests.server.serving import Serving, serving
from tests.server.test_robust import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GIVEN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "import os\n", "max_tokens": 4},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
}


def give_logprob(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    """Let models give this logprob everywhere."""
    candidates = text.candidates

    def changed(logprobs: Any, decode: Any) -> dict[int, Logprob]:
        return {token: replace(one, logprob=number) for token, one in candidates(logprobs, decode).items()}

    monkeypatch.setattr(text, "candidates", changed)


def numbers(value: Any) -> list[float]:
    """All numbers with a fraction in an answer."""
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, float) else []


@pytest.mark.slow
@pytest.mark.parametrize("number", [math.nan, -math.inf, math.inf])
def test_a_logprob_that_is_not_finite_is_the_lowest_one(monkeypatch: pytest.MonkeyPatch, number: float) -> None:
    with serving() as server:
        give_logprob(monkeypatch, number)
        asked: list[tuple[str, dict[str, Any]]] = [
            (COMPLETIONS, {"prompt_logprobs": 0}),
            (COMPLETIONS, {"prompt_logprobs": 1, "logprobs": 2, "echo": True}),
            (COMPLETIONS, {"logprobs": 0, "best_of": 2}),
            (CHAT, {"prompt_logprobs": 1, "logprobs": True, "top_logprobs": 2}),
        ]
        for path, fields in asked:
            answer = server.post(path, **GIVEN[path], **fields)
            assert answer.status == 200, answer.body
            assert set(numbers(answer.json())) == {-9999.0}
        for path, fields in (*asked[:2], (CHAT, {"logprobs": True, "top_logprobs": 2})):
            found = server.post(path, **GIVEN[path], **fields, stream=True).events()
            assert set(numbers(found)) == {-9999.0}


def test_a_finite_logprob_stays_as_it_is(server: Serving) -> None:
    [choice] = server.post(COMPLETIONS, **GIVEN[COMPLETIONS], logprobs=0).json()["choices"]
    assert all(-100 < number <= 0 for number in choice["logprobs"]["token_logprobs"])


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_a_vector_that_is_not_finite_is_an_error(
    server: Serving, monkeypatch: pytest.MonkeyPatch, encoding: str, number: float
) -> None:
    whole = embeddings.unit_vector

    def broken(output: RequestOutput, *rest: Any) -> Any:
        return whole(replace(output, hidden_state=np.full(4, number, np.float32)), *rest)

    monkeypatch.setattr(embeddings, "unit_vector", broken)
    answer = server.post("/v1/embeddings", input=["a", "b"], encoding_format=encoding)
    assert (answer.status, answer.error()["code"]) == (500, "engine_error")
    assert "not finite for input 0" in answer.error()["message"]


# ------------------------------------------------------------------------------------------------- broken streams


class Unexpected(Exception):
    """What nobody has thought of."""


def fail(*_: Any, **__: Any) -> Any:
    raise Unexpected("a secret")


def failing_at(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, but its call of that number fails."""
    calls = 0

    def changed(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return fail() if calls == count else function(*args, **kwargs)

    return changed


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("path", "module", "name"), [(COMPLETIONS, completions, "token_text"), (CHAT, chat, "chat_logprobs")]
)
def test_a_stream_that_fails_ends_in_an_error_and_its_request_with_it(
    server: Serving,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    module: Any,
    name: str,
    count: int,
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(module, name, failing_at(count, getattr(module, name)))
    logprobs: Any = 0 if path == COMPLETIONS else True
    answer = server.post(path, **GIVEN[path] | {"max_tokens": 900}, ignore_eos=True, stream=True, logprobs=logprobs)
    assert answer.status == 200
    *pieces, last = answer.events()  # which end with [DONE]
    assert not any("error" in piece for piece in pieces)
    assert last == {
        "error": {
            "message": "an error of the server's own: Unexpected",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    until(server.is_idle)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [Unexpected]


def test_a_stream_whose_event_is_no_json_ends_in_an_error(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a number that no check has seen."""
    monkeypatch.setattr(completions, "finite", lambda number: math.nan)
    answer = server.post(COMPLETIONS, **GIVEN[COMPLETIONS], logprobs=0, stream=True)
    assert answer.events()[-1]["error"]["code"] == "internal_error"
    assert server.post(COMPLETIONS, **GIVEN[COMPLETIONS], logprobs=0).error()["code"] == "internal_error"
    until(server.is_idle)


def test_the_inspectors_stream_ends_in_an_error_too(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector.Inspector, "has_news", property(fail))
    answer = server.get("/inspector/events")
    *_, error, done = [part.partition(b"data: ")[2] for part in answer.body.split(b"\n\n")[:-1]]
    assert json.loads(error)["error"]["code"] == "internal_error"
    assert done == b"[DONE]"
    assert all(watcher.gone for watcher in server.inspector._watchers)
