"""Ollama's routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.request import StructuredOutputsParams
from quire.server.protocol.ollama import OllamaChatRequest
from tests.server.serving import Serving
from tests.server.test_responses import SCHEMA

USER = [{"role": "user", "content": "a queue"}]
GREEDY = {"num_predict": 12, "temperature": 0, "num_ctx": 2048, "num_gpu": 1}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": SCHEMA}}


def ask(server: Serving, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, **{"stream": False, "options": GREEDY} | body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json()
    return found


def lines(server: Serving, path: str, **body: Any) -> list[dict[str, Any]]:
    """Those of a stream, which is what is answered where nothing else is asked for."""
    answer = server.post(path, **{"options": GREEDY} | body)
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    found = [json.loads(line) for line in answer.body.splitlines()]
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    return found


@pytest.mark.slow
def test_a_chat_and_a_prompt(speaking: Serving) -> None:
    chat = speaking.post("/v1/chat/completions", messages=USER, max_tokens=12, temperature=0).json()
    text = chat["choices"][0]["message"]["content"]
    found = ask(speaking, "/api/chat", messages=USER, model="quire-embedded:latest", keep_alive="5m")
    assert found["message"] == {"role": "assistant", "content": text}
    assert (found["done_reason"], found["eval_count"]) == ("length", 12)
    assert found["prompt_eval_count"] == chat["usage"]["prompt_tokens"]
    assert found["total_duration"] == found["prompt_eval_duration"] + found["eval_duration"] > 0
    assert ask(speaking, "/api/generate", prompt="a queue")["response"] == text
    *pieces, last = lines(speaking, "/api/chat", messages=USER)
    assert "".join(one["message"]["content"] for one in pieces) == text
    assert (last["message"]["content"], last["eval_count"], last["done_reason"]) == ("", 12, "length")
    assert last["total_duration"] >= last["eval_duration"] > 0
    pieces = lines(speaking, "/api/generate", prompt="import ", raw=True)
    plain = speaking.post("/v1/completions", prompt="import ", max_tokens=12, temperature=0).json()
    assert "".join(one["response"] for one in pieces) == plain["choices"][0]["text"]
    stopped = ask(speaking, "/api/chat", messages=USER, options=GREEDY | {"stop": ["("], "num_predict": -1})
    assert stopped["done_reason"] == "stop"
    loaded = ask(speaking, "/api/chat", messages=[])
    assert loaded["done_reason"] == ask(speaking, "/api/generate")["done_reason"] == "load"
    scored = ask(speaking, "/api/chat", messages=USER, logprobs=True, top_logprobs=2)
    assert len(scored["logprobs"]) == 12
    assert all(len(one["top_logprobs"]) == 2 for one in scored["logprobs"])
    streamed = lines(speaking, "/api/chat", messages=USER, logprobs=True, top_logprobs=2)
    assert [entry for one in streamed for entry in one.get("logprobs", ())] == scored["logprobs"]


@pytest.mark.slow
def test_formats_thoughts_and_calls(speaking: Serving) -> None:
    options = {"num_predict": 80, "temperature": 1.2, "seed": 1}
    found = ask(speaking, "/api/generate", prompt="x", format=SCHEMA, options=options)
    assert json.loads(found["response"])["zone"] in ("UTC", "CET")
    for given in (SCHEMA, {}, "json", "", None):  # an empty schema is one: any JSON
        asked = OllamaChatRequest(messages=[], format=given).chat_of(USER).structure()
        expected = {"json_object": True} if given == "json" else {"json": given}
        assert asked == (StructuredOutputsParams(**expected) if given or given == {} else None)
    call = '\\{"name": "clock", "arguments": \\{"zone": "UTC"\\}\\}'
    regex = f"<think>hm{{3}}</think>Look:<tool_call>\n{call}\n</tool_call>"
    chat = OllamaChatRequest.chat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OllamaChatRequest, "chat", lambda self: chat(self).model_copy(update={"regex": regex}))
        body = {"messages": USER, "tools": [CLOCK], "options": GREEDY | {"num_predict": 200}}
        whole = ask(speaking, "/api/chat", **body)["message"]
        pieces = [one["message"] for one in lines(speaking, "/api/chat", **body)]
    assert (whole["thinking"], whole["content"]) == ("hmmm", "Look:")
    [called] = whole["tool_calls"]
    assert called["function"] == {"index": 0, "name": "clock", "arguments": {"zone": "UTC"}}
    assert "".join(one.get("thinking", "") for one in pieces) == "hmmm"
    assert "".join(one["content"] for one in pieces) == "Look:"
    [streamed] = [one for piece in pieces for one in piece.get("tool_calls", ())]
    assert streamed["function"] == called["function"]
    results = [{"role": "tool", "content": "1", "tool_name": "b"}, {"role": "tool", "content": "2", "tool_name": "a"}]
    calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("a", "b")]
    history = [*USER, {"role": "assistant", "thinking": "hm", "tool_calls": calls}, *results]
    asked = OllamaChatRequest.model_validate({"messages": history, "think": True, "options": {"repeat_penalty": 1.1}})
    made = asked.chat()
    first, second = [one.id for one in made.messages[1].tool_calls or ()]
    assert [one.tool_call_id for one in made.messages[2:]] == [second, first]
    assert made.messages[1].reasoning_content == "hm"
    named = [{"role": "tool", "content": "1", "tool_call_id": first}, {"role": "tool", "content": "2"}]
    made_so = OllamaChatRequest.model_validate({"messages": [*history[:2], *named]}).chat()
    assert [one.tool_call_id for one in made_so.messages[2:]] == [first, second]
    assert (made.chat_template_kwargs, made.repetition_penalty, made.stream) == ({"enable_thinking": True}, 1.1, True)
    assert ask(speaking, "/api/chat", messages=history, think="low")["message"]["content"]


def test_what_is_said_of_the_model(speaking: Serving, server: Serving) -> None:
    [model] = speaking.get("/api/tags").json()["models"]
    assert model["model"] == "quire-embedded"
    assert [one["name"] for one in speaking.get("/api/ps").json()["models"]] == ["quire-embedded"]
    shown = speaking.post("/api/show", model="quire-embedded").json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    about = shown["model_info"]
    assert about[f"{about['general.architecture']}.context_length"] == 1024
    assert speaking.get("/api/version").json()["version"].count(".") == 2
    assert server.get("/api/tags").status == 404  # without --ollama
    assert server.post("/api/chat", messages=USER).status == 404


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {"messages": USER, "model": "m"}, "there is no model 'm'"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, "messages[0].images is ['x']"),
        ("/api/chat", {"messages": USER, "options": {"mirostat": 1}}, "options.mirostat is 1"),
        ("/api/chat", {"messages": USER, "options": {"temperature": -1}}, "temperature is -1"),
        ("/api/chat", {"messages": USER, "options": {"temprature": 1}}, "did you mean 'temperature'"),
        ("/api/chat", {"messages": USER, "temperature": 1}, "use options.temperature"),
        ("/api/generate", {"prompt": "a", "context": [1]}, "send the whole conversation to /api/chat"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system cannot be used, because raw is true"),
        ("/api/generate", {"prompt": "a" * 30_000}, "maximum context length"),
        ("/api/generate", {"prompt": "a", "format": "xml"}, "format"),
        ("/api/show", {"model": "m"}, "there is no model 'm'"),
    ],
)
def test_errors_are_ollamas(speaking: Serving, path: str, body: dict[str, Any], words: str) -> None:
    answer = speaking.post(path, **body)
    assert answer.status == (404 if "no model" in words else 400)
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]
