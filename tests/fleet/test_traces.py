"""Traces of a fleet: a placement for each replica that had a request, and below it what that replica did."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="OpenTelemetry is not installed")

from opentelemetry.trace import SpanKind, StatusCode

from quire.fleet.placement import PARTS
from quire.server.observability.traces import Traces
from tests.fleet.gateways import at, drain, fronting, lose, replicas, slow_all, undrain
from tests.fleet.serving import SECRET, Front
from tests.fleet.test_metrics import Asked, serving_one
from tests.forks import QUIRE, Process, Spawner
from tests.server.collected import ENDPOINT, Kept, collecting, counted, flush, is_below, until
from tests.server.serving import Serving

BODY = {"prompt": list(range(5, 45)), "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@contextmanager
def keeping() -> Iterator[Kept]:
    """The place to which all spans of what is started within go."""
    kept = Kept()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traces, "to", classmethod(lambda cls, endpoint, *names: counted(cls(kept, *names))))
        yield kept


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Kept, list[Serving], Front]]:
    with (
        keeping() as kept,
        replicas(2, otlp_traces_endpoint=ENDPOINT) as servers,
        fronting(*(server.url for server in servers), otlp_traces_endpoint=ENDPOINT) as front,
    ):
        yield kept, servers, front


def clear(fleet: tuple[Kept, list[Serving], Front]) -> tuple[Kept, list[Serving], Front]:
    kept, servers, front = fleet
    flush(front, *servers)
    slow_all(servers, 0.0)
    for server in servers:
        undrain(server)
    until(lambda: all(link.is_up and not link.state.draining for link in front.gateway.fleet.roster.links.values()))
    kept.spans.clear()
    return fleet


def service(span: Any) -> str:
    return span.resource.attributes["service.name"]


@pytest.mark.slow
def test_a_request(fleet: Any) -> None:
    kept, servers, front = clear(fleet)
    asked = {"prompt": list(range(200, 240)), "n": 2}  # which nothing else has asked
    assert front.post("/v1/completions", **BODY | asked).status == 200
    flush(front, *servers)
    [root] = kept.named("POST /v1/completions")
    [placement] = kept.named("placement")
    samples = kept.named("llm_request")
    assert service(root) == service(placement) == "quire-fleet"
    assert is_below(placement, root)
    assert placement.kind is SpanKind.CLIENT
    about = dict(placement.attributes)
    assert about["quire.replica"] in {server.url for server in servers}
    assert about["quire.placement.reason"] == "new"
    assert about["quire.placement.cached_tokens"] == 0
    assert about["quire.placement.uncached_tokens"] == 40
    assert set(about["quire.placement.candidates"]) == {server.url for server in servers}
    parts = [value for name, value in about.items() if name.startswith("quire.placement.cost.")]
    assert len(parts) == len(PARTS)
    assert sum(parts) == pytest.approx(about["quire.placement.costs"][0])
    assert about["quire.samples"] == (0, 1)
    assert about["quire.outcome"] == "finished"
    assert about["gen_ai.response.model"] == "quire-embedded"
    assert len(samples) == 2
    for sample in samples:
        assert service(sample) == "quire"
        assert is_below(sample, placement)
        assert sample.parent.is_remote
        assert sample.kind is SpanKind.SERVER
        assert sample.attributes["gen_ai.request.id"].startswith(about["gen_ai.request.id"])
        assert [event.name for event in sample.events] == ["queued", "scheduled", "first_token", "finished"]


@pytest.mark.slow
def test_what_is_cached() -> None:
    with (
        keeping() as kept,
        replicas(1, otlp_traces_endpoint=ENDPOINT) as servers,
        fronting(servers[0].url, otlp_traces_endpoint=ENDPOINT) as front,
    ):
        for _ in range(2):
            front.post("/v1/completions", **BODY | {"prompt": list(range(50, 100))})
            until(lambda: front.on_loop(lambda: len(front.gateway.fleet.roster.index)) >= 3)
        flush(front, *servers)
        _, second = kept.named("placement")
        assert second.attributes["quire.placement.cached_tokens"] == 48
        assert second.attributes["quire.placement.uncached_tokens"] == 2
        assert kept.named("llm_request")[1].attributes["gen_ai.usage.cache_read.input_tokens"] == 48


@pytest.mark.slow
def test_a_loss(fleet: Any) -> None:
    kept, servers, front = clear(fleet)
    slow_all(servers, 0.2)
    asked = Asked(front, **BODY)
    url = serving_one(front)
    lose(at(servers, url))
    slow_all(servers, 0.0)
    assert asked.result().status == 200
    flush(front, *servers)
    [root] = kept.named("POST /v1/completions")
    first, second = kept.named("placement")
    assert is_below(first, root)
    assert is_below(second, root)
    assert first.attributes["quire.replica"] == second.attributes["quire.placement.from"] == url
    assert first.attributes["quire.outcome"] == "lost"
    assert first.status.status_code is StatusCode.ERROR
    assert second.attributes["quire.placement.reason"] == "lost"
    assert second.attributes["quire.outcome"] == "finished"
    assert second.status.status_code is StatusCode.UNSET
    delivered = second.attributes["quire.delivered_tokens"]
    assert delivered >= 3
    [resumed] = [one for one in kept.named("llm_request") if is_below(one, second)]
    assert resumed.attributes["quire.delivered_tokens"] == delivered
    assert resumed.attributes["gen_ai.usage.output_tokens"] == 40 - delivered
    until(lambda: flush(front, *servers) or len(kept.named("llm_request")) == 2)  # the lost one computes its step first
    [begun] = [one for one in kept.named("llm_request") if is_below(one, first)]
    assert begun.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_a_client_that_goes(fleet: Any) -> None:
    """Its placement ends with it."""
    kept, servers, front = clear(fleet)
    slow_all(servers, 0.2)
    connection = http.client.HTTPConnection(front.host, front.port)
    body = json.dumps(BODY | {"stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    connection.getresponse().read(10)
    serving_one(front)
    connection.close()
    until(lambda: front.on_loop(lambda: not front.gateway.fleet.jobs.works))
    until(lambda: flush(front, *servers) or kept.named("llm_request"))
    [placement] = kept.named("placement")
    assert placement.attributes["quire.outcome"] == "taken back"


def test_a_beam_search(fleet: Any) -> None:
    kept, servers, front = clear(fleet)
    assert front.post("/v1/completions", **BODY | {"n": 2, "use_beam_search": True}).status == 200
    flush(front, *servers)
    [root], [placement], [sample] = (kept.named(name) for name in ("POST /v1/completions", "placement", "llm_request"))
    assert is_below(placement, root)
    assert is_below(sample, placement)
    assert placement.attributes["quire.outcome"] == "finished"


def test_a_refusal(fleet: Any) -> None:
    kept, servers, front = clear(fleet)
    assert front.post("/v1/completions", **BODY | {"prompt": "a", "regex": "("}).status == 400
    flush(front, *servers)
    [placement] = kept.named("placement")
    assert placement.attributes["quire.outcome"] == "not taken"
    assert placement.status.status_code is StatusCode.ERROR
    assert kept.named("llm_request") == []


@pytest.mark.slow
def test_a_drained_replica(fleet: Any) -> None:
    kept, servers, front = clear(fleet)
    slow_all(servers, 0.2)
    asked = Asked(front, **BODY)
    url = serving_one(front)
    drain(at(servers, url))
    slow_all([server for server in servers if server.url != url], 0.0)
    assert asked.result().status == 200
    flush(front, *servers)
    first, second = kept.named("placement")
    assert first.attributes["quire.outcome"] == "moved"
    assert first.status.status_code is StatusCode.UNSET
    assert second.attributes["quire.placement.reason"] == "drained"
    assert second.attributes["quire.placement.from"] == url


@pytest.mark.slow
def test_replicas_without_traces_serve_a_gateway_that_has_them() -> None:
    with (
        keeping() as kept,
        replicas(1) as servers,
        fronting(servers[0].url, otlp_traces_endpoint=ENDPOINT) as front,
    ):
        assert front.post("/v1/completions", **BODY).status == 200
        flush(front)
    assert sorted({span.name for span in kept.spans}) == ["POST /v1/completions", "placement"]


# Spans are exported every 50 ms: the test would wait for the usual 5 s.
EXPORTING = f"import os; os.environ['OTEL_BSP_SCHEDULE_DELAY'] = '50'; {QUIRE}"


@pytest.mark.slow
def test_processes_and_a_collector(forks: Spawner) -> None:
    """Two replicas and a gateway, as the command line starts them; one replica is killed while it serves."""
    with collecting() as collector, ExitStack() as stack:
        own = ("--port", "0", "--fleet-secret", SECRET, "--otlp-traces-endpoint", collector.url)

        def start(*arguments: str) -> Process:
            return stack.enter_context(forks.running(*arguments, *own, program=EXPORTING))

        processes = [start("serve", "--num-blocks", "128") for _ in range(2)]
        front = start("fleet", "--replicas", ",".join(process.url for process in processes)).url

        def metric(name: str, url: str = front) -> float:
            text = urlopen(f"{url}/metrics").read().decode()
            return sum(
                float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            )

        until(lambda: metric("quire:fleet_replica_up") == 2)
        body = {"prompt": "import", "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}
        request = Request(f"{front}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=60) as answer:
            answer.readline()
            [victim] = [process for process in processes if metric("quire:fleet_calls", process.url) == 1]
            victim.kill()
            rest = answer.read()
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in rest
        until(lambda: len(collector.named("placement")) == 2 and collector.named("llm_request"))
        until(lambda: collector.named("POST /v1/completions"))
        [root], (first, second) = collector.named("POST /v1/completions"), collector.named("placement")
        assert first["parent"] == second["parent"] == root["id"]
        assert (first["attributes"]["quire.outcome"], second["attributes"]["quire.outcome"]) == ("lost", "finished")
        [resumed] = collector.named("llm_request")  # what the killed one had of its own is gone with it
        assert resumed["parent"] == second["id"]
        assert resumed["trace"] == second["trace"] == root["trace"]
        assert (resumed["service"], root["service"]) == ("quire", "quire-fleet")
        assert resumed["events"] == ["queued", "scheduled", "first_token", "finished"]
        assert second["start"] <= resumed["start"] <= resumed["end"] <= root["end"]
