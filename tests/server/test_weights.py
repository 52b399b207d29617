"""Weights replaced and memory freed over HTTP: by the key for that alone, and no request is lost or mixed silently."""

from __future__ import annotations

import http.client
import json
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.fleet.work import wire_digests
from quire.frontend.model_fingerprint import replica_fingerprint
from quire.models import EMBEDDED
from quire.server.http.guard import ADMIN_PATHS
from tests.fleet.gateways import fronting, get_the_request, replica_of, replicas, slow_all, until
from tests.fleet.serving import SECRET
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


def test_a_fleet_follows_the_weights_of_its_replicas(tmp_path: Path) -> None:
    """Each answer is of one set of weights, and names it; new blocks are found, and those of old weights are not."""
    new = {"model_path": str(saved(tmp_path / "new", changed(1))), "weight_version": "step-1"}
    body = BODY | {"prompt": "def f(x):\n    return x\n" * 8, "max_tokens": 24}

    def asked(server: Serving) -> tuple[str, str, int]:
        found = server.post("/v1/completions", **body).json()
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found["choices"][0]["text"], found["system_fingerprint"], cached

    with ExitStack() as stack:
        servers = stack.enter_context(replicas(2, admin_api_key="root"))
        get_the_request(*servers)
        front = stack.enter_context(fronting(*(one.url for one in servers)))
        fleet = front.gateway.fleet
        links = fleet.roster.links
        text, name, _ = asked(front)
        slow_all(servers, 0.1)
        with ThreadPoolExecutor(1) as thread:
            begun = thread.submit(asked, front)
            until(lambda: replica_of(servers[0])._num_calls() == 1)
            admin(servers[0], UPDATE, new)
            slow_all(servers, 0.0)
            assert begun.result(60)[:2] == (text, name)  # computed by the other replica
        until(lambda: fleet.num_updates == 1 and links[servers[0].url].is_up)
        assert not fleet.roster.is_fitting(links[servers[1].url])
        first, again = asked(front), asked(front)
        assert first[0] != text
        assert first[1] != name
        assert again[2] % 16 == 0  # the first may find blocks of the new weights: of the request that went elsewhere
        assert again == (first[0], first[1], again[2])
        assert again[2] > 0
        prompt = array("i", servers[0].service.model.tokenizer.encode(body["prompt"]))
        link = links[servers[0].url]
        digests = wire_digests(prompt, "", None, link.hello, SECRET.encode())
        assert front.on_loop(lambda: fleet.roster.index.runs(digests)) == {link.slot: len(prompt) // 16}
        admin(servers[1], UPDATE, new)
        until(lambda: fleet.roster.is_fitting(links[servers[1].url]) and links[servers[1].url].is_up)
        assert fleet.num_updates == 1
        assert {link.fingerprint.digest for link in links.values()} == {fleet.roster.model.digest}
        assert servers[1].post("/v1/completions", **body).json()["choices"][0]["text"] == first[0]
        assert admin(servers[0], SLEEP, status=409)["error"]["message"].startswith("this is a replica of a fleet")


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
