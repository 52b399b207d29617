"""Every answer names the system that computed it: the digest by which a fleet knows its replicas, shortened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from quire.errors import ModelError
from quire.fingerprint.fingerprint import Fingerprint
from quire.frontend import model_fingerprint
from quire.frontend.llm import LLM
from quire.server.api.service import FINGERPRINT_HEADER
from tests.models.adapters import embedded_linears, save_adapter
from tests.server.serving import Answer, Serving, serving

USER = [{"role": "user", "content": "a queue"}]
SHORT = {"max_tokens": 3, "temperature": 0}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["import os\n", "a"], **SHORT},
    "/v1/chat/completions": {"messages": USER, **SHORT},
    "/v1/responses": {"input": "a queue", "max_output_tokens": 3, "temperature": 0},
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}
BY_HEADER: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": USER, **SHORT},
    "/api/chat": {"messages": USER, "stream": False, "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 3}},
    "/api/embed": {"input": "a"},
}
STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
BEAMS = {"use_beam_search": True, "n": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(ollama=True) as running:
        yield running


@pytest.fixture(scope="module")
def right(server: Serving) -> str:
    service = server.service
    template = service.model.template
    found = model_fingerprint.replica_fingerprint(
        service.engine_client.llm.llm, None if template is None else template.source
    )
    return f"fp_{found.digest[:10]}"


def posted(server: Serving, path: str, body: dict[str, Any]) -> Answer:
    answer = server.post(path, **body)
    assert answer.status == 200, answer.body
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("path", ROUTES)
def test_every_answer_names_it(server: Serving, right: str, path: str) -> None:
    assert posted(server, path, ROUTES[path]).json()["system_fingerprint"] == right


@pytest.mark.parametrize("own", [{}, BEAMS], ids=["drawn", "beams"])
@pytest.mark.parametrize("path", STREAMS[:2])
def test_every_chunk_names_it(server: Serving, right: str, path: str, own: dict[str, Any]) -> None:
    body = ROUTES[path] | own | {"stream_options": {"include_usage": True}}
    chunks = posted(server, path, body | {"stream": True}).events()
    assert len(chunks) > 3
    assert {chunk["system_fingerprint"] for chunk in chunks} == {right}
    if own:
        assert posted(server, path, ROUTES[path] | own).json()["system_fingerprint"] == right


def test_every_response_of_a_stream_names_it(server: Serving, right: str) -> None:
    answer = posted(server, "/v1/responses", ROUTES["/v1/responses"] | {"stream": True})
    events = [json.loads(line[6:]) for line in answer.body.splitlines() if line.startswith(b"data: ")]
    responses = [event["response"] for event in events if "response" in event]
    assert len(responses) >= 2
    assert {one["system_fingerprint"] for one in responses} == {right}


@pytest.mark.parametrize("path", BY_HEADER)
def test_other_protocols_name_it_in_a_header(server: Serving, right: str, path: str) -> None:
    body = BY_HEADER[path]
    answers = [posted(server, path, body)]
    if path != "/api/embed":
        answers.append(posted(server, path, body | {"stream": True}))
    assert [answer.headers[FINGERPRINT_HEADER.lower()] for answer in answers] == [right] * len(answers)


def test_an_answer_waits_for_it_and_a_server_does_not() -> None:
    """It is ready before it knows its digest."""
    known, found = Event(), Fingerprint({"a": "b"})

    def slow(service: Any) -> None:
        service.engine_client.identify = lambda: found if known.wait() else None

    with serving(prepare=slow) as server:
        assert server.get("/ready").status == 200
        known.set()
        body = ROUTES["/v1/completions"]
        assert posted(server, "/v1/completions", body).json()["system_fingerprint"] == f"fp_{found.digest[:10]}"


@pytest.mark.slow
def test_it_covers_the_adapters_that_are_loaded(tmp_path: Path) -> None:
    """Those that a server loads while it runs give it the fingerprint of one that began with them."""
    for seed, name in enumerate("ab"):
        save_adapter(tmp_path / name, embedded_linears(), seed)
    with serving(lora=(f"x={tmp_path / 'a'}",), allow_lora_loading=True) as server:
        template = server.service.model.template

        def right(**lora: Path) -> str:
            """That of a replica that begins with these adapters."""
            with LLM(num_blocks=64, lora=lora) as llm:
                found = model_fingerprint.replica_fingerprint(llm, None if template is None else template.source)
            return f"fp_{found.digest[:10]}"

        def named(model: str) -> str:
            found = posted(server, "/v1/completions", ROUTES["/v1/completions"] | {"model": model}).json()
            return str(found["system_fingerprint"])

        with_a, with_b, without = right(x=tmp_path / "a"), right(x=tmp_path / "b"), right()
        assert len({with_a, with_b, without}) == 3
        assert named("x") == with_a
        for directory, expected in (("b", with_b), ("a", with_a)):
            body = {"lora_name": "x", "lora_path": str(tmp_path / directory), "load_inplace": True}
            posted(server, "/v1/load_lora_adapter", body)
            assert named("x") == expected
        posted(server, "/v1/unload_lora_adapter", {"lora_name": "x"})
        assert named("quire-embedded") == without


@pytest.mark.slow
def test_it_is_null_where_it_is_not_known() -> None:
    def unknown(service: Any) -> None:
        service.engine_client.identify = lambda: None

    with serving(prepare=unknown, ollama=True) as server:
        found = posted(server, "/v1/completions", ROUTES["/v1/completions"]).json()
        assert found["system_fingerprint"] is None
        assert FINGERPRINT_HEADER.lower() not in posted(server, "/api/embed", BY_HEADER["/api/embed"]).headers


@pytest.mark.slow
def test_where_bits_depend_on_the_batch_nothing_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(num_blocks=64) as llm:
        kept = model_fingerprint.system_fingerprint(llm, None, {})
        assert kept == model_fingerprint.replica_fingerprint(llm, None)
        monkeypatch.setattr("quire.fingerprint.components.probe", lambda *_: pytest.fail("it probes"))
        monkeypatch.setattr(llm.decoder, "rows_are_batch_invariant", False)
        found = model_fingerprint.system_fingerprint(llm, None, {})
        assert found == model_fingerprint.system_fingerprint(llm, None, {}) != kept
        assert found != model_fingerprint.system_fingerprint(llm, "{{ messages }}", {})


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError("a kernel"), OSError("a file"), ModelError("the weights")])
def test_a_digest_that_cannot_be_found_is_logged(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("quire.fingerprint.components.probe", fail)
    with LLM(num_blocks=64) as llm:
        assert model_fingerprint.system_fingerprint(llm, None, {}) is None
    assert f"answers have no system_fingerprint: {error}" in caplog.text
