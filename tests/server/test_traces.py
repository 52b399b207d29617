"""Traces of a server: one span a request, one below it for each sample; and none of it changes an answer."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry is not installed")

from opentelemetry.trace import SpanKind, StatusCode

from quire.errors import ConfigError
from quire.server.observability import traces as traced
from quire.server.observability.traces import Traces
from quire.server.run import open_traces
from quire.server.server_config import ServerConfig
from tests.server.collected import ENDPOINT, Failing, Kept, counted, flush, is_below, until
from tests.server.serving import Serving, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
BODY = {"prompt": "import", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


@contextmanager
def tracing(exporter: Any, **config: Any) -> Iterator[Serving]:
    """A server whose spans go there."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Traces, "to", classmethod(lambda cls, endpoint, *names: counted(cls(exporter, *names))))
    try:
        with serving(otlp_traces_endpoint=ENDPOINT, **config) as server:
            yield server
    finally:
        patch.undo()


@pytest.fixture(scope="module")
def kept() -> Kept:
    return Kept()


@pytest.fixture(scope="module")
def server(kept: Kept) -> Iterator[Serving]:
    with tracing(kept) as found:
        yield found


@pytest.fixture
def spans(server: Serving, kept: Kept) -> Callable[..., list[Any]]:
    """The spans of a name since this test began, once there are that many: some begin and end after the answer."""
    flush(server)
    kept.spans.clear()

    def named(name: str, count: int = 1) -> list[Any]:
        until(lambda: flush(server) or len(kept.named(name)) >= count)
        return kept.named(name)

    return named


class TestSpans:
    @pytest.mark.slow
    def test_a_request_and_its_sample(self, server: Serving, spans: Any) -> None:
        prompt = list(range(5, 45))
        for _ in range(2):
            server.post("/v1/completions", **BODY | {"prompt": prompt})
        roots, samples = spans("POST /v1/completions", 2), spans("llm_request", 2)
        assert len(roots) == len(samples) == 2
        root, sample = roots[1], samples[1]
        assert root.kind is SpanKind.SERVER
        assert root.parent is None
        assert root.attributes == {
            "gen_ai.provider.name": "quire",
            "gen_ai.response.model": "quire-embedded",
            "gen_ai.operation.name": "text_completion",
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "url.path": "/v1/completions",
            "http.response.status_code": 200,
        }
        assert is_below(sample, root)
        assert not is_below(sample, roots[0])
        assert sample.kind is SpanKind.INTERNAL
        about = dict(sample.attributes)
        latencies = {name: about.pop(name) for name in list(about) if name.startswith("gen_ai.latency.")}
        assert about.pop("gen_ai.request.id").startswith("cmpl-")
        assert about == {
            "gen_ai.provider.name": "quire",
            "gen_ai.response.model": "quire-embedded",
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.choice.count": 1,
            "gen_ai.request.max_tokens": 5,
            "gen_ai.request.temperature": 0,
            "gen_ai.request.top_p": 1,
            "gen_ai.request.top_k": 0,
            "gen_ai.usage.input_tokens": 40,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.usage.cache_read.input_tokens": 32,
            "gen_ai.response.finish_reasons": ("length",),
            "quire.sample": 0,
            "quire.delivered_tokens": 0,
        }
        assert [event.name for event in sample.events] == ["queued", "scheduled", "first_token", "finished"]
        times = [event.timestamp for event in sample.events]
        assert times == sorted(times)
        assert sample.start_time == times[0]
        assert sample.end_time == times[-1]
        assert root.start_time <= sample.start_time
        assert latencies["gen_ai.latency.e2e"] == pytest.approx((times[3] - times[0]) / 1e9, abs=1e-6)
        assert latencies["gen_ai.latency.time_in_queue"] == pytest.approx((times[1] - times[0]) / 1e9, abs=1e-6)
        assert latencies["gen_ai.latency.time_to_first_token"] == pytest.approx((times[2] - times[0]) / 1e9, abs=1e-6)
        inference = latencies["gen_ai.latency.time_in_model_inference"]
        parts = ("gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_model_decode")
        assert inference == pytest.approx(sum(latencies[part] for part in parts))

    def test_a_clients_trace_goes_on(self, server: Serving, spans: Any) -> None:
        headers = {"Traceparent": TRACEPARENT, "Tracestate": "vendor=1"}
        assert server.ask("POST", "/v1/completions", BODY, headers).status == 200
        [root], [sample] = spans("POST /v1/completions"), spans("llm_request")
        assert f"{root.context.trace_id:032x}" == f"{sample.context.trace_id:032x}" == TRACE
        assert f"{root.parent.span_id:016x}" == PARENT
        assert root.context.trace_state["vendor"] == "1"

    def test_a_client_that_does_not_sample(self, server: Serving, spans: Any) -> None:
        headers = {"traceparent": TRACEPARENT[:-1] + "0"}
        assert server.ask("POST", "/v1/completions", BODY, headers).status == 200
        assert spans("POST /v1/completions", 0) == spans("llm_request", 0) == []

    @pytest.mark.parametrize(
        "header", ["", "x", "00-0-0-00", TRACEPARENT + "-", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"]
    )
    def test_a_header_that_is_none(self, server: Serving, spans: Any, header: str) -> None:
        assert server.ask("POST", "/v1/completions", BODY, {"traceparent": header}).status == 200
        [root] = spans("POST /v1/completions")
        assert root.parent is None

    def test_a_stream_is_traced_to_its_end(self, server: Serving, spans: Any) -> None:
        assert len(server.post("/v1/completions", **BODY | {"n": 3, "stream": True}).events()) > 3
        [root], samples = spans("POST /v1/completions"), spans("llm_request", 3)
        assert sorted(sample.attributes["quire.sample"] for sample in samples) == [0, 1, 2]
        assert all(is_below(sample, root) for sample in samples)
        assert all(sample.end_time <= root.end_time for sample in samples)

    @pytest.mark.slow
    def test_chat_embeddings_and_a_beam_search(self, server: Serving, spans: Any) -> None:
        server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=1)
        server.post("/v1/embeddings", input=["a", "b"])
        server.post("/v1/completions", **BODY | {"use_beam_search": True, "n": 2})
        [chat], [embed], [search] = (
            spans(f"POST /v1/{route}") for route in ("chat/completions", "embeddings", "completions")
        )
        assert [one.attributes["gen_ai.operation.name"] for one in (chat, embed)] == ["chat", "embeddings"]
        below = {
            root.name: [one for one in spans("llm_request", 4) if is_below(one, root)] for root in (chat, embed, search)
        }
        assert [len(those) for those in below.values()] == [1, 2, 1]
        for one in below[embed.name]:
            assert one.attributes["gen_ai.operation.name"] == "embeddings"
            assert "gen_ai.request.temperature" not in one.attributes
            assert one.attributes["gen_ai.usage.output_tokens"] == 0
        [one] = below[search.name]
        assert one.attributes["gen_ai.usage.output_tokens"] == 10

    def test_a_refusal(self, server: Serving, spans: Any) -> None:
        assert server.post("/v1/completions", prompt="a", max_tokens=-1).status == 400
        [root] = spans("POST /v1/completions")
        assert root.attributes["http.response.status_code"] == 400
        assert root.status.status_code is StatusCode.UNSET  # the client's error
        assert spans("llm_request", 0) == []

    def test_other_routes_have_none(self, server: Serving, kept: Kept, spans: Any) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/v1/completions"):
            server.get(path)
        server.post("/tokenize", prompt="a")
        assert spans("any", 0) == []
        assert kept.spans == []

    def test_nothing_is_kept_of_requests_that_ended(self, server: Serving) -> None:
        assert server.service.traces._began == {}

    def test_no_text_is_traced(self, server: Serving, kept: Kept, spans: Any) -> None:
        answer = server.post("/v1/completions", prompt="password = 'tr0ub4dor'", max_tokens=8, stop=["tr0ub4dor&3"])
        assert answer.status == 200
        spans("POST /v1/completions"), spans("llm_request")
        assert len(kept.spans) == 2
        assert "tr0ub4dor" not in "".join(span.to_json() for span in kept.spans)


def test_an_engine_that_fails_is_an_error() -> None:
    kept = Kept()

    def broken(service: Any) -> None:
        def run(batch: Any) -> Any:
            raise RuntimeError("a step failed")

        service.engine_client.engine.runner.run = run

    patch = pytest.MonkeyPatch()
    patch.setattr(Traces, "to", classmethod(lambda cls, endpoint, *names: cls(kept, *names)))
    with serving(prepare=broken, otlp_traces_endpoint=ENDPOINT) as server:
        assert server.post("/v1/completions", **BODY).status == 500
    patch.undo()
    [root], [sample] = kept.named("POST /v1/completions"), kept.named("llm_request")
    assert root.status.status_code is sample.status.status_code is StatusCode.ERROR
    assert sample.attributes["gen_ai.response.finish_reasons"] == ("error",)


@pytest.mark.slow
def test_answers_are_the_same_whatever_becomes_of_the_spans(
    server: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def answers(server: Serving) -> list[Any]:
        bodies = (BODY, BODY | {"n": 2, "temperature": 1.0, "seed": 3}, BODY | {"logprobs": 2})
        return [server.post("/v1/completions", **body).json()["choices"] for body in bodies]

    expected = answers(server)
    with serving() as plain:
        assert plain.service.traces is None
        assert answers(plain) == expected
    with tracing(Failing()) as failing:
        assert answers(failing) == expected
    monkeypatch.setattr(traced, "_asked", lambda request: 1 / 0)  # a defect of ours
    with tracing(Kept()) as defect:
        assert answers(defect) == expected
    assert "a request could not be traced" in caplog.text


def test_the_last_spans_are_sent_at_the_end() -> None:
    kept = Kept()
    with tracing(kept) as server:
        server.post("/v1/completions", **BODY)
    assert sorted(span.name for span in kept.spans) == ["POST /v1/completions", "llm_request"]  # two threads end them


def test_the_resource_says_where_spans_come_from(server: Serving, kept: Kept, spans: Any) -> None:
    server.post("/v1/completions", **BODY)
    about = spans("llm_request")[0].resource.attributes
    assert about["service.name"] == "quire"
    assert about["service.instance.id"]


# ------------------------------------------------------------------------------------------------ the option


def test_it_is_off() -> None:
    """tests/test_importing.py sees that nothing is imported for it then."""
    assert open_traces(ServerConfig(), "quire", "m") is None


def test_an_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "quire.server.observability.traces")
    message = f"otlp_traces_endpoint is '{ENDPOINT}'; it needs .* is missing: pip install 'quire\\[traces\\]'"
    with pytest.raises(ConfigError, match=message):
        open_traces(ServerConfig(otlp_traces_endpoint=ENDPOINT), "quire", "m")


@pytest.mark.slow
@pytest.mark.parametrize("bad", ["localhost:4317", "grpc://localhost:4317", ""])
def test_an_endpoint_that_is_none(bad: str) -> None:
    with pytest.raises(ConfigError, match=f"otlp_traces_endpoint is {json.dumps(bad)[1:-1]!r}; it must be a URL"):
        ServerConfig(otlp_traces_endpoint=bad)
