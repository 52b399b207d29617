"""The router over HTTP, in front of servers of this process."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import ConfigError
from quire.router.app import Router
from quire.router.config import RouterConfig, read_models
from quire.server.http.guard import identity_of
from quire.server.run import Listening, settings
from tests.server.serving import Serving, serving

pytestmark = pytest.mark.slow


@dataclass
class Started:
    """A model's server, which this process already has."""

    url: str

    def stop(self, timeout: float) -> None:
        pass


class Address(Serving):
    """The address of a router."""

    own: Router
    models: dict[str, Serving]

    def __init__(self, port: int) -> None:
        self.host, self.port, self.headers = "127.0.0.1", port, {"Authorization": "Bearer key"}


@pytest.fixture(scope="module")
def router() -> Iterator[Address]:
    with ExitStack() as stack:
        models = {name: {"model": f"./{name}"} for name in ("one", "two")}
        own = Router(
            models, RouterConfig(port=0, api_key=("key", "other"), max_loaded=1, ollama=True, drain_grace=0.0), 1
        )
        keys = tuple(own._key_of(identity_of(key)) for key in (b"key", b"other"))
        servers = {
            name: stack.enter_context(serving(served_model_name=(name,), api_key=keys, ollama=True)) for name in models
        }

        def start(name: str, on_end: Callable[[int], None]) -> Started:
            return Started(servers[name].url)

        own.pool._start = start
        listening, ready = socket.create_server(("127.0.0.1", 0)), threading.Event()
        server = Listening(settings(own.app(), own.config), ready.set, own)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        assert ready.wait(60)
        here = Address(listening.getsockname()[1])
        here.own, here.models = own, servers
        yield here
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def loaded(router: Address) -> dict[str, str]:
    return {one["id"]: one["status"]["value"] for one in router.get("/v1/models").json()["data"]}


def test_requests_reach_the_model_that_they_name(router: Address) -> None:
    assert set(loaded(router)) == {"one", "two"}
    for name, other in (("one", "two"), ("two", "one"), ("one", "two")):
        answer = router.post("/v1/completions", model=name, prompt="def f(", max_tokens=4, temperature=0)
        assert answer.status == 200
        assert answer.json()["model"] == name
        assert loaded(router)[name] == "loaded"
        assert loaded(router)[other] != "loaded"
    events = router.post("/v1/completions", model="one", prompt="def f(", max_tokens=4, temperature=0, stream=True)
    text = "".join(event["choices"][0]["text"] for event in events.events())
    assert text == answer.json()["choices"][0]["text"]
    assert router.get("/no_such_route?model=two").status == 404  # the model's server has no such route
    assert "quire:num_requests_running" in router.get("/metrics?model=two").body.decode()
    assert 'quire:router_model_loaded{model="two"} 1' in router.get("/metrics").body.decode()
    assert router.ask("GET", "/metrics?model=two", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert [one["model"] for one in router.get("/api/ps").json()["models"]] == ["two:latest"]
    assert len(router.get("/api/tags").json()["models"]) == 2
    refused = router.post("/api/create", **{"model": "a", "from": "b"})
    assert (refused.status, "those of its file" in refused.json()["error"]) == (403, True)
    line = router.post("/api/generate", model="one:latest", prompt="x", stream=False, options={"num_predict": 2})
    assert line.json()["done"] is True
    assert router.post("/models/unload", model="one").json()["id"] == "one"
    deadline = time.monotonic() + 30
    while loaded(router)["one"] != "unloaded":
        assert time.monotonic() < deadline
    assert router.post("/models/load", model="one").json()["status"] == {"value": "loaded"}


def test_clients_are_kept_apart_and_missed(router: Address) -> None:
    """Clients of two keys share no cached block, and a client that leaves does not compute on."""
    body = {"model": "one", "prompt": [*range(5, 69)], "max_tokens": 1}
    cached = []
    for key in ("key", "other", "key"):
        answer = router.ask("POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[1] == 0 < cached[2]
    with socket.create_connection((router.host, router.port)) as client:
        sent = json.dumps({"model": "one", "prompt": "x", "max_tokens": 900, "ignore_eos": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer key\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        client.sendall(head.encode() + sent)
        entry, deadline = router.own.pool.entry("one"), time.monotonic() + 30
        while entry.num_open == 0 or router.models["one"].is_idle():
            assert time.monotonic() < deadline
    while entry.num_open or not router.models["one"].is_idle():
        assert time.monotonic() < deadline


def test_other_sites_load_nothing(router: Address) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        for method, path in (("POST", "/models/load"), ("POST", "/models/unload"), ("GET", "/x?model=two")):
            answer = router.ask(method, path, {"model": "two"} if method == "POST" else None, headers)
            assert (answer.status, answer.error()["code"]) == (403, "origin_not_allowed")
    same = {"Origin": f"http://{router.host}:{router.port}", "Sec-Fetch-Site": "same-origin"}
    assert router.ask("POST", "/models/load", {"model": "one"}, same).status == 200


def test_wrong_requests_are_errors(router: Address) -> None:
    cases: list[tuple[dict[str, object] | bytes, int, str]] = [
        ({"model": "three", "prompt": "x"}, 404, "there is no model 'three'; the models of this router are one, two"),
        ({"prompt": "x"}, 400, "name one of the models one, two in the body's field model"),
        ({"model": 3}, 400, "name one of the models"),
        (b"{", 400, "the body is no JSON"),
        ({"model": "one", "prompt": "x", "max_tokens": -1}, 400, "max_tokens is -1"),
    ]
    for body, status, message in cases:
        answer = router.ask("POST", "/v1/completions", body)
        assert (answer.status, message in answer.error()["message"]) == (status, True), answer.body
    assert "in the query, as in ?model=NAME" in router.get("/inspector").error()["message"]
    assert router.ask("GET", "/v1/models", headers={"Authorization": "Bearer no"}).status == 401
    assert router.get("/v1/models/two").json()["id"] == "two"
    assert router.get("/v1/models/x").status == 404
    assert router.get("/ready").status == 200


def test_a_wrong_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    for text, message in (
        ("a: {model: x, quantisation: int8}", "a: there is no option 'quantisation'; did you mean 'quantization'?"),
        ("a: {quantization: int8}", "it must have the options of quire serve"),
        ("a: {model: x, port: 80}", "a has the option 'port', which the router sets"),
        ("[1]", "must name models with their options"),
        ("a: {", "cannot be read as YAML"),
    ):
        path.write_text(text)
        result = CliRunner().invoke(app, ["router", str(path)])
        assert result.exit_code == 1
        assert message in result.output, result.output
    assert "there is no file" in CliRunner().invoke(app, ["router", str(tmp_path / "none.yaml")]).output
    page = (Path(__file__).parents[2] / "docs" / "router.md").read_text(encoding="utf-8")
    path.write_text(page.split("```yaml\n")[1].split("```")[0])
    shown = read_models(path, ["model", "max_model_len", "quantization"])
    assert shown["chat"] == {"model": "qwen3:0.6b", "max_model_len": 8192}
    assert set(shown) == {"chat", "coder", "search"}
    with pytest.raises(ConfigError, match="data_dir is a directory of one server"):
        RouterConfig(data_dir=tmp_path)
    with pytest.raises(ConfigError, match="fleet_secret is of a fleet"):
        RouterConfig(fleet_secret="x")
    assert RouterConfig(reasoning_parser="qwen3", port=1).shared() == {"reasoning_parser": "qwen3"}
    assert json.dumps(RouterConfig(api_key_file=path).shared()) == "{}"
