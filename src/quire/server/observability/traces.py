"""Traces: spans for OpenTelemetry. Imported only if traces are configured, since its packages are an extra.

A client's request is a span. The engine's work for each of its samples is a child span, and so is each call of a
fleet's gateway to a replica. Names are those of OpenTelemetry's conventions for generative AI, then vLLM's, then our
own. No span contains a text or a token.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire import __version__
from quire.frontend.metrics import Moments
from quire.request import FinishReason, Request, Task

PROVIDER = "quire"
FLUSH = 3.0  # s for sending the last spans when the server ends
# The routes that have a span, and their operations as the convention names them.
OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
PROPAGATOR = TraceContextTextMapPropagator()  # W3C's traceparent and tracestate
Attributes = Mapping[str, AttributeValue]


class Traces:
    """Creates and sends spans. Any thread may call it."""

    def __init__(self, exporter: SpanExporter, service: str, model: str) -> None:
        """Create it. service: the service name of the spans. model: the name of the served model."""
        resource = Resource.create({"service.name": service, "service.instance.id": str(uuid.uuid4()),
                                    "service.version": __version__})  # fmt: skip
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire", __version__)
        self._model = model
        self._began: dict[str, tuple[Request, Context, int]] = {}  # with the number of tokens delivered before

    @classmethod
    def to(cls, endpoint: str, service: str, model: str) -> Traces:
        """Return traces that are sent to an OTLP/HTTP endpoint."""
        return cls(OTLPSpanExporter(endpoint=endpoint), service, model)

    def close(self) -> None:
        """Send the remaining spans. Wait up to FLUSH s."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(FLUSH)

    def current(self) -> Context:
        """Return the parent context for spans of the current task."""
        return get_current()

    @contextmanager
    def under(self, traceparent: str | None) -> Iterator[None]:
        """Make the current task part of another server's span. A missing or invalid traceparent means no span."""
        token = attach(PROPAGATOR.extract({} if traceparent is None else {"traceparent": traceparent}, Context()))
        try:
            yield
        finally:
            detach(token)

    def call(self, name: str, context: Context, attributes: Attributes) -> CallSpan:
        """Start the span of a call to another server."""
        span = self._tracer.start_span(name, context, SpanKind.CLIENT, self._with_model(attributes))
        return CallSpan(span)

    @contextmanager
    def serve(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Iterator[Span]:
        """Open a span while the current task serves a request with these headers. Their names are in lower case."""
        context = PROPAGATOR.extract(headers, Context())
        with self._tracer.start_as_current_span(
            name, context, SpanKind.SERVER, self._with_model(attributes), record_exception=False
        ) as span:
            yield span

    # ----------------------------------------------------------------------------------------- the engine's requests

    def began(self, requests: Iterable[Request]) -> None:
        """Record that the current task has queued requests."""
        context = get_current()
        for one in requests:
            self._began[one.id] = (one, context, one.num_generated + len(one.to_check))

    def ended(self, name: str, moments: Moments, reason: str, now: float) -> None:
        """Send the span of a request that ended with a value of FinishReason. now: s of time.monotonic()."""
        if name not in self._began:
            return
        request, context, num_delivered = self._began.pop(name)
        epoch = time.time_ns() - time.monotonic_ns()

        def at(seconds: float) -> int:
            return epoch + round(1e9 * seconds)

        parent = get_current_span(context).get_span_context()
        kind = SpanKind.SERVER if parent.is_remote or not parent.is_valid else SpanKind.INTERNAL
        attributes = self._with_model(_asked(request) | _latencies(moments, now))
        span = self._tracer.start_span("llm_request", context, kind, attributes, start_time=at(moments.arrived))
        span.set_attributes(
            {
                "gen_ai.usage.output_tokens": moments.num_tokens,
                "gen_ai.response.finish_reasons": [reason],
                "quire.delivered_tokens": num_delivered,
            }
        )
        if (report := request.cache.prefix_report) is not None:
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", report.num_cached)
        events = {"queued": moments.arrived, "scheduled": moments.scheduled, "first_token": moments.first}
        for event, seconds in events.items():
            if seconds is not None:
                span.add_event(event, timestamp=at(seconds))
        span.add_event("finished", timestamp=at(now))
        if reason == FinishReason.ERROR.value:
            span.set_status(StatusCode.ERROR)
        span.end(at(now))

    def _with_model(self, attributes: Attributes) -> dict[str, AttributeValue]:
        return {"gen_ai.provider.name": PROVIDER, "gen_ai.response.model": self._model, **attributes}


class CallSpan:
    """The span of a call to another server."""

    def __init__(self, span: Span) -> None:
        carrier: dict[str, str] = {}
        PROPAGATOR.inject(carrier, set_span_in_context(span, Context()))
        self.traceparent = carrier["traceparent"]  # for the other server
        self._span = span

    def end(self, outcome: str, *, is_error: bool) -> None:
        """Send the span of a finished call. outcome: a word for the result."""
        self._span.set_attribute("quire.outcome", outcome)
        if is_error:
            self._span.set_status(StatusCode.ERROR, outcome)
        self._span.end()


class Traced:
    """Opens a span for each request to one of OPERATIONS, from its headers to the end of its answer."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self._app = app
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {
            "gen_ai.operation.name": operation,
            "http.request.method": scope["method"],
            "http.route": scope["path"],
            "url.path": scope["path"],
        }
        with self._traces.serve(f"POST {scope['path']}", headers, attributes) as span:

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            await self._app(scope, receive, sending)


def _asked(request: Request) -> dict[str, AttributeValue]:
    """Return the attributes of a request."""
    sampling = request.sampling
    embeds = request.task is Task.EMBED
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": "embeddings" if embeds else "text_completion",
        "gen_ai.request.id": request.id,
        "gen_ai.usage.input_tokens": request.num_prompt,
    }
    if not embeds:
        found |= {
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k,
            "gen_ai.request.seed": sampling.seed,
            "quire.sample": request.sample_index,
        }
    return {name: value for name, value in found.items() if value is not None}


def _latencies(moments: Moments, now: float) -> dict[str, AttributeValue]:
    """Return latencies in seconds, by vLLM's names, without those of events that have not happened."""
    found = {"gen_ai.latency.e2e": now - moments.arrived}
    if moments.scheduled is not None:
        found["gen_ai.latency.time_in_queue"] = moments.scheduled - moments.arrived
    if moments.first is not None:
        found["gen_ai.latency.time_to_first_token"] = moments.first - moments.arrived
    if moments.scheduled is not None and moments.first is not None and moments.last is not None:
        found["gen_ai.latency.time_in_model_prefill"] = moments.first - moments.scheduled
        found["gen_ai.latency.time_in_model_decode"] = moments.last - moments.first
        found["gen_ai.latency.time_in_model_inference"] = moments.last - moments.scheduled
    return dict(found)
