"""What programs send that are no packages of Python: bodies as their sources make them, in words of our own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.serving import Answer, Serving

MODEL = "quire-embedded"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "a queue"}
TURNS = [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "class Queue: ..."}, USER]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a queue", "cache_control": {"type": "ephemeral"}}]}]
READ = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
CALLED = [
    USER,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "nothing"},
]
# What Open WebUI notes for its own server, and sends to others from a browser.
NOTED = {
    "session_id": "s",
    "chat_id": "c",
    "id": "m",
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": True},
    "features": {"web_search": False, "image_generation": False, "code_interpreter": False, "memory": False},
    "metadata": {"chat_id": "c", "message_id": "m", "task": "title_generation", "variables": {"{{USER_NAME}}": "A"}},
    "variables": {"{{CURRENT_DATE}}": "2026-01-01"},
    "params": {},
    "tool_servers": [],
    "model_item": {"id": MODEL, "owned_by": "openai"},
}
REPORTED = "features, variables, params, tool_servers"
STOPS = [
    "<fim_prefix>",
    "<fim_suffix>",
    "<fim_middle>",
    "<|endoftext|>",
    "\n\n",
    "\r\n\r\n",
    "/src/",
    "#- coding: utf-8",
    "```",
]
KEYWORDS = [
    f"\n{word}" for word in "function class module export import const let interface type enum async abstract".split()
]
LEFT: dict[str, Any] = {"temperature": 0.7, "max_tokens": 12}
TASK = {"model": MODEL, "stream": False, "max_completion_tokens": 12, "metadata": NOTED["metadata"]}
# Who, where, what, and the fields that the answer names as without effect.
BODIES: list[tuple[str, str, dict[str, Any], str]] = [
    ("Open WebUI, a chat", CHAT, {"model": MODEL, "messages": TURNS, "stream": True, "max_tokens": 12}, ""),
    (
        "Open WebUI, from a browser",
        CHAT,
        {"model": MODEL, "messages": TURNS, "stream": True, "stream_options": {"include_usage": True}} | LEFT | NOTED,
        REPORTED,
    ),
    ("Open WebUI, with a context", CHAT, {"model": MODEL, "messages": [USER], "num_ctx": 4096} | LEFT, "num_ctx"),
    ("Open WebUI, a title", CHAT, TASK | {"messages": [{"role": "user", "content": "A title for: a queue"}]}, ""),
    ("Open WebUI, tags", CHAT, TASK | {"messages": [{"role": "user", "content": "JSON tags of: a queue"}]}, ""),
    ("Open WebUI, tools", CHAT, {"model": MODEL, "messages": CALLED, "tools": [READ], "stream": True} | LEFT, ""),
    ("Open WebUI, documents", "/v1/embeddings", {"model": MODEL, "input": ["a", "b"]}, ""),
    (
        "Open WebUI, Ollama's chat",
        "/api/chat",
        {"model": MODEL, "messages": TURNS, "stream": True, "keep_alive": "5m", "format": None}
        | {"options": {"num_ctx": 4096, "num_predict": 12, "temperature": 0.8, "repeat_last_n": -1, "use_mmap": True}},
        "",
    ),
    ("Open WebUI, Ollama's documents", "/api/embed", {"model": MODEL, "input": ["a"], "truncate": True}, ""),
    ("aider", CHAT, {"model": MODEL, "messages": TURNS, "temperature": 0, "stream": True, "max_tokens": 12}, ""),
    ("aider, cached", CHAT, {"model": MODEL, "messages": PARTS, "stream": True, "max_tokens": 12}, ""),
    ("aider, kept warm", CHAT, {"model": MODEL, "messages": PARTS, "max_tokens": 1, "stream": False}, ""),
    ("aider, reasoning", CHAT, {"model": MODEL, "messages": [USER], "reasoning_effort": "high", "max_tokens": 12}, ""),
    (
        "aider, a function",
        CHAT,
        {"model": MODEL, "messages": [USER], "tools": [READ], "stream": False, "max_tokens": 200, "temperature": 0}
        | {"tool_choice": {"type": "function", "function": {"name": "read_file"}}},
        "",
    ),
    ("Continue", CHAT, {"model": MODEL, "messages": TURNS, "max_tokens": 4096, "stop": STOPS, "stream": True}, ""),
    (
        "Continue, an agent",
        CHAT,
        {"model": MODEL, "messages": CALLED, "tools": [READ], "parallel_tool_calls": False, "stream": True}
        | {"stream_options": {"include_usage": True}, "max_completion_tokens": 12},
        "",
    ),
    (
        "Continue, a completion",
        COMPLETIONS,
        {"model": MODEL, "prompt": "<fim_prefix>import <fim_suffix>\n<fim_middle>", "max_tokens": 12}
        | {"temperature": 0.01, "stream": True, "stop": [*STOPS, *KEYWORDS]},
        "",
    ),
    ("Continue, an index", "/v1/embeddings", {"model": MODEL, "input": ["a", "b"], "encoding_format": "float"}, ""),
    ("Continue, a rerank", "/v1/rerank", {"model": MODEL, "query": "a", "documents": ["a", "b"]}, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(("program", "path", "body", "reported"), BODIES, ids=[one[0] for one in BODIES])
def test_what_programs_send(speaking: Serving, program: str, path: str, body: dict[str, Any], reported: str) -> None:
    answer = speaking.ask("POST", path, body, {"Authorization": "Bearer none", "X-Title": "A program"})
    assert answer.status == 200, answer.body
    assert answer.headers.get("x-quire-ignored-fields", "") == reported
    assert text_of(answer, path, is_streamed=body.get("stream", False))


def text_of(answer: Answer, path: str, *, is_streamed: bool) -> str:
    """What the programs take from an answer, as they read it."""
    if path == "/api/chat":
        return "".join(json.loads(line)["message"]["content"] for line in answer.body.splitlines())
    if path in ("/v1/embeddings", "/api/embed", "/v1/rerank"):
        found = answer.json()
        return str(found.get("data") or found.get("embeddings") or found["results"])
    if not is_streamed:
        message = answer.json()["choices"][0]["message"]
        return str(message["content"] or message["tool_calls"][0]["function"]["arguments"])
    chunks = answer.events()
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] in ("stop", "length", "tool_calls")
    return "".join(one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices)


def test_what_programs_look_up(speaking: Serving) -> None:
    [model] = speaking.get("/v1/models").json()["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    [named] = speaking.get("/api/tags").json()["models"]
    assert named["model"] == speaking.get("/api/ps").json()["models"][0]["model"] == MODEL
    assert speaking.get("/api/version").json()["version"]
    assert speaking.post("/api/show", model=MODEL).json()["model_info"]
