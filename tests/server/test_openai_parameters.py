"""Every parameter of the openai package is honoured, refused or without effect, as docs/parameters.md has it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI

from quire.server.protocol.body import Body
from tests.server.parameters import Fate, bodies, fate_of, routes
from tests.server.serving import Serving
from tests.server.test_parameters import shown, value_for

OF_THE_CLIENT = {"extra_headers", "extra_query", "extra_body", "timeout"}
MODEL = "quire-embedded"
USER = [{"role": "user", "content": "a queue"}]
SCHEMA = {"type": "object", "properties": {"on": {"enum": [True]}}, "required": ["on"], "additionalProperties": False}
CLOCK = {"name": "clock", "parameters": SCHEMA}
TOOL = {"type": "function", "function": CLOCK}
FORMAT = {"type": "json_schema", "name": "a", "schema": SCHEMA}
LENGTH = 16  # so that something is said again, which penalties forbid
COMMON = {"model": MODEL, "temperature": 0}
USUAL: dict[str, dict[str, Any]] = {
    "/v1/completions": COMMON | {"prompt": "import os\n", "max_tokens": LENGTH},
    "/v1/chat/completions": COMMON | {"messages": USER, "max_tokens": LENGTH},
    "/v1/responses": COMMON | {"input": "a queue", "max_output_tokens": LENGTH},
    "/v1/embeddings": {"model": MODEL, "input": "a queue"},
}
Answer = dict[str, Any]
Check = Callable[[Answer, Answer], bool]  # an answer, and the usual one


def texts(answer: Answer) -> list[str]:
    if "output" in answer:
        return [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
    return [one["text"] if "text" in one else one["message"]["content"] for one in answer["choices"]]


def other(answer: Answer, usual: Answer) -> bool:
    return texts(answer) != texts(usual)


def generated(count: int) -> Check:
    return lambda answer, _: answer["usage"].get("completion_tokens", answer["usage"].get("output_tokens")) == count


def choices(count: int) -> Check:
    return lambda answer, _: len(answer["choices"]) == count


def prompted(answer: Answer, usual: Answer) -> bool:
    """The prompt was another one."""
    name = "input_tokens" if "output" in answer else "prompt_tokens"
    return bool(answer["usage"][name] != usual["usage"][name])


def is_formed(answer: Answer, usual: Answer) -> bool:
    return [json.loads(text) for text in texts(answer)] == [{"on": True}]


def num_calls(count: int) -> Check:
    def check(answer: Answer, usual: Answer) -> bool:
        if "output" in answer:
            called = [item["name"] for item in answer["output"] if item["type"] == "function_call"]
        else:
            called = [one["function"]["name"] for one in answer["choices"][0]["message"]["tool_calls"]]
        return called == ["clock"] * count

    return check


def scored(answer: Answer, usual: Answer) -> bool:
    if "output" in answer:
        return len(answer["output"][0]["content"][0]["logprobs"][0]["top_logprobs"]) == 2
    found = answer["choices"][0]["logprobs"]
    top = found["top_logprobs"][0] if "top_logprobs" in found else found["content"][0]["top_logprobs"]
    return len(top) == 2


def echoed(name: str, value: Any) -> tuple[dict[str, Any], Check]:
    """A parameter of a response that comes back in it."""
    return {name: value}, lambda answer, _: answer[name] == value


SAMPLED = {"temperature": 3.0, "seed": 1}
DRAWN: dict[str, tuple[dict[str, Any], Check]] = {
    "frequency_penalty": ({"frequency_penalty": 2.0}, other),
    "logit_bias": ({"logit_bias": {"88": 100}}, lambda answer, _: texts(answer) == ["x" * LENGTH]),
    "max_tokens": ({"max_tokens": 3}, generated(3)),
    "n": ({"n": 2}, choices(2)),
    "presence_penalty": ({"presence_penalty": 2.0}, other),
    "seed": (SAMPLED, other),
    "stop": ({"stop": ["e"]}, lambda answer, _: "e" not in texts(answer)[0]),
    "temperature": (SAMPLED, other),
    "top_p": (SAMPLED | {"top_p": 1e-6}, lambda answer, usual: texts(answer) == texts(usual)),
}
KEPT: dict[str, tuple[dict[str, Any], Check]] = {  # tests/server/test_sessions.py has their effect on the cache
    "prompt_cache_key": ({"prompt_cache_key": "a"}, lambda answer, usual: texts(answer) == texts(usual)),
    "prompt_cache_retention": ({"prompt_cache_retention": "24h"}, lambda answer, usual: texts(answer) == texts(usual)),
}
CALL = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 60}
OF_RESPONSES = {"tools": [CLOCK | {"type": "function"}], "tool_choice": "required", "max_output_tokens": 60}
# What is given for a parameter that is honoured, and how it is seen.
HONOURED: dict[str, dict[str, tuple[dict[str, Any], Check]]] = {
    "/v1/completions": DRAWN
    | {
        "best_of": ({"best_of": 2, "seed": 1}, choices(1)),
        "echo": ({"echo": True}, lambda answer, usual: texts(answer)[0] == "import os\n" + texts(usual)[0]),
        "logprobs": ({"logprobs": 2}, scored),
        "prompt": ({"prompt": "class A:\n"}, prompted),
    },
    "/v1/chat/completions": DRAWN
    | KEPT
    | {
        "logprobs": ({"logprobs": True, "top_logprobs": 2}, scored),
        "max_completion_tokens": ({"max_tokens": openai.omit, "max_completion_tokens": 3}, generated(3)),
        "messages": ({"messages": [*USER, *USER]}, prompted),
        "parallel_tool_calls": (CALL | {"parallel_tool_calls": False}, num_calls(1)),
        "reasoning_effort": ({"reasoning_effort": "low"}, prompted),
        "response_format": (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            is_formed,
        ),
        "tool_choice": (CALL | {"parallel_tool_calls": False}, num_calls(1)),
        "tools": (CALL, prompted),
        "top_logprobs": ({"logprobs": True, "top_logprobs": 2}, scored),
    },
    "/v1/responses": KEPT
    | {
        "include": (
            {"include": ["message.output_text.logprobs"]},
            lambda answer, _: len(answer["output"][0]["content"][0]["logprobs"]) == LENGTH,
        ),
        "input": ({"input": "two queues, please"}, prompted),
        "instructions": ({"instructions": "Be short."}, prompted),
        "max_output_tokens": ({"max_output_tokens": 3}, generated(3)),
        "max_tool_calls": echoed("max_tool_calls", 3),
        "metadata": echoed("metadata", {"a": "b"}),
        "parallel_tool_calls": (OF_RESPONSES | {"parallel_tool_calls": False}, num_calls(1)),
        "reasoning": ({"reasoning": {"effort": "low"}}, prompted),
        "temperature": ({"temperature": 100.0}, other),
        "text": ({"text": {"format": FORMAT}}, is_formed),
        "tool_choice": (OF_RESPONSES | {"parallel_tool_calls": False}, num_calls(1)),
        "tools": (OF_RESPONSES, prompted),
        "top_logprobs": ({"top_logprobs": 2}, scored),
        "top_p": ({"temperature": 3.0, "top_p": 1e-6}, lambda answer, usual: texts(answer) == texts(usual)),
        "truncation": echoed("truncation", "auto"),
    },
    "/v1/embeddings": {
        "dimensions": ({"dimensions": 3, "encoding_format": "float"}, lambda a, _: len(a["data"][0]["embedding"]) == 3),
        "encoding_format": ({"encoding_format": "base64"}, lambda a, _: isinstance(a["data"][0]["embedding"], str)),
        "input": ({"input": ["a", "b"]}, lambda answer, _: len(answer["data"]) == 2),
    },
}  # fmt: skip
# Asked for in ways of their own below.
STREAMS = {"stream", "stream_options"}


@pytest.mark.slow
def test_every_parameter_is_honoured_refused_or_without_effect(speaking: Serving) -> None:
    client = OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0)
    functions: dict[str, Any] = {
        "/v1/completions": client.completions,
        "/v1/chat/completions": client.chat.completions,
        "/v1/responses": client.responses,
        "/v1/embeddings": client.embeddings,
    }
    kinds: dict[str, type[Body]] = {path: kind for kind, paths in bodies(routes()).items() for path in paths}
    counts = dict.fromkeys(Fate, 0)
    for path, function in functions.items():
        kind, usual_body = kinds[path], USUAL[path]
        ask = function.with_raw_response.create
        usual = ask(**usual_body).http_response.json()
        for name in inspect.signature(function.create).parameters.keys() - OF_THE_CLIENT:
            assert name in kind.model_fields, f"{path}: nothing is said of {name}"
            fate, why = fate_of(kind, name)
            counts[fate] += 1
            if name == "model":
                with pytest.raises(openai.NotFoundError, match="there is no model 'other'"):
                    ask(**usual_body | {"model": "other"})
            elif name == "suffix":  # for tokenizers that have the tokens for it: tests/server/test_completions.py
                with pytest.raises(openai.BadRequestError, match="suffix"):
                    ask(**usual_body, suffix="a")
            elif name in STREAMS:
                chunks = list(function.create(**usual_body, stream=True, **streamed(path)))
                assert len(chunks) > 5, (path, name)
                assert path == "/v1/responses" or chunks[-1].usage.completion_tokens == LENGTH
            elif fate is Fate.REFUSED:
                with pytest.raises(openai.BadRequestError) as caught:
                    ask(**usual_body, **{name: value_for(kind, name, usual_body)})
                assert name in str(caught.value), (path, name, caught.value)
                assert why.partition("; `")[0] in str(caught.value), (path, name, caught.value)
            else:
                given, check = HONOURED[path][name] if fate is Fate.HONOURED else ({}, same)
                raw = ask(**usual_body | (given or {name: value_for(kind, name, usual_body)}))
                assert check(raw.http_response.json(), usual), (path, name, raw.text)
                assert "x-quire-ignored-fields" not in raw.headers, (path, name)
    assert inspect.signature(client.models.list).parameters.keys() == OF_THE_CLIENT
    assert counts[Fate.HONOURED] >= 40
    assert counts[Fate.REFUSED] >= 15
    assert counts[Fate.WITHOUT_EFFECT] >= 8


def streamed(path: str) -> dict[str, Any]:
    return {} if path == "/v1/responses" else {"stream_options": {"include_usage": True}}


def same(answer: Answer, usual: Answer) -> bool:
    return shown(answer) == shown(usual)
