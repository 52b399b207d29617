"""What clients of a fleet ask, what they receive, and how it differs from what a plain server answers."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from quire.frontend.requests import seed_of

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
BASES = (
    "import os\nimport sys\n\n\ndef main(path):\n    for name in sorted(os.listdir(path)):\n        print(name)\n",
    "class Tree:\n    def __init__(self, left=None):\n        self.left = left\n        self.right = None\n",
    "漢字 🙂 für 漢字 🙂 für 漢字 🙂 für ",
)
WORDS = ("def ", "f(x)", ":\n", "    return ", "x", " + ", "1", "\n", "# a sorted list\n", "é", "for i in range(10):\n")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 8},
        "kind": {"enum": ["größe", "漢字", "plain"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
NEVER_COMPARED = ("id", "created")


@dataclass
class Ask:
    """A request."""

    kind: str
    path: str
    body: dict[str, Any]
    key: str  # Idempotency-Key

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


@dataclass
class Answer:
    """What came, over as many connections as it took."""

    status: int = 0
    body: Any = None  # of a whole answer, or what was refused
    name: str = ""
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)  # of a stream, put together
    usage: dict[str, int] | None = None
    errors: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)  # of a stream's events, by time.monotonic
    last_id: str | None = None
    is_done: bool = False
    num_connections: int = 0


# ------------------------------------------------------------------------------------------------------- asking


def draw_prompt(rng: random.Random) -> str:
    """A text of up to some 300 tokens, which often begins like others."""
    shared = rng.choice(BASES) * rng.choice((0, 0, 1, 1, 2, 4))
    return shared + "".join(rng.choices(WORDS, k=rng.choice((1, 3, 10, 40)))) or "x"


def draw_ask(rng: random.Random, key: str) -> Ask:
    """A request of some kind."""
    kind = rng.choice(list(KINDS))
    path, body = KINDS[kind](rng)
    if path != EMBEDDINGS:
        if kind == "several" or (kind != "beam" and rng.random() < 0.8):
            body["seed"] = rng.randrange(2**63)
        body.setdefault("max_tokens", rng.choice((1, 8, 40, 60, 60, 100)))
        if kind not in WHOLE_ONLY and rng.random() < 0.7:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if body.pop("is_chat", False):
            path = CHAT
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    return Ask(kind, path, body, key)


def _completion(rng: random.Random, **own: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": draw_prompt(rng), "ignore_eos": rng.random() < 0.8} | own


def _either(rng: random.Random, **own: Any) -> tuple[str, dict[str, Any]]:
    return _completion(rng, is_chat=rng.random() < 0.4, **own)


def _logprobs(rng: random.Random) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.4:
        return _completion(rng, is_chat=True, logprobs=True, top_logprobs=3, temperature=0.8)
    asked = {"prompt_logprobs": 2} if rng.random() < 0.5 else {}
    return _completion(rng, logprobs=rng.choice((0, 3)), n=rng.choice((1, 2)), **asked)


def _grammar(rng: random.Random) -> tuple[str, dict[str, Any]]:
    if rng.random() < 0.5:
        return _either(rng, regex=rng.choice(("([a-z]{3,8} ){5,20}[.]", "(🙂|漢|字|ü|[0-9]){20,60}")))
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA}}
    return _either(rng, response_format=form, max_tokens=200)


def _stops(rng: random.Random) -> tuple[str, dict[str, Any]]:
    shown = {"include_stop_str_in_output": rng.random() < 0.3}
    if rng.random() < 0.6:
        stop = rng.choice((["字漢🙂"], ["🙂漢", "ü字"], ["漢漢漢"], "üü字"))
        return _either(rng, regex="(🙂|漢|字|ü){30,60}", stop=stop, max_tokens=160, **shown)
    stop = rng.choice((["\n\n\n"], ["self.left", "return x"], [")\n", "=="]))
    return _either(rng, stop=stop, temperature=0.7, min_tokens=rng.choice((0, 30)), max_tokens=120, **shown)


def _penalties(rng: random.Random) -> tuple[str, dict[str, Any]]:
    values = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    return _either(rng, **values, min_tokens=30, max_tokens=60, temperature=rng.choice((0, 0.9)), ignore_eos=False)


def _echo(rng: random.Random) -> tuple[str, dict[str, Any]]:
    asked = {"logprobs": 1} if rng.random() < 0.5 else {}
    return _completion(rng, echo=True, max_tokens=rng.choice((0, 20, 80)), **asked)


def _several(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return _completion(rng, prompt=[draw_prompt(rng) for _ in range(rng.choice((2, 3)))], n=rng.choice((1, 2)))


def _embeddings(rng: random.Random) -> tuple[str, dict[str, Any]]:
    return EMBEDDINGS, {"input": [draw_prompt(rng) for _ in range(rng.choice((1, 3)))]}


KINDS: dict[str, Callable[[random.Random], tuple[str, dict[str, Any]]]] = {
    "greedy": lambda rng: _either(rng, temperature=0),
    "sampled": lambda rng: _either(rng, temperature=0.9, top_p=0.95),
    "bytes": lambda rng: _either(rng, temperature=3.0),
    "grammar": _grammar,
    "n": lambda rng: _either(rng, n=3),
    "penalties": _penalties,
    "logprobs": _logprobs,
    "stops": _stops,
    "echo": _echo,
    "several": _several,
    "best_of": lambda rng: _completion(rng, best_of=3, n=rng.choice((1, 2))),
    "beam": lambda rng: _either(rng, use_beam_search=True, n=3, temperature=0, max_tokens=12),
    "embeddings": _embeddings,
}
WHOLE_ONLY = ("best_of", "beam", "embeddings")

# ----------------------------------------------------------------------------------------------------- receiving


async def receive(
    http: aiohttp.ClientSession, url: str, ask: Ask, answer: Answer, on_event: Callable[[], None] = lambda: None
) -> None:
    """Ask once more for what an answer lacks. Raises what aiohttp raises where the connection ends before that."""
    headers = {"Idempotency-Key": ask.key}
    if answer.last_id is not None:
        headers["Last-Event-ID"] = answer.last_id
    answer.num_connections += 1
    async with http.post(url + ask.path, json=ask.body, headers=headers) as response:
        answer.status = response.status
        if response.status != 200 or not ask.is_stream:
            answer.body = await response.json(content_type=None)
            answer.name = answer.body.get("id", "")
            answer.is_done = True
            return
        rest = b""
        async for piece in response.content.iter_any():
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                take(answer, event)
                on_event()
    if not answer.is_done:
        raise aiohttp.ClientPayloadError("the stream ended without [DONE]")


async def receive_plain(http: aiohttp.ClientSession, url: str, ask: Ask, name: str) -> Answer:
    """What a plain server answers. A request without a seed has one that follows from its name in the fleet."""
    body = dict(ask.body)
    if ask.path != EMBEDDINGS and ask.kind != "beam" and "seed" not in body and name:
        body["seed"] = seed_of(f"{name}-0")
    answer = Answer()
    await receive(http, url, replace(ask, body=body), answer)
    return answer


def take(answer: Answer, event: bytes) -> None:
    """Take in an event of a stream."""
    lines = dict(line.split(": ", 1) for line in event.decode().split("\n"))
    answer.last_id = lines.get("id", answer.last_id)
    if lines["data"] == "[DONE]":
        answer.is_done = True
        return
    chunk = json.loads(lines["data"])
    if "error" in chunk:
        answer.errors.append(json.dumps(chunk["error"]))
        return
    answer.name = chunk["id"]
    answer.times.append(time.monotonic())
    if chunk.get("usage"):
        answer.usage = chunk["usage"]
    for choice in chunk["choices"]:
        _add(answer.choices.setdefault(choice["index"], {"text": "", "ends": []}), choice)


def _add(whole: dict[str, Any], choice: dict[str, Any]) -> None:
    """Put a piece of a choice after the others."""
    whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
    for call in choice.get("delta", {}).get("tool_calls", ()):
        calls = whole.setdefault("calls", [])
        if "id" in call:
            calls.append([call["id"], call["function"]["name"], ""])
        calls[-1][2] += call["function"]["arguments"]
    for name, found in (choice["logprobs"] or {}).items():
        if found is not None:
            whole.setdefault(name, []).extend(found)
    if "prompt_logprobs" in choice:
        whole.setdefault("prompt_logprobs", []).append(choice["prompt_logprobs"])
    if choice["finish_reason"] is not None:
        whole["ends"].append([choice["finish_reason"], choice["stop_reason"]])


# ----------------------------------------------------------------------------------------------------- comparing


def verdict(expected: Answer, found: Answer) -> str:
    """How an answer differs: '' (it does not), 'error', 'doubled', 'lost' or 'different'."""
    if found.errors or found.status != expected.status or not found.is_done:
        return "error"
    if expected.body is not None:
        return "" if compared(expected.body) == compared(found.body) else "different"
    if found.choices == expected.choices and compared({"usage": found.usage}) == compared({"usage": expected.usage}):
        return ""
    if found.choices == expected.choices:
        return "different"
    for index, whole in expected.choices.items():
        own = found.choices.get(index, {"text": "", "ends": []})
        if own == whole:
            continue
        if len(own["ends"]) > 1 or len(own["text"]) > len(whole["text"]):
            return "doubled"
        if whole["text"].startswith(own["text"]) and (own["text"] != whole["text"] or not own["ends"]):
            return "lost"
    return "different"


def compared(body: Any) -> Any:
    """What must be equal in two answers."""
    if not isinstance(body, dict):
        return body
    kept = {name: value for name, value in body.items() if name not in NEVER_COMPARED}
    if isinstance(kept.get("usage"), dict):
        kept["usage"] = {name: value for name, value in kept["usage"].items() if name != "prompt_tokens_details"}
    return kept
