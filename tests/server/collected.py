"""Spans that a test can look at: kept in this process, or received from others by a collector."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

ENDPOINT = "http://127.0.0.1:9/v1/traces"  # where nothing listens


class Kept(SpanExporter):
    """Keeps what is exported."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS

    def named(self, name: str) -> list[ReadableSpan]:
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time)


class Open(SpanProcessor):
    """Counts the spans that have begun and not ended: a request's ends a moment after its client has the answer."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        with self._lock:
            self.count += 1

    def on_end(self, span: Any) -> None:
        with self._lock:
            self.count -= 1


def counted(traces: Any) -> Any:
    """These traces, whose open spans `flush` waits for."""
    traces.open = Open()
    traces._provider.add_span_processor(traces.open)
    return traces


def flush(*servers: Any) -> None:
    """Export all spans of these servers, once those that began have ended."""
    for server in servers:
        traces = server.service.traces
        until(lambda traces=traces: traces.open.count == 0)
        traces._provider.force_flush()


class Failing(SpanExporter):
    """Cannot export anything."""

    def export(self, spans: Any) -> SpanExportResult:
        raise OSError("there is no collector")


def is_below(span: ReadableSpan, other: ReadableSpan) -> bool:
    """Whether a span's parent is that one."""
    return (
        span.parent is not None
        and span.parent.span_id == other.context.span_id
        and span.context.trace_id == other.context.trace_id
    )


class Collector:
    """What was received."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []  # with the attributes of their resources
        self.url = ""

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = attributes(resource.resource.attributes)
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        {
                            "name": span.name,
                            "service": about["service.name"],
                            "instance": about["service.instance.id"],
                            "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "attributes": attributes(span.attributes),
                            "events": [event.name for event in span.events],
                            "start": span.start_time_unix_nano,
                            "end": span.end_time_unix_nano,
                        }
                    )

    def named(self, name: str) -> list[dict[str, Any]]:
        return sorted((span for span in self.spans if span["name"] == name), key=lambda span: span["start"])


def attributes(found: Any) -> dict[str, Any]:
    def value(one: Any) -> Any:
        kind = one.WhichOneof("value")
        return [value(each) for each in one.array_value.values] if kind == "array_value" else getattr(one, kind)

    return {one.key: value(one.value) for one in found}


@contextmanager
def collecting() -> Iterator[Collector]:
    """An OTLP/HTTP collector."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
