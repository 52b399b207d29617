"""What has brought other servers down, replayed on this one: a test for each kind of failure, named by where it was.

See test_told for servers that do not start, test_connection for what is below requests, test_robust for the rest.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import pytest
from pydantic import ValidationError
from starlette.types import Message, Receive, Scope, Send

from quire.engine.engine import Engine
from quire.frontend import request_factory
from quire.request import Request
from quire.server.api import beams as beams_module
from quire.server.api import local_engine_client
from quire.server.api import local_engine_client as worker_module
from quire.server.api import service as service_module
from quire.server.http.guard import Guard
from quire.server.protocol.chat import ChatRequest
from quire.server.protocol.completions import CompletionRequest
from tests.server.fuzz import LONGEST_MESSAGE, canary
from tests.server.serving import Answer, Serving, serving
from tests.server.test_robust import hook, runner, until

pytestmark = pytest.mark.slow

SRC = Path(__file__).parents[2] / "src"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]


def raw(server: Serving, path: str, field: str, value: str) -> Answer:
    """A small request in which one field has some JSON, or what is like it."""
    given: dict[str, Any] = {"max_tokens": 2}
    given |= {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
    if path == "/detokenize":
        given = {}
    given.pop(field, None)
    body = json.dumps(given)[:-1] + ("" if not given else ", ") + f"{json.dumps(field)}: {value}}}"
    return server.ask("POST", path, body.encode(), {"Content-Type": "application/json"})


def assert_refused(answer: Answer) -> None:
    assert answer.status == 400, answer.body
    assert len(answer.error()["message"]) <= LONGEST_MESSAGE


def assert_serves(server: Serving) -> None:
    """The engine lives, and has nothing left to do."""
    assert server.post(COMPLETIONS, prompt="import os\n", max_tokens=2).status == 200
    assert server.is_idle()


@pytest.fixture(scope="module", autouse=True)
def song(server: Serving) -> Iterator[None]:
    """After all of this, what is answered is what was answered before."""
    first = canary(server)
    yield
    assert canary(server) == first


# ----------------------- n, best_of, min_tokens, logprobs, stop lists without a bound: CVE-2026-34756, vllm#5907

COUNTS = ["-1", "2147483648", "9223372036854775808", "1" + "0" * 400, '"2"', "1.5", "true", "[1]", "{}", "1e999", "NaN"]
SHARED_COUNTS = ("n", "min_tokens", "prompt_logprobs", "max_tokens", "top_k", "priority", "seed")


@pytest.mark.parametrize(
    ("path", "fields"),
    [(COMPLETIONS, (*SHARED_COUNTS, "best_of", "logprobs")), (CHAT, (*SHARED_COUNTS, "top_logprobs"))],
)
def test_counts_are_bounded(server: Serving, path: str, fields: tuple[str, ...]) -> None:
    for field in fields:
        for value in COUNTS:
            if value == "-1" and field in ("top_k", "priority", "seed"):
                continue  # which may be negative
            if value == "2147483648" and field == "seed":
                continue
            assert_refused(raw(server, path, field, value))
    assert_serves(server)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a"] * 65),
        ("stop", "a" * 257),
        ("stop", ["a", ""]),
        ("stop_token_ids", [1] * 257),
        ("n", 129),
        ("n", 0),
        ("regex", "a" * 65_537),
        ("cache_salt", "a" * 257),
        ("min_tokens", 3),
        ("prompt", ["a"] * 1025),
        ("messages", MESSAGES * 4097),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4097}]),
        ("messages", [{"role": "r" * 65, "content": "a"}]),
    ],
)
def test_lists_and_texts_are_bounded(server: Serving, path: str, field: str, value: Any) -> None:
    if field == {COMPLETIONS: "messages", CHAT: "prompt"}[path]:
        return  # it is no field there
    assert_refused(raw(server, path, field, json.dumps(value)))


def test_samples_are_counted_before_they_are_made(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand prompts and n = 128 in one small body are 131,072 requests."""
    monkeypatch.setattr(request_factory, "make_requests", lambda *_: pytest.fail("they were made"))
    for body in ({"n": 128}, {"best_of": 128}, {"n": 2, "stream": True}):
        refused = server.post(COMPLETIONS, prompt=[[5] * 9] * 1024, max_tokens=1, **body)
        assert refused.status == 400
        assert "samples" in refused.error()["message"]


def test_logprobs_of_prompts_are_counted_before_they_are_made(server: Serving) -> None:
    many = {"prompt": [[5] * 900] * 100, "max_tokens": 1}
    for body, param in (({"prompt_logprobs": 20}, "prompt_logprobs"), ({"echo": True, "logprobs": 20}, "logprobs")):
        refused = server.post(COMPLETIONS, **many, **body)
        assert refused.status == 400
        assert (refused.error()["param"], "524288" in refused.error()["message"]) == (param, True)
    assert_serves(server)


def test_logprobs_of_samples_are_counted_before_they_are_made(server: Serving) -> None:
    """Some hundred bytes of a body would be hundreds of MiB of an answer."""
    room = server.service.model.max_model_len
    for path, body, param in (
        (COMPLETIONS, {"n": 128, "max_tokens": 500, "logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"n": 128, "max_tokens": None, "logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"n": 64, "max_tokens": 500, "logprobs": 20, "stream": True}, "logprobs"),
        (COMPLETIONS, {"prompt": ["a"] * 128, "max_tokens": 500, "logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"prompt": ["a"] * 16, "best_of": 128, "max_tokens": 500}, "best_of"),
        (CHAT, {"n": 128, "max_tokens": 400, "logprobs": True, "top_logprobs": 20}, "top_logprobs"),
        (CHAT, {"n": 128, "logprobs": True, "top_logprobs": 20, "stream": True}, "top_logprobs"),
    ):
        given: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": MESSAGES}
        refused = server.post(path, **given | body)
        assert refused.status == 400, body
        assert (refused.error()["param"], "524288" in refused.error()["message"]) == (param, True)
    # As many as there may be: no more tokens are counted than there is room for.
    tokens = [5] * (room - 2)
    assert server.post(COMPLETIONS, prompt=tokens, max_tokens=None, logprobs=20, n=2, temperature=1).status == 200
    assert_serves(server)


def test_a_bad_body_makes_few_errors() -> None:
    """Each error would cost what a request does, and a body has room for a million."""
    unknown = {f"k{i}": 1 for i in range(5000)}
    bad = [
        {"prompt": "a", **unknown},
        {"prompt": [[1, "a"] * 500] * 500},
        {"prompt": "a", "stop_token_ids": ["a"] * 256},
        {"messages": [{}] * 4096},
        {"messages": [unknown]},
        {"messages": [{"role": "a", "content": [{}] * 4096}] * 100},
        {"messages": [{"role": "a", "content": [unknown]}]},
    ]
    for body in bad:
        with pytest.raises(ValidationError) as caught:
            (ChatRequest if "messages" in body else CompletionRequest).model_validate(body)
        assert caught.value.error_count() < 200


def test_long_texts_keep_nobody_waiting(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = server.service.tokenizer
    threads: list[int] = []

    def noting(old: Any) -> Any:
        def note(*given: Any, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return old(*given, **options)

        return note

    async def own() -> int:
        return threading.get_ident()

    for name in ("encode", "decode"):
        monkeypatch.setattr(tokenizer, name, noting(getattr(tokenizer, name)))
    for path, body in (
        (COMPLETIONS, {"prompt": ["some words"] * 1000, "max_tokens": 5, "min_tokens": 9}),
        (COMPLETIONS, {"prompt": "a" * 10_000}),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 10_000}]}),
        ("/tokenize", {"prompt": "a" * 10_000}),
        ("/detokenize", {"tokens": [9] * 10_000}),
    ):
        server.post(path, **body)
    assert server.loop is not None
    assert len(threads) == 1004
    assert asyncio.run_coroutine_threadsafe(own(), server.loop).result(20) not in threads


def test_samples_of_a_long_prompt_cost_the_event_loop_nothing(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are gone through once, whatever n is, and copied on another thread."""
    gone_through: list[str] = []
    threads: list[int] = []
    made: list[int] = []

    def checks(engine: Engine, request: Request, name: str, *tokens: Any) -> None:
        if name == "prompt":
            gone_through.append(name)
            threads.append(threading.get_ident())
        old(engine, request, name, *tokens)

    def notes(function: Any) -> Any:
        def note(*given: Any, **options: Any) -> Any:
            made.append(threading.get_ident())
            return function(*given, **options)

        return note

    async def own() -> int:
        return threading.get_ident()

    old = Engine._check_tokens
    monkeypatch.setattr(service_module, "LONG_TEXT", 500)
    monkeypatch.setattr(Engine, "_check_tokens", checks)
    for module, name in ((request_factory, "make_requests"), (worker_module, "BeamDriver"),
                         (beams_module, "_text_after"), (request_factory, "embedding_request")):  # fmt: skip
        monkeypatch.setattr(module, name, notes(getattr(module, name)))
    prompt = [5] * 900
    for path, body, prompts in (
        (COMPLETIONS, {"prompt": prompt, "n": 8}, 1),
        (COMPLETIONS, {"prompt": [prompt] * 6, "stream": True}, 6),
        (COMPLETIONS, {"prompt": prompt, "n": 8, "use_beam_search": True}, 1),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 900}], "n": 8}, 1),
        ("/v1/embeddings", {"input": [prompt] * 6}, 6),
    ):
        gone_through.clear()
        answer = server.post(path, **body, **({} if "input" in body else {"max_tokens": 1}))
        assert answer.status == 200, answer.body
        assert len(gone_through) == prompts, (path, body)
    assert server.loop is not None
    loops = asyncio.run_coroutine_threadsafe(own(), server.loop).result(20)
    engines = server.on_engine(threading.get_ident)
    assert (len(threads), len(made)) == (1 + 6 + 1 + 1 + 6, 1 + 6 + (1 + 8) + 1 + 6)
    assert {loops, engines}.isdisjoint([*threads, *made])


def test_the_first_token_that_is_none_is_named(server: Serving) -> None:
    size = server.service.engine_client.engine.vocab_size
    for count in (20, 900):
        tokens = [5] * count
        tokens[-3:] = [size - 1, size, size + 7]
        for body in ({"n": 1}, {"n": 8}, {"n": 8, "stream": True}, {"n": 8, "use_beam_search": True}):
            refused = server.post(COMPLETIONS, prompt=tokens, max_tokens=1, **body)
            assert refused.status == 400
            message = f"prompt[{count - 2}] is {size}; token ids of this model lie in 0..{size - 1}"
            assert refused.error()["message"].endswith(message)
    assert_serves(server)


def test_other_threads_run_while_a_text_is_taken_apart(server: Serving) -> None:
    counted, stop = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not stop.is_set():
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    until(lambda: counted > 0)

    def counted_meanwhile() -> int:
        before = counted
        server.service.tokenizer.encode("a" * 500_000)
        return counted - before

    try:
        assert any(counted_meanwhile() > 1000 for _ in range(50))  # a busy machine may give the other thread no time
    finally:
        stop.set()
        thread.join()


# ----------------------------------------------------------------- NaN and infinity kill the engine: CVE-2026-54235

FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
)
NO_FLOATS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", '"NaN"', '"Infinity"', '"1"', "true", "[1]", "1e308",
             "-1e308", "1" + "0" * 400, "9" * 5000]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_numbers_are_finite_and_bounded(server: Serving, path: str) -> None:
    for field in FLOATS:
        for value in NO_FLOATS:
            assert_refused(raw(server, path, field, value))
    assert_serves(server)


def test_numbers_at_the_edge_are_served(server: Serving) -> None:
    edges = {
        "temperature": ["-0.0", "0", "5e-324", "1e-300", "1e-30", "100"],
        "top_p": ["0.000001", "1", "1.0"],
        "min_p": ["-0.0", "5e-324", "1"],
        "presence_penalty": ["-2", "2", "1e-300"],
        "frequency_penalty": ["-2", "2"],
        "repetition_penalty": ["0.01", "100"],
        "seed": ["-9223372036854775808", "9223372036854775807", "0", "-0"],
        "top_k": ["-1", "2147483647"],
    }
    for field, values in edges.items():
        for value in values:
            answer = raw(server, COMPLETIONS, field, value)
            assert answer.status in (200, 400), answer.body
            assert answer.status == 200 or field == "temperature", (field, value, answer.body)
    assert_serves(server)


# ----------------------------------- token ids beyond the vocabulary: CVE-2026-93840, CVE-2026-116173, vllm#54195


def test_tokens_are_the_models(server: Serving) -> None:
    size = server.service.engine_client.engine.vocab_size
    none = [size, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -1, -size, True, 1.0, 1.5, "1", None, [1], 10**300]
    for token in none:
        for path, field in ((COMPLETIONS, "prompt"), (COMPLETIONS, "stop_token_ids"), (CHAT, "stop_token_ids"),
                            ("/detokenize", "tokens")):  # fmt: skip
            if not (field == "prompt" and isinstance(token, (str, list))):
                assert_refused(raw(server, path, field, json.dumps([token])))
                assert_refused(raw(server, path, field, json.dumps([size - 1, token, 0])))
    for token in none[:6]:
        assert_refused(server.post(COMPLETIONS, prompt=[token], echo=True, max_tokens=0, logprobs=1))
    for field in ("prompt", "stop_token_ids"):
        assert raw(server, COMPLETIONS, field, f"[{size - 1}, 0]").status == 200
    stopping = {"stop_token_ids": list(range(200)), "min_tokens": 2, "ignore_eos": True}
    assert server.post(COMPLETIONS, prompt=[size - 1], max_tokens=2, **stopping).status == 200
    assert server.post("/detokenize", tokens=[]).json() == {"prompt": "", "content": ""}
    assert_serves(server)


# --------------------------------------------------------- /health says 200 while the engine hangs: vllm#36451


def test_ready_tells_of_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in a step (see test_robust), but in something that it was asked to do between two."""
    monkeypatch.setattr(local_engine_client, "STUCK_AFTER", 0.1)
    gate = threading.Event()
    with serving() as server, ThreadPoolExecutor(2) as pool:
        pool.submit(server.on_engine, lambda: gate.wait(20))
        until(lambda: server.get("/ready").status == 503)
        asked = pool.submit(server.post, COMPLETIONS, prompt="a", max_tokens=1)
        assert server.get("/ready").error()["code"] == "engine_stuck"
        gate.set()
        assert asked.result().status == 200
        assert server.get("/ready").status == 200


# ------------------------------------------------------------------------------- an unbounded queue: vllm#49445


def test_the_queue_is_bounded_for_every_kind_of_request() -> None:
    """See test_robust for how it is told."""
    with serving({"max_num_seqs": 2}, hook, max_num_queued_reqs=0) as server:
        gate = threading.Event()
        runner(server).before = lambda batch: gate.wait(20) and None
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(server.post, COMPLETIONS, prompt="a", max_tokens=1)
            until(lambda: server.service.engine_client.num_samples == 1)
            kinds: tuple[tuple[str, dict[str, Any]], ...] = (
                (COMPLETIONS, {"prompt": "a", "n": 2}),
                (COMPLETIONS, {"prompt": "a", "best_of": 2}),
                (COMPLETIONS, {"prompt": ["a", "b"], "stream": True}),
                (COMPLETIONS, {"prompt": "a", "n": 2, "use_beam_search": True}),
                (CHAT, {"messages": MESSAGES, "n": 2}),
            )
            for path, body in kinds:
                assert server.post(path, max_tokens=1, **body).status == 429, body
            gate.set()
            assert first.result().status == 200


# ------------------------------------------------ routes that skip the key: CVE-2026-111391, vllm#18893, #42591, #58144


@pytest.fixture(scope="module")
def keyed() -> Iterator[Serving]:
    with serving(api_key=("the-key",)) as running:
        yield running


PATHS = (
    "/v1/models", "//v1/models", "/v1/models/", "/V1/models", "/health/../v1/models", "/health/%2e%2e/v1/models",
    "/health%2f..%2fv1/models", "/v1/models?/health", "/v1/models;/health", "/v1/models#/health", "/./v1/models",
    "/health/", "/HEALTH", "/health%00", "//health", "/healthz", "/metrics", "/openapi.json", "/docs", "/redoc",
    "/inspector", "/inspector/events", "/version", "/", "/v1/models%3F", "/%76%31/models",
    "http://here/v1/models", "http://here/health/../v1/models", "http://x@here/v1/models",
)  # fmt: skip
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "TRACE", "DELETE")
NO_KEYS = (
    {},
    {"Authorization": "Bearer the-ke"},
    {"Authorization": "Bearer the-keyy"},
    {"X-Original-URL": "/health", "X-Rewrite-URL": "/health", "X-Forwarded-Prefix": "/health"},
)


def test_no_way_of_writing_a_path_gets_past_the_key(keyed: Serving) -> None:
    for path, method, headers in zip(PATHS, cycle(METHODS), cycle((*NO_KEYS, *NO_KEYS[1:]))):
        answer = keyed.ask(method, path, b"" if method == "POST" else None, headers)
        assert answer.status == 401, (path, method, headers)
        assert method == "HEAD" or answer.error()["code"] == "invalid_api_key"


def test_no_method_and_no_header_opens_a_path() -> None:
    """All combinations, as a server hands them to the guard."""

    async def opened(scope: Scope, receive: Receive, send: Send) -> None:
        pytest.fail(f"{scope}")

    async def statuses() -> Counter[int]:
        guard = Guard(opened, ("the-key",), None, 1000, ("/inspector",))
        found: Counter[int] = Counter()

        async def send(message: Message) -> None:
            found[message.get("status", 0)] += 1

        for path, method, headers in product(PATHS, METHODS, NO_KEYS):
            scope = {
                "type": "http",
                "http_version": "1.1",
                "method": method,
                "path": unquote(path.partition("?")[0]),
                "raw_path": path.encode(),
                "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            }
            await guard(scope, cast(Receive, None), send)
        return found

    count = len(PATHS) * len(METHODS) * len(NO_KEYS)
    assert asyncio.run(statuses()) == {401: count, 0: count}


def test_a_key_is_a_key_only_as_it_is(keyed: Serving) -> None:
    for value in ("", "the-key", "Bearer", "Bearer ", "Bearer the-key,the-key", "Bearer Bearer the-key",
                  "Basic the-key", "Basic dGhlLWtleQ==", "Bearer the-key\x00", "Bearer THE-KEY"):  # fmt: skip
        try:
            status = keyed.ask("GET", "/version", None, {"Authorization": value}).status
        except ValueError:
            continue  # the client's own library refuses it
        assert status in (400, 401), value
    assert keyed.ask("GET", "/version", None, {"Authorization": "bearer   the-key"}).status == 200
    assert keyed.get("/version?key=the-key&api_key=the-key").status == 401
    assert keyed.get("/health").status == 200


def test_a_page_elsewhere_cannot_ask_in_its_readers_name(server: Serving) -> None:
    """Browsers send such requests to this machine without asking it first; those of other kinds need its consent."""
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = server.ask("POST", COMPLETIONS, body, {"Content-Type": kind} if kind else {})
        found = f"Content-Type is {kind}" if kind else "there is no Content-Type"
        assert (answer.status, answer.error()["message"]) == (400, f"{found}; it must be application/json")
    asked = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    preflight = server.ask("OPTIONS", COMPLETIONS, None, asked)
    assert preflight.status == 405
    assert not any(name.startswith("access-control") for name in preflight.headers)


# ------------------------------------------- pickle on a socket, torch.load of user bytes: CVE-2025-32444, -32434


LOOSE = ("weights_only", "allow_pickle", "shell", "trust_remote_code")  # arguments that decide about code
# A file without any of these words is not parsed.
SUSPECT = re.compile(
    r"\bassert\b|\b(eval|exec)\(|(?<![.\w])compile\(|__import__|os\.(system|popen)|pickle|marshal|shelve|dill|"
    r"torch\.load|yaml|" + "|".join(LOOSE)
)


def dotted(node: ast.AST) -> str:
    """The names of which an expression such as a.b.c consists; of another one, those at its end."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_no_code_comes_from_bytes() -> None:
    """And no guard is an assert, which -O takes away: CVE-2026-41523."""
    texts = {path: path.read_text() for path in SRC.rglob("*.py")}
    suspects = {path: text for path, text in texts.items() if SUSPECT.search(text)}
    assert len(suspects) > 9
    for path, text in suspects.items():
        for node in ast.walk(ast.parse(text)):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            assert not isinstance(node, ast.Assert), where
            if not isinstance(node, ast.Call):
                continue
            name = dotted(node.func)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in LOOSE}
            assert name not in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"), where
            assert name.partition(".")[0] not in ("pickle", "marshal", "shelve", "dill", "cloudpickle"), where
            assert name != "torch.load" or given.get("weights_only") == "True", where
            assert not name.startswith("yaml.") or name == "yaml.safe_load", where
            assert given.get("allow_pickle", "False") == "False", where
            assert given.get("shell", "False") == "False", where
            assert given.get("trust_remote_code", "False") == "False", where


# --------------------------------- timing of the prefix cache tells other users' prompts: CVE-2025-46570


def test_no_salt_reaches_another_keys_blocks() -> None:
    prompt = "import collections\n" * 8
    with serving(api_key=("one", "two")) as server:

        def cached(key: str, path: str = COMPLETIONS, **body: Any) -> int:
            given = {"max_tokens": 1} | ({"prompt": prompt} if path == COMPLETIONS else {}) | body
            answer = server.ask("POST", path, given, {"Authorization": f"Bearer {key}"})
            assert answer.status == 200, answer.body
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("one", cache_salt="mine") == 0
        forget = server.service.engine_client.engine.scheduler.manager.reset_prefix_cache
        for guess in ("mine", ":mine", "one:mine", "one", None, "\x00mine"):
            assert cached("two", cache_salt=guess) == 0, guess
            server.on_engine(forget)
            assert cached("one", cache_salt="mine") == 0
        assert cached("one", cache_salt="mine") > 0
        assert cached("one") == 0
        assert cached("one") > 0
        assert cached("two") == 0
        chat = {"messages": [{"role": "user", "content": prompt}]}
        assert cached("one", CHAT, **chat) == 0
        assert cached("two", CHAT, **chat) == 0
        assert cached("one", CHAT, **chat) > 0


# ------------------------------------- template injection, unbounded rendering: CVE-2024-34359, CVE-2026-115911

HOSTILE = """{%- set what = messages[0].content -%}
{%- if what == 'loop' -%}{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}
{%- elif what == 'text' -%}{{ 'a' * 10**10 }}
{%- elif what == 'power' -%}{{ 10 ** (10 ** (what|length + 4)) }}
{%- elif what == 'class' -%}{{ messages.__class__.__mro__[1].__subclasses__() }}
{%- elif what == 'globals' -%}{{ cycler.__init__.__globals__['os'].environ }}
{%- elif what == 'self' -%}{{ self.__init__.__globals__ }}
{%- elif what == 'format' -%}{{ '{0.__class__}'.format(messages) }}{{ '%99999999999d' % 1 }}
{%- elif what == 'macro' -%}{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}
{%- elif what == 'include' -%}{% include '/etc/passwd' %}
{%- elif what == 'raise' -%}{{ raise_exception('no ' ~ what * 1000) }}
{%- else -%}{{ messages[0].role ~ ': ' ~ what }}{%- endif -%}"""


def test_templates_are_bounded_and_what_clients_say_is_no_template(tmp_path: Path) -> None:
    path = tmp_path / "hostile.jinja"
    path.write_text(HOSTILE)
    with serving(chat_template=path) as server:

        def say(content: str, role: str = "user") -> Answer:
            return server.post("/tokenize", messages=[{"role": role, "content": content}])

        kinds = ("loop", "text", "power", "class", "globals", "self", "format", "macro", "include", "raise")
        for kind in kinds:
            answer = say(kind)
            assert answer.status == 400, (kind, answer.body[:300])
            assert len(answer.error()["message"]) <= 600
            assert "PATH" not in answer.error()["message"]
        for content in (
            "{{ 7*7 }}",
            "{% for i in range(9) %}x{% endfor %}",
            "{{ self }}{#",
            "%}\x00\x1b[2J",
            "é🎉\u202e",
        ):
            tokens = say(content, role=content[:9]).json()["tokens"]
            assert server.post("/detokenize", tokens=tokens).json()["prompt"] == f"{content[:9]}: {content}"
        for field in ("chat_template", "template", "documents"):
            refused = server.post(CHAT, messages=MESSAGES, **{field: "{{ 7*7 }}"})
            assert refused.status == 400
            assert refused.error()["param"] == field
        assert_serves(server)


# --------------------------------------------------------------------- guards that -O takes away: CVE-2026-41523

UNDER_O = """
import json, sys
from starlette.testclient import TestClient
from quire.server.server_config import ServerConfig
from quire.server.run import build_parts
assert not __debug__ or sys.exit("this runs without -O")
parts = build_parts({"num_blocks": 64, "max_num_seqs": 2}, ServerConfig(api_key=("k",)))
with TestClient(parts.app()) as client:
    good = {"prompt": "a", "max_tokens": 1}
    bad = [{"prompt": [10**6]}, {"n": 500}, {"stop_token_ids": [-1]}, {"temperature": -1}, {"logprobs": 10**6},
           {"prompt": [1] * 2000}, {"regex": "("}, {"max_tokens": -1}, {"cache_salt": 5}, {"prompt": 5}]
    key = {"Authorization": "Bearer k"}
    asked = [(good | body, key) for body in bad] + [(good, {}), (good, key)]
    print(*(int(client.post("/v1/completions", json=body, headers=headers).status_code) for body, headers in asked))
"""


@pytest.mark.long
@pytest.mark.slow
def test_refusals_do_not_depend_on_asserts() -> None:
    command = [sys.executable, "-O", "-c", UNDER_O]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["400"] * 10 + ["401", "200"], done.stderr
