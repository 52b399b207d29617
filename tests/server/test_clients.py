"""What clients send and get around bodies: ids, origins, keys, comments in streams, and the pages of a server."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.errors import ConfigError, ModelError
from quire.frontend.llm import LLM
from quire.models import EMBEDDED
from quire.models.generation_config import read_default_sampling
from quire.request import SamplingParams
from quire.server.server_config import HttpConfig
from tests.server.collected import until
from tests.server.serving import Serving, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"prompt": "import os\n", "max_tokens": 4, "temperature": 0}


def values(server: Serving, name: str) -> dict[str, float]:
    """The samples of a counter by their labels."""
    lines = server.get("/metrics").body.decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)}


def settle(server: Serving) -> None:
    """Let the event loop come to the end of what it was doing when the client had its answer."""
    assert server.loop is not None
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(30)


# ----------------------------------------------------------------------------------------------- sampling defaults


def write(directory: Path, **fields: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.slow
def test_generation_config_gives_the_defaults_of_a_body(tmp_path: Path) -> None:
    write(tmp_path, top_k=1, temperature=0.6, max_new_tokens=7, do_sample=False, top_p=None)
    with serving({"generation_config": str(tmp_path)}) as server:
        assert server.service.model.default_sampling == {"top_k": 1, "temperature": 0.6, "max_tokens": 7}
        for path, body in (
            (COMPLETIONS, {"prompt": "import os\n"}),
            (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ):
            same = [server.post(path, **body, seed=seed, ignore_eos=True).json() for seed in (1, 2, 3)]
            nulls = dict.fromkeys(("top_k", "temperature", "max_tokens", "min_p", "top_p"))
            same.append(server.post(path, **body, **nulls, ignore_eos=True).json())
            assert len({json.dumps(one["choices"]) for one in same}) == 1
            assert {one["usage"]["completion_tokens"] for one in same} == {7}
            own = [
                server.post(path, **body, top_k=0, temperature=2, max_tokens=5, seed=seed).json() for seed in range(4)
            ]
            assert len({json.dumps(one["choices"]) for one in own}) > 1
            assert {one["usage"]["completion_tokens"] for one in own} <= {1, 2, 3, 4, 5}


def test_where_defaults_come_from(tmp_path: Path) -> None:
    assert read_default_sampling("auto", EMBEDDED) == {"temperature": 0.5, "repetition_penalty": 1.15}
    write(tmp_path, top_p=0.9, repetition_penalty=1.1, eos_token_id=0)
    assert read_default_sampling("auto", tmp_path) == {"top_p": 0.9, "repetition_penalty": 1.1}
    assert read_default_sampling(str(tmp_path), EMBEDDED) == read_default_sampling("auto", tmp_path)
    assert read_default_sampling("none", tmp_path) == read_default_sampling("vllm", tmp_path) == {}
    with pytest.raises(ConfigError, match="it must be auto, none, or a directory"):
        read_default_sampling(str(tmp_path / "nowhere"), EMBEDDED)
    for field, value in (("top_p", 2), ("temperature", "hot"), ("top_k", 1.5), ("max_new_tokens", 0)):
        with pytest.raises(ModelError, match="generation-config none leaves the file out"):
            read_default_sampling("auto", write(tmp_path, **{field: value}))
    llm = LLM(generation_config=str(write(tmp_path, temperature=0.0, max_new_tokens=3)), num_blocks=64)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
    [plain], [given] = llm.generate("import os\n"), llm.generate("import os\n", SamplingParams(max_tokens=1))
    assert (len(plain.outputs[0].token_ids), len(given.outputs[0].token_ids)) == (3, 1)


# ----------------------------------------------------------------------------------- ids, counts, and lines in the log


def test_each_request_has_an_id_a_line_and_a_count(server: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire.access")
    sent = {"X-Request-Id": "mine-1"}
    before = values(server, "quire:http_requests_total")
    for stream in (False, True):
        answer = server.ask("POST", COMPLETIONS, ASKED | {"stream": stream, "stream_options": None}, sent)
        assert answer.headers["x-request-id"] == "mine-1"
        settle(server)
        line = caplog.messages[-1]
        assert re.fullmatch(rf"mine-1 POST {COMPLETIONS} 200 in \d+\.\d{{3}} s, 4 prompt tokens, 4 new", line), line
    for path, body, counts in (
        ("/v1/embeddings", {"input": "import os\n"}, "4 prompt tokens, 0 new"),
        (COMPLETIONS, {**ASKED, "use_beam_search": True, "n": 2, "ignore_eos": True}, "4 prompt tokens, 8 new"),
    ):
        assert server.ask("POST", path, body, sent).status == 200
        settle(server)
        assert caplog.messages[-1].endswith(counts), caplog.messages[-1]
    for given in ("", "a b", "é", "x" * 129):
        made = server.ask("POST", COMPLETIONS, {"prompt": []}, {"X-Request-Id": given.encode("latin-1")})  # type: ignore[dict-item]
        assert made.status == 400
        assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
        settle(server)
        assert caplog.messages[-1].startswith(made.headers["x-request-id"])
        assert caplog.messages[-1].endswith(", bad_request")
    assert server.ask("GET", "/nowhere/\x7e%0a", None, sent).headers["x-request-id"] == "mine-1"
    settle(server)
    assert caplog.messages[-1].startswith("mine-1 GET /nowhere/~%0a 404 in ")
    num_lines = len(caplog.messages)
    assert server.get("/health").status == 200  # probes that go well are not logged
    settle(server)
    assert len(caplog.messages) == num_lines
    after = values(server, "quire:http_requests_total")
    label = f'quire:http_requests_total{{handler="{COMPLETIONS}",method="POST",status="%d"}}'
    assert after[label % 200] - before.get(label % 200, 0) == 3
    assert after[label % 400] - before.get(label % 400, 0) == 4
    assert 'quire:http_requests_total{handler="none",method="GET",status="404"}' in after
    assert values(server, "quire:requests_refused_total")['quire:requests_refused_total{reason="not_found"}'] >= 1


def test_an_error_of_the_servers_own_has_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(service: Any) -> None:
        def raising(*_: Any) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(service, "check_ready", raising)

    with serving(prepare=fail) as server:
        answer = server.ask("GET", "/ready", None, {"X-Request-Id": "mine"})
        assert (answer.status, answer.headers["x-request-id"]) == (500, "mine")
        assert 'handler="/ready",method="GET",status="500"' in str(values(server, "quire:http_requests_total"))


# ------------------------------------------------------------------------------------------ origins, keys, and comments


@pytest.mark.slow
def test_pages_of_an_allowed_origin_may_ask_and_preflights_need_no_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\n\n  first \nsecond\n")
    page = "https://chat.example.org"
    with serving(allowed_origins=(page,), api_key_file=keys, api_key=("third",)) as server:
        ask = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        preflight = server.ask("OPTIONS", COMPLETIONS, None, ask)
        assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, page)
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        other = server.ask("OPTIONS", COMPLETIONS, None, ask | {"Origin": "https://evil.example"})
        assert (other.status, "access-control-allow-origin" in other.headers) == (400, False)
        for key, status in (("first", 200), ("second", 200), ("third", 200), ("# of the team", 401), ("", 401)):
            answer = server.ask("POST", COMPLETIONS, ASKED, {"Origin": page, "Authorization": f"Bearer {key}"})
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, page)
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        assert server.get("/health").status == server.get("/ready").status == 200
        asks_for_key = server.ask("GET", "/", None, {"Accept": "text/html"})
        assert (asks_for_key.status, asks_for_key.headers["www-authenticate"][:5]) == (401, "Basic")
        assert (
            'reason="invalid_api_key"} 3.0'
            in server.ask("GET", "/metrics", None, {"Authorization": "Bearer first"}).body.decode()
        )


def test_options_of_keys_and_origins_that_cannot_be(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    for options, words in (
        ({"api_key_file": empty}, "holds no key"),
        ({"api_key_file": tmp_path / "nowhere"}, "cannot be read"),
        ({"allowed_origins": ("chat.example.org",)}, "give origins without a path"),
        ({"allowed_origins": ("https://chat.example.org/",)}, "give origins without a path"),
        ({"unknown_fields": "ignore"}, "unknown_fields is 'ignore'; it must be 'report' or 'refuse'"),
        ({"sse_keep_alive": -1.0}, "sse_keep_alive is -1.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            HttpConfig(**options)


@pytest.mark.slow
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_waits_for_a_step_sends_comments(path: str) -> None:
    """Before its first token. Clients pass over them; the events are the same."""
    hold, body = (
        threading.Event(),
        ASKED if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
    )
    with serving(sse_keep_alive=0.05) as server:
        server.loop.call_soon_threadsafe(server.service.engine_client.llm._inbox.put, lambda: hold.wait(30))  # type: ignore[union-attr]
        connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
        connection.request("POST", path, json.dumps(body | {"stream": True}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        read = b""
        while read.count(b": still here\n\n") < 2:
            read += answer.read1(4096)
        hold.set()
        read += answer.read()
        connection.close()
        events = [part for part in read.decode().split("\n\n") if not part.startswith(":")]
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(json.loads(event[6:])["choices"] for event in events[:-2])


# ---------------------------------------------------------------------------------------------------- pages and paths


@pytest.mark.slow
def test_the_start_page_is_for_people_and_programs(server: Serving) -> None:
    page = server.ask("GET", "/", None, {"Accept": "text/html,*/*"})
    assert page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    assert all(f'href="{path}"' in text for path in ("/inspector", "/openapi.json", "/metrics", "/ready"))
    assert f"curl http://127.0.0.1:{server.port}/v1/chat/completions" in text
    found = server.get("/").json()
    assert (found["name"], found["model"]) == ("quire", "quire-embedded")
    for path in found["routes"]:
        assert server.get(path).status == 200
    [model] = server.get("/v1/models").json()["data"]
    assert model["root"] == "quire-embedded"


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/chat/completions", 404, "did you mean '/v1/chat/completions'?"),
        ("POST", "/v1/chat/completions/", 404, "did you mean '/v1/chat/completions'?"),
        ("POST", "//v1//completions", 404, "did you mean '/v1/completions'?"),
        ("POST", "/v1/chat/completion", 404, "did you mean '/v1/chat/completions'?"),
        ("POST", "/v1/v1/embeddings", 404, "did you mean '/v1/embeddings'?"),
        ("GET", "/v1/models/", 404, "did you mean '/v1/models'?"),
        ("GET", "/favicon.ico", 404, "are in /openapi.json"),
        ("GET", "/" + "a" * 9000, 404, "are in /openapi.json"),
        ("GET", "/v1/completions", 405, "/v1/completions takes POST, not GET"),
        ("DELETE", "/v1/models", 405, "/v1/models takes GET, not DELETE"),
    ],
)
def test_a_path_that_is_no_route_is_told_which_one_is(
    server: Serving, method: str, path: str, status: int, words: str
) -> None:
    refused = server.ask(method, path, {} if method == "POST" else None)
    assert refused.status == status
    assert refused.error()["message"].endswith(words)


def is_refused(server: Serving) -> bool:
    """Whether the server listens no more."""
    try:
        server.get("/version")
    except ConnectionError:
        return True
    return False


def test_after_sigterm_ready_says_no_and_requests_are_answered_until_the_grace_is_over() -> None:
    with serving(drain_grace=3600.0) as server:
        assert server.get("/ready").status == server.get("/health").status == 200
        assert server.server is not None
        server.server.handle_exit(signal.SIGTERM, None)
        until(lambda: server.get("/ready").status == 503)
        assert server.get("/ready").error()["code"] == "draining"
        assert server.get("/health").status == 200
        assert server.post("/v1/completions", prompt="import", max_tokens=2).status == 200
        server.server.end_of_grace = 0.0
        until(lambda: is_refused(server))


@pytest.mark.parametrize(("number", "is_watched"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_without_a_balancer_and_after_an_interrupt_there_is_no_grace(number: int, is_watched: bool) -> None:
    with serving(drain_grace=3600.0) as server:
        if is_watched:
            assert server.get("/ready").status == 200
        assert server.server is not None
        server.server.handle_exit(number, None)
        until(lambda: is_refused(server))
