"""The requests of a soak's clients: of every kind, valid and invalid, and the checks of each answer."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

from quire_bench.server.prompts import WORDS
from quire_bench.server.stream import error_message
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY

Fields = dict[str, Any]

NUM_STARTS = 40  # texts that many prompts begin with, so that blocks are shared
LONGEST_START = 300  # words
LARGEST_ERROR = 1e-5  # of the square of a vector's length
REGEXES = ("[0-9]{3}-[a-f]{4}", "(yes|no|perhaps)( indeed){0,3}", "[a-z]{20,40}")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["queue", "stack"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
# Path, body and the status that a server answers it with. None: GET.
BAD: tuple[tuple[str, Any, int], ...] = (
    ("/v1/completions", {"prompt": "a", "temperature": -1}, 400),
    ("/v1/completions", {"prompt": "a", "max_tokens": 10**9}, 400),
    ("/v1/completions", {"prompt": "a", "n": 10**6}, 400),
    ("/v1/completions", {"prompt": "a", "best_of": 1, "n": 2}, 400),
    ("/v1/completions", {"prompt": "a", "logprobs": 10**6}, 400),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400),
    ("/v1/completions", {"prompt": "a", "regex": "("}, 400),
    ("/v1/completions", {"prompt": "a", "regex": "a", "grammar": "start: /a/"}, 400),
    ("/v1/completions", {"prompt": "a", "model": "no-such-model"}, 404),
    ("/v1/completions", {"prompt": "a", "no_such_field": 1}, 400),
    ("/v1/completions", {"prompt": [2**31 - 1]}, 400),
    ("/v1/completions", {"prompt": [5] * 100_000}, 400),
    ("/v1/completions", {"prompt": ["a", "b"], "use_beam_search": True}, 400),
    ("/v1/completions", b'{"prompt": "a", "temperature": NaN}', 400),
    ("/v1/completions", b'{"prompt": "a"', 400),
    ("/v1/completions", b"\xff\xfe", 400),
    ("/v1/completions", None, 405),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400),
    ("/v1/embeddings", {"input": []}, 400),
    ("/v1/embeddings", {"input": "a", "dimensions": 10**9}, 400),
    ("/detokenize", {"tokens": [10**6]}, 400),
    ("/v1/no-such-route", {}, 404),
)  # fmt: skip


class Wrong(Exception):
    """An answer that is not what it must be."""


@dataclass(frozen=True)
class Ask:
    """A request, and what must be true of its answer."""

    kind: str
    path: str
    body: bytes | None  # None: GET
    check: Callable[[int, bytes], None]  # status and body of the answer; raises Wrong
    expected: str = "answered"
    may_abort: bool = False


@dataclass
class Told:
    """The content of an answer, streamed or not."""

    texts: dict[int, str] = field(default_factory=dict)  # by the index of the choice
    reasons: dict[int, str] = field(default_factory=dict)
    num_logprobs: int = 0  # tokens that came with one
    num_generated: int | None = None  # as the usage has it


class Asker:
    """Draws requests, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(f"{seed}/starts")
        self._starts = [" ".join(rng.choices(WORDS, k=rng.randint(1, LONGEST_START))) for _ in range(NUM_STARTS)]
        kinds = {
            self._completion: 30,
            self._chat: 20,
            self._logprobs: 10,
            self._beam: 8,
            self._regex: 6,
            self._schema: 6,
            self._tokenize: 8,
            self._embeddings: 8,
            self._bad: 5,
        }
        self._kinds, self._weights = list(kinds), list(accumulate(kinds.values()))

    def draw(self, rng: random.Random) -> Ask:
        """Some request."""
        [kind] = rng.choices(self._kinds, cum_weights=self._weights)
        return kind(rng)

    def canary(self) -> Ask:
        """A request whose answer is always the same."""
        body = {
            "prompt": [WORDS[0], self._starts[0]],
            "max_tokens": 24,
            "temperature": 0.8,
            "seed": 7,
            "n": 2,
            "ignore_eos": True,
        }
        return _generation("canary", "/v1/completions", body)

    # -------------------------------------------------------------------------------------------------- kinds

    def _text(self, rng: random.Random) -> str:
        return f"{rng.choice(self._starts)} {' '.join(rng.choices(WORDS, k=rng.randint(1, 40)))}"

    def _sampling(self, rng: random.Random) -> Fields:
        """Return random sampling parameters."""
        chosen: Fields = {"max_tokens": rng.choice((1, 8, 30, 100, 300)), "ignore_eos": True}
        chosen["temperature"] = rng.choice((0, 0.7, 1.3))
        chosen["n"] = rng.choice((1, 1, 1, 2, 4))
        if rng.random() < 0.6:
            chosen |= {"stream": True, "stream_options": {"include_usage": True}}
        for name, value in (("top_p", 0.9), ("top_k", 20), ("min_p", 0.05), ("frequency_penalty", 0.5), ("seed", 3),
                            ("repetition_penalty", 1.1), ("min_tokens", 1), ("cache_salt", "a tenant")):  # fmt: skip
            if rng.random() < 0.15:
                chosen[name] = value
        return chosen

    def _completion(self, rng: random.Random) -> Ask:
        body = self._sampling(rng)
        form = rng.random()
        if form < 0.6:
            body["prompt"] = self._text(rng)
        elif form < 0.8:
            body["prompt"] = rng.choices(range(FIRST_TOKEN, VOCABULARY), k=rng.randint(1, 400))
        else:
            body["prompt"] = [self._text(rng) for _ in range(rng.randint(2, 3))]
        if rng.random() < 0.2:
            body["stop"] = rng.sample(WORDS, 2)
        return _generation("completion", "/v1/completions", body)

    def _chat(self, rng: random.Random) -> Ask:
        body = self._sampling(rng) | {"messages": [{"role": "user", "content": self._text(rng)}]}
        if rng.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": rng.choice((0, 5))}
        return _generation("chat", "/v1/chat/completions", body)

    def _logprobs(self, rng: random.Random) -> Ask:
        body = self._sampling(rng) | {"prompt": self._text(rng), "logprobs": rng.choice((0, 1, 5))}
        if rng.random() < 0.6:
            body["echo"] = True
        return _generation("logprobs", "/v1/completions", body)

    def _beam(self, rng: random.Random) -> Ask:
        body = {"prompt": self._text(rng), "use_beam_search": True, "n": rng.choice((2, 4)), "temperature": 0}
        body["max_tokens"] = rng.choice((5, 30, 80))
        return _generation("beam search", "/v1/completions", body)

    def _regex(self, rng: random.Random) -> Ask:
        body = self._sampling(rng) | {"prompt": self._text(rng), "regex": rng.choice(REGEXES)}
        body.pop("min_tokens", None)  # a grammar knows itself when it is complete
        return _generation("regex", "/v1/completions", body)

    def _schema(self, rng: random.Random) -> Ask:
        form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
        body = self._sampling(rng) | {"messages": [{"role": "user", "content": "a thing"}], "response_format": form}
        body.pop("min_tokens", None)
        return _generation("json schema", "/v1/chat/completions", body)

    def _tokenize(self, rng: random.Random) -> Ask:
        return Ask("tokenize", "/tokenize", _encoded({"prompt": self._text(rng)}), _check_tokens)

    def _embeddings(self, rng: random.Random) -> Ask:
        body: Fields = {"input": [self._text(rng) for _ in range(rng.choice((1, 1, 3, 8)))]}
        if rng.random() < 0.5:
            body["dimensions"] = rng.choice((1, 16))
        check = partial(_check_embeddings, len(body["input"]))
        return Ask("embeddings", "/v1/embeddings", _encoded(body), check, may_abort=True)

    def _bad(self, rng: random.Random) -> Ask:
        path, body, status = rng.choice(BAD)
        sent = body if body is None or isinstance(body, bytes) else _encoded(body)
        return Ask("bad", path, sent, partial(_check_refusal, status), "refused")


# ------------------------------------------------------------------------------------------------- what is true


def _encoded(body: Fields) -> bytes:
    return json.dumps(body).encode()


def _generation(kind: str, path: str, body: Fields) -> Ask:
    return Ask(kind, path, _encoded(body), partial(_check_generation, body), may_abort=True)


def _check_refusal(expected: int, status: int, answer: bytes) -> None:
    if status != expected:
        raise Wrong(f"status {status}, not {expected}: {error_message(answer)}")
    if set(json.loads(answer)["error"]) != {"message", "type", "param", "code"}:
        raise Wrong(f"the error has another shape than OpenAI's: {answer[:200]!r}")


def _check_tokens(status: int, answer: bytes) -> None:
    if status != 200:
        raise Wrong(f"status {status}: {error_message(answer)}")
    shown = json.loads(answer)
    if not shown["count"] == len(shown["tokens"]) > 0:
        raise Wrong(f"a count of {shown['count']} for {len(shown['tokens'])} tokens")


def _check_embeddings(count: int, status: int, answer: bytes) -> None:
    if status != 200:
        raise Wrong(f"status {status}: {error_message(answer)}")
    vectors = [entry["embedding"] for entry in json.loads(answer)["data"]]
    if len(vectors) != count:
        raise Wrong(f"{len(vectors)} vectors for {count} inputs")
    for vector in vectors:
        if not abs(math.fsum(number * number for number in vector) - 1) < LARGEST_ERROR:
            raise Wrong(f"a vector of {len(vector)} numbers is not of length 1")


def _check_generation(body: Fields, status: int, answer: bytes) -> None:
    if status != 200:
        raise Wrong(f"status {status}: {error_message(answer)}")
    shown = read_answer(answer, bool(body.get("stream")))
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], str) else [""]
    count = body.get("n", 1) * len(prompts)
    if sorted(shown.reasons) != list(range(count)):
        raise Wrong(f"choices {sorted(shown.reasons)} have ended; expected {count} of them")
    is_free = not {"stop", "regex", "response_format", "use_beam_search"} & set(body)
    if is_free and shown.num_generated != count * body["max_tokens"]:
        raise Wrong(f"{shown.num_generated} tokens; expected {count} times {body['max_tokens']}")
    if body.get("logprobs") not in (None, False) and is_free and shown.num_logprobs < count * body["max_tokens"]:
        raise Wrong(f"{shown.num_logprobs} logprobs for {shown.num_generated} tokens")
    for index, text in shown.texts.items():
        _check_text(body, text, shown.reasons[index])


def _check_text(body: Fields, text: str, reason: str) -> None:
    if body.get("echo") and not text.startswith(body["prompt"]):
        raise Wrong(f"the echo is {text[:60]!r}, and the prompt {body['prompt'][:60]!r}")
    if reason != "stop":  # cut off
        return
    if "regex" in body and not re.fullmatch(body["regex"], text):
        raise Wrong(f"{text!r} does not match {body['regex']!r}")
    if "response_format" in body:
        try:
            thing = json.loads(text)
        except ValueError as error:
            raise Wrong(f"{text!r} is no JSON: {error}") from error
        if set(thing) != {"name", "size", "kind"} or thing["kind"] not in ("queue", "stack"):
            raise Wrong(f"{text!r} does not keep to its schema")


def read_answer(answer: bytes, is_stream: bool) -> Told:
    """Return the content of an answer of a completion or a chat. Raises Wrong if it is not whole, or an error."""
    parts = [answer]
    if is_stream:
        *events, end, rest = answer.split(b"\n\n") if answer.count(b"\n\n") > 1 else [b"", b"", answer]
        if (end, rest) != (b"data: [DONE]", b""):
            raise Wrong(f"the stream ends with {answer[-100:]!r}")
        parts = [event.removeprefix(b"data: ") for event in events]
    shown = Told()
    for part in parts:
        chunk = json.loads(part)
        if "error" in chunk:
            raise Wrong(error_message(part))
        for choice in chunk["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice.get("delta", choice.get("message"))
            shown.texts[index] = shown.texts.get(index, "") + _text_of(text)
            if choice["finish_reason"] is not None:
                shown.reasons[index] = choice["finish_reason"]
            logprobs = choice.get("logprobs") or {}
            shown.num_logprobs += len(logprobs.get("tokens") or logprobs.get("content") or ())
        if chunk.get("usage") is not None:
            shown.num_generated = chunk["usage"]["completion_tokens"]
    return shown


def _text_of(told: str | Fields) -> str:
    return told if isinstance(told, str) else told.get("content") or ""
