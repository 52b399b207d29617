"""Weights replaced and memory freed over HTTP: by the key for that alone, and no request is lost or mixed silently."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.frontend.model_fingerprint import replica_fingerprint
from quire.models import EMBEDDED
from quire.server.http.guard import ADMIN_PATHS
from quire.server.server_config import ServerConfig
from tests.server.serving import Serving, serving
from tests.test_weights import changed, saved

SLEEP, WAKE_UP, IS_SLEEPING, UPDATE = ADMIN_PATHS
ADMIN = {"Authorization": "Bearer root"}
BODY: dict[str, Any] = {"prompt": "def f(x):\n", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving(api_key=("client",), admin_api_key="root") as running:
        running.headers["Authorization"] = "Bearer client"
        yield running


def completed(server: Serving) -> tuple[str, str]:
    answer = server.post("/v1/completions", **BODY)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["text"], answer.json()["system_fingerprint"]


def admin(server: Serving, path: str, body: Any = None, status: int = 200) -> Any:
    answer = server.ask("GET" if path == IS_SLEEPING else "POST", path, body, ADMIN)
    assert answer.status == status, answer.body
    return answer.json() if answer.body else None


def test_the_routes_have_a_separate_key(served: Serving, server: Serving) -> None:
    for path in ADMIN_PATHS:
        method = "GET" if path == IS_SLEEPING else "POST"
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            assert served.ask(method, path, None, headers).status == 401  # else the client's key is sent
        assert server.ask(method, path).status == 404
    assert served.ask("GET", "/v1/models", None, ADMIN).status == 401
    with pytest.raises(ConfigError, match="admin_api_key does not go with fleet_secret"):
        ServerConfig(admin_api_key="a", fleet_secret="s")


def test_weights_are_replaced(served: Serving, tmp_path: Path) -> None:
    new = saved(tmp_path / "new", changed(1))
    with LLM(str(new), num_blocks=64, generation_config="none") as llm:
        params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
        expected = llm.generate(BODY["prompt"], params, use_tqdm=False)[0].outputs[0].text
    old = completed(served)
    error = admin(served, UPDATE, {"model_path": str(tmp_path)}, status=400)["error"]
    assert error["param"] == "model_path"
    assert "holds no weights" in error["message"]
    assert completed(served) == old
    found = admin(served, UPDATE, {"model_path": str(new), "weight_version": "step-1"})
    assert found == {
        "success": True,
        "message": "weights of version 'step-1' are used from the next step on",
        "weight_version": "step-1",
        "system_fingerprint": completed(served)[1],
    }
    text, name = completed(served)
    assert (text, name != old[1]) == (expected, True)
    llm = served.service.engine_client.llm.llm
    template = served.service.model.template
    assert name == f"fp_{replica_fingerprint(llm, None if template is None else template.source).digest[:10]}"
    again = {"model_path": str(EMBEDDED), "weight_version": "step-1"}
    assert admin(served, UPDATE, again, status=400)["error"]["param"] == "weight_version"
    assert admin(served, UPDATE, {"model_path": str(EMBEDDED)})["weight_version"] == "2"
    assert completed(served)[0] == old[0]


def test_sleep(served: Serving, tmp_path: Path) -> None:
    """Requests are refused for a while, running ones wait, and one that two versions computed names no system."""
    old = completed(served)
    whole = served.post("/v1/completions", **BODY | {"max_tokens": 600}).json()["choices"][0]["text"]
    for update in (False, True):
        connection = http.client.HTTPConnection(served.host, served.port, timeout=60)
        stream = json.dumps(BODY | {"max_tokens": 600, "stream": True})
        own = served.headers | {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", stream, own)
        response = connection.getresponse()
        lines = [response.readline()]
        admin(served, f"{SLEEP}?level=2")
        assert admin(served, IS_SLEEPING) == {"is_sleeping": True}
        assert served.get("/props").json()["is_sleeping"]
        refused = served.post("/v1/completions", **BODY)
        assert (refused.status, refused.error()["code"], refused.headers["retry-after"]) == (503, "asleep", "10")
        assert (served.get("/ready").status, served.get("/health").status) == (503, 200)
        if update:
            admin(served, UPDATE, {"model_path": str(saved(tmp_path / "new", changed(1)))})
        admin(served, WAKE_UP)
        lines += response.read().split(b"\n")
        chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
        connection.close()
        names = [chunk["system_fingerprint"] for chunk in chunks]
        if update:
            assert (names[0], names[-1], set(names)) == (old[1], None, {old[1], None})
        else:
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
            assert set(names) == {old[1]}
            assert completed(served) == old
    assert admin(served, f"{SLEEP}?level=3", status=400)["error"]["param"] == "level"
    assert admin(served, IS_SLEEPING) == {"is_sleeping": False}
    assert served.is_idle()
