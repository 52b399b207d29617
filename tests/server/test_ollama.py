"""Ollama's routes."""

from __future__ import annotations

import json
import queue
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError, ModelError
from quire.models import locate
from quire.request import StructuredOutputsParams
from quire.server.api import derived
from quire.server.api import pull as pull_module
from quire.server.api.ollama import STAYS
from quire.server.protocol.ollama import OllamaChatRequest
from quire.server.server_config import ServerConfig
from tests.models.fake_hub import fake_hub, filled_from
from tests.server.serving import Serving, serving
from tests.server.test_responses import SCHEMA

USER = [{"role": "user", "content": "a queue"}]
GREEDY = {"num_predict": 12, "temperature": 0, "num_ctx": 2048, "num_gpu": 1}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time.", "parameters": SCHEMA}}


REPOSITORIES = {
    "someone/tiny": {"config.json": b"{}", "model.safetensors": b"x" * 3000, "onnx/model.onnx": b"o"},
    "someone/packed-GGUF": {"README.md": b"r", "a-Q4.gguf": b"g" * 10, "b.gguf": b"h"},
    "someone/notes": {"README.md": b"r"},
}


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
def test_formats_reasoning_and_calls(speaking: Serving) -> None:
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
    sought = speaking.ask("HEAD", "/")  # what the command `ollama` sends first
    assert (sought.status, sought.body) == (200, b"")
    assert "did you mean '/api/embed'?" in speaking.post("/api/embeddings", prompt="a").json()["error"]
    assert "/v1/embeddings" not in server.post("/api/embeddings", prompt="a").json()["error"]
    assert server.get("/api/tags").status == 404  # without --ollama
    assert server.post("/api/chat", messages=USER).status == 404


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {"messages": USER, "model": "m"}, "there is no model 'm'"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["x"]}]}, "served for text alone"),
        ("/api/chat", {"messages": USER, "options": {"mirostat": 1}}, "options.mirostat is 1"),
        ("/api/chat", {"messages": USER, "options": {"typical_p": 0.5}}, "options.typical_p is 0.5"),
        ("/api/chat", {"messages": USER, "options": {"repeat_last_n": 128}}, "penalties are over the whole text"),
        ("/api/chat", {"messages": USER, "options": {"penalize_newline": False}}, "penalties are for all tokens"),
        ("/api/pull", {"model": "a/b"}, "clients may not download"),
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
    assert answer.status == {"there is no model 'm'": 404, "clients may not download": 403}.get(words, 400)
    assert answer.json().keys() == {"error"}
    assert words in answer.json()["error"]


# ----------------------------------------------------------------------------------------------- as clients send it

OPTIONS = {"temperature": 0, "num_predict": 12}
SAID = [{"role": "system", "content": "Be brief.", "images": []}, {"role": "user", "content": "hi", "images": []}]
CALLED = {
    "role": "assistant",
    "content": "",
    "images": [],
    "tool_calls": [{"id": "c1", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}],
}
# What litellm 1.110.2 sends for `ollama_chat/`, as it sends it: without a type, or with that of any bytes.
LITELLM: list[tuple[str, dict[str, Any]]] = [
    ("", {"messages": SAID, "options": OPTIONS | {"top_p": 0.9, "stop": ["x"], "repeat_penalty": 1.1, "seed": 3}}),
    ("", {"messages": SAID, "options": OPTIONS, "tools": [CLOCK]}),
    ("", {"messages": [*SAID, CALLED, {"role": "tool", "content": "noon", "images": [], "tool_call_id": "c1"}],
          "options": OPTIONS, "tools": [CLOCK]}),
    ("", {"messages": SAID, "options": OPTIONS | {"num_ctx": 2048, "repeat_last_n": 64, "mirostat": 0},
          "keep_alive": 0, "think": True}),
    ("application/octet-stream", {"messages": SAID, "options": OPTIONS, "stream": True}),
    ("application/x-www-form-urlencoded", {"messages": SAID, "options": OPTIONS}),  # curl -d
]  # fmt: skip


@pytest.mark.parametrize(("kind", "body"), LITELLM)
def test_what_litellm_and_curl_send(speaking: Serving, kind: str, body: dict[str, Any]) -> None:
    sent = json.dumps({"model": "quire-embedded", "stream": False} | body).encode()
    answer = speaking.ask("POST", "/api/chat", sent, {"Content-Type": kind} if kind else {})
    assert answer.status == 200, answer.body
    *pieces, last = (json.loads(line) for line in answer.body.splitlines())
    assert (last["done"], last["model"], bool(pieces)) == (True, "quire-embedded", body.get("stream", False))
    assert "".join(one["message"]["content"] for one in (*pieces, last))
    assert "x-quire-ignored-fields" not in answer.headers
    shown = speaking.ask("POST", "/api/show", b'{"name":"quire-embedded"}')  # litellm looks there for tools
    assert "tools" in shown.json()["template"]


def test_a_page_of_another_site_needs_the_type(speaking: Serving) -> None:
    """A browser sends its text without asking the server first, and with the page's origin."""
    sent = json.dumps({"messages": USER, "options": GREEDY, "stream": False}).encode()
    for origin in ("http://elsewhere.example", "null", "http://localhost:3000"):
        headers = {"Content-Type": "text/plain", "Origin": origin}
        refused = speaking.ask("POST", "/api/chat", sent, headers)
        assert refused.status == 400
        assert refused.json() == {"error": "Content-Type is text/plain; it must be application/json"}
        assert speaking.ask("POST", "/api/chat", sent, headers | {"Content-Type": "application/json"}).status == 200
    with serving(ollama=True, allowed_origins=("http://chat.example",)) as open_to_one:
        for origin, status in (("http://chat.example", 200), ("http://elsewhere.example", 400)):
            body = json.dumps({"model": "quire-embedded"}).encode()
            assert open_to_one.ask("POST", "/api/generate", body, {"Origin": origin}).status == status


NEUTRAL = {
    "repeat_last_n": 64, "typical_p": 1, "tfs_z": 1.0, "mirostat": 0, "mirostat_tau": 5, "mirostat_eta": 0.1,
    "penalize_newline": True, "num_gpu": 1, "num_thread": 4, "num_gqa": 1, "num_keep": 5, "num_batch": 2, "numa": False,
    "main_gpu": 0, "low_vram": False, "vocab_only": False, "use_mmap": True, "rope_frequency_base": 1e4, "seed": -1,
}  # fmt: skip


def test_options_that_change_nothing(speaking: Serving) -> None:
    text = ask(speaking, "/api/generate", prompt="a queue")["response"]
    for options in (NEUTRAL, {"repeat_last_n": -1}, {"repeat_last_n": None}):
        answer = speaking.post("/api/generate", prompt="a queue", options=GREEDY | options, stream=False)
        assert (answer.json()["response"], "x-quire-ignored-fields" in answer.headers) == (text, False)
    penalized = [
        ask(speaking, "/api/generate", prompt="a queue", options=GREEDY | {"repeat_penalty": 9.0, "repeat_last_n": n})
        for n in (64, 0)  # 0: no penalties, as in Ollama
    ]
    assert [one["response"] == text for one in penalized] == [False, True]


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [(0, "unload"), ("0", "unload"), ("0s", "unload"), ("0m0.0s", "unload"), (0.0, "unload"), (None, "load"),
     (-1, "load"), ("10s", "load"), (300, "load"), ("0h5m", "load"), ("s", "load")],
)  # fmt: skip
def test_a_model_is_not_unloaded_and_the_answer_says_it(speaking: Serving, keep_alive: Any, reason: str) -> None:
    for path in ("/api/generate", "/api/chat"):
        found = ask(speaking, path, model="quire-embedded", keep_alive=keep_alive, options=None)
        said = found["response"] if path == "/api/generate" else found["message"]["content"]
        assert (found["done"], found["done_reason"]) == (True, reason)
        assert said == ("" if reason == "load" else STAYS)
    assert [one["name"] for one in speaking.get("/api/ps").json()["models"]] == ["quire-embedded"]


# ------------------------------------------------------------------------------------------------------ downloads


@pytest.fixture(scope="module")
def pulling() -> Iterator[Serving]:
    with serving(ollama=True, allow_pull=True) as running:
        yield running


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a cache that is filled from a hub on the loopback interface."""
    with fake_hub(REPOSITORIES) as url:
        filled_from(url, tmp_path / "hub", monkeypatch)
        yield tmp_path / "hub"


def test_a_model_is_pulled(pulling: Serving, cache: Path) -> None:
    for name in ("someone/tiny", "hf.co/someone/tiny:latest"):
        answer = pulling.ask("POST", "/api/pull", json.dumps({"model": name}).encode())
        assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
        first, *progress, last = (json.loads(line) for line in answer.body.splitlines())
        assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
        for one in progress:
            assert (one["status"], one["digest"][:7]) == ("pulling someone/tiny", "sha256:")
            assert 0 <= one["completed"] <= one["total"] <= 3002
        assert bool(progress) == (name == "someone/tiny")  # the second time, nothing is left to download
    assert not list(cache.rglob("onnx"))
    assert (locate("someone/tiny") / "model.safetensors").read_bytes() == b"x" * 3000
    assert pulling.post("/api/pull", name="someone/packed-GGUF:a-Q4.gguf", stream=False).json() == {"status": "success"}
    [gguf] = cache.rglob("*.gguf")
    assert gguf.name == "a-Q4.gguf"
    for model, words in (
        ("someone/none", "the hub has no such repository"),
        ("someone/packed-GGUF:Q4_K_M", "it has a-Q4.gguf"),
        ("someone/notes", "no model that can be served"),
    ):
        first, last = (json.loads(line) for line in pulling.post("/api/pull", model=model).body.splitlines())
        assert first == {"status": "pulling manifest"}
        assert last.keys() == {"error"}
        assert words in last["error"]
        refused = pulling.post("/api/pull", model=model, stream=False)
        assert (refused.status, words in refused.json()["error"]) == (400, True)
    assert pulling.post("/api/pull").json()["error"].startswith("model is missing")


def test_a_download_ends_with_its_client_and_with_the_server(pulling: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """The download's threads end at their next report of progress."""
    begun: queue.Queue[str] = queue.Queue()
    ended: queue.Queue[str] = queue.Queue()

    def endless(model: str, revision: None, gguf_file: None, report: Callable[[int, int], None]) -> Path:
        begun.put(model)
        for i in count():
            try:
                report(i, 10**9)
            except ModelError:
                ended.put(model)
                raise
            time.sleep(0.005)
        raise AssertionError

    monkeypatch.setattr(pull_module, "pull", endless)
    head = "POST /api/pull HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n"
    with socket.create_connection((pulling.host, pulling.port)) as client:
        client.sendall(head.encode() + b'{"model":"a/b"}')
        assert until_read(client, b'"completed":')
    assert (begun.get(timeout=30), ended.get(timeout=30)) == ("a/b", "a/b")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pulling.post, "/api/pull", model="c/d")
        assert begun.get(timeout=30) == "c/d"
        with socket.create_connection((pulling.host, pulling.port)) as client:
            client.sendall(head.encode() + b'{"model":"e/f"}')
            assert until_read(client, b"manifest")
            pulling.service.draining = True
            try:
                lines = waiting.result(30).body.splitlines()
                assert json.loads(lines[-1]) == {"error": "the server is stopping"}
                assert until_read(client, b"the server is stopping")
                assert ended.get(timeout=30) == "c/d"
                refused = pulling.post("/api/pull", model="g/h")
                assert (refused.status, refused.json()["error"]) == (503, "the server is stopping")
            finally:
                pulling.service.draining = False


def until_read(client: socket.socket, words: bytes) -> bool:
    """Whether these come before the end."""
    client.settimeout(30)
    found = b""
    while words not in found:
        part = client.recv(65536)
        if not part:
            return False
        found += part
    return True


def test_downloads_need_the_option() -> None:
    with pytest.raises(ConfigError, match="allow_pull is for /api/pull"):
        ServerConfig(allow_pull=True)


# ------------------------------------------------------------------------------------------------- created models

PIRATE = {"system": "Be a pirate.", "parameters": {"num_predict": 5, "temperature": 0.0, "stop": ["@@"]}}


def test_a_model_is_created_used_copied_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}")
    options: dict[str, Any] = {"chat_template": template, "data_dir": tmp_path / "data", "ollama": True}
    keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
    shots = [{"role": "user", "content": "a list"}, {"role": "assistant", "content": "Arr"}]
    with serving(**options, api_key=("one", "two")) as server:
        server.headers = keys[0]
        created = server.post("/api/create", **{"model": "pirate:latest", "from": "quire-embedded", **PIRATE})
        assert [json.loads(line)["status"] for line in created.body.splitlines()] == ["writing manifest", "success"]
        whole = server.post(
            "/api/create",
            **{"model": "captain", "from": "pirate", "messages": shots, "parameters": {"num_predict": 3}},
            license=["MIT", "and so on"],
            stream=False,
        )
        assert whole.json() == {"status": "success"}

        def text(model: str, messages: list[dict[str, str]], **body: Any) -> str:
            found = server.post("/v1/chat/completions", model=model, messages=messages, **body).json()
            assert found["model"] == model
            said: str = found["choices"][0]["message"]["content"]
            return said

        system = {"role": "system", "content": "Be a pirate."}
        given = {"max_tokens": 5, "temperature": 0, "stop": ["@@"]}
        alike = text("quire-embedded", [system, *USER], **given)
        assert text("pirate", USER) == alike
        assert text("pirate", USER, temperature=None, max_tokens=None) == alike  # null sets nothing
        assert ask(server, "/api/chat", messages=USER, model="pirate", options={})["message"]["content"] == alike
        assert ask(server, "/api/generate", prompt="a queue", model="pirate:latest", options={})["response"] == alike
        assert ask(server, "/api/chat", messages=USER, model="pirate", options={"num_predict": 2})["eval_count"] == 2
        own = [{"role": "system", "content": "Be calm."}, *USER]
        assert text("pirate", own) == text("quire-embedded", own, **given)
        shown_text = text("quire-embedded", [system, *shots, *USER], **{**given, "max_tokens": 3})
        assert text("captain", USER) == shown_text
        alone = server.post("/v1/messages/count_tokens", model="captain", messages=USER)
        with_all = {"model": "quire-embedded", "messages": [*shots, *USER], "system": "Be a pirate."}
        assert alone.json() == server.post("/v1/messages/count_tokens", **with_all).json()
        shown = server.post("/api/show", model="captain").json()
        assert (shown["system"], shown["messages"], shown["license"]) == ("Be a pirate.", shots, "MIT\nand so on")
        assert shown["parameters"].splitlines() == ['stop "@@"', "temperature 0.0", "num_predict 3"]
        assert shown["details"]["parent_model"] == "quire-embedded"
        assert shown["modelfile"].startswith('FROM quire-embedded\nPARAMETER stop "@@"\n')
        assert server.post("/api/copy", source="pirate", destination="mate:v2").status == 200
        assert text("mate:v2", USER) == alike
        assert server.post("/api/copy", source="quire-embedded", destination="plain").status == 200
        assert text("plain", USER, **given) == text("quire-embedded", USER, **given)
        names = [one["name"] for one in server.get("/api/tags").json()["models"]]
        assert names == ["quire-embedded", "plain:latest", "mate:v2", "captain:latest", "pirate:latest"]
        server.headers = keys[1]  # another key has its own
        assert server.post("/api/chat", model="pirate", messages=USER).status == 404
        assert [one["name"] for one in server.get("/api/tags").json()["models"]] == ["quire-embedded"]
        assert server.ask("DELETE", "/api/delete", {"model": "pirate"}).status == 404
    with serving(**options, api_key=("one",)) as server:  # they are kept
        server.headers = keys[0]
        assert text("pirate", USER) == alike
        assert server.ask("DELETE", "/api/delete", {"model": "pirate"}).status == 200
        assert server.post("/api/chat", model="pirate", messages=USER).status == 404
        for body, status, words in (
            ({"model": "a", "from": "pirate"}, 404, "there is no model 'pirate'"),
            ({"model": "quire-embedded", "from": "captain"}, 400, "which is served here"),
            ({"model": "../x", "from": "captain"}, 400, "is no name of a model"),
            ({"model": "a", "from": "captain", "system": "a" * 2**16}, 400, "of 65536 at most"),
            ({"model": "a"}, 400, "from is missing"),
            ({"from": "captain"}, 400, "model is missing"),
            ({"model": "a", "from": "captain", "parameters": {"temperature": -1}}, 400, "temperature is -1"),
            ({"model": "a", "from": "captain", "parameters": {"mirostat": 1}}, 400, "parameters.mirostat is 1"),
            ({"model": "a", "from": "captain", "quantize": "q4_K_M"}, 400, "has the weights of a served one"),
            ({"model": "a", "files": {"a.gguf": "sha256:0"}}, 400, "has the weights of a served one"),
            ({"model": "a", "from": "captain", "template": "{{ .Prompt }}"}, 400, "template is"),
        ):
            refused = server.post("/api/create", **body)
            assert (refused.status, words in refused.json()["error"]) == (status, True), refused.body
        monkeypatch.setattr(derived, "MOST", 4)
        assert server.post("/api/copy", source="captain", destination="n0").status == 200
        full = server.post("/api/copy", source="captain", destination="more")
        assert (full.status, "delete one" in full.json()["error"]) == (429, True)
        assert server.post("/api/copy", source="captain", destination="n0").status == 200  # replaces one


def test_creating_needs_a_data_directory_and_a_template(speaking: Serving, tmp_path: Path) -> None:
    refused = speaking.post("/api/create", **{"model": "a", "from": "quire-embedded"})
    assert (refused.status, "start it with --data-dir DIR" in refused.json()["error"]) == (403, True)
    with serving(ollama=True, data_dir=tmp_path / "data") as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(server.service.model, "template", None)
            refused = server.post("/api/create", **{"model": "a", "from": "quire-embedded", "system": "b"})
        assert (refused.status, "takes no system prompt" in refused.json()["error"]) == (400, True)
        assert server.post("/api/create", **{"model": "a", "from": "quire-embedded", "stream": False}).status == 200
        assert ask(server, "/api/generate", prompt="a queue", model="a")["response"]
