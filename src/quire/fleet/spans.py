"""Trace spans of placements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.fleet.placement import Placement, reason_of

if TYPE_CHECKING:  # its packages are an extra
    from opentelemetry.context import Context

    from quire.server.observability.traces import CallSpan, Traces


def span_of(placement: Placement, traces: Traces | None, context: Context | None) -> CallSpan | None:
    """Start the span of a placement; None without tracing. context: the parent's context."""
    if traces is None or context is None:
        return None
    return traces.call("placement", context, attributes_of(placement))


def attributes_of(placement: Placement) -> dict[str, Any]:
    """Return the attributes of a placement's span. Costs are in seconds, in the order of the candidates."""
    choice, cause = placement.choice, placement.cause
    best = choice.best
    found: dict[str, Any] = {
        "gen_ai.request.id": placement.request,
        "quire.samples": list(placement.samples),
        "quire.delivered_tokens": placement.num_delivered,
        "quire.replica": placement.replica,
        "quire.placement.reason": cause.reason,
        "quire.placement.why": reason_of(choice),
        "quire.placement.cached_tokens": best.candidate.num_blocks * best.candidate.state.block_size,
        "quire.placement.uncached_tokens": best.uncached_tokens,
        "quire.placement.candidates": [one.candidate.name for one in choice.ranking],
        "quire.placement.costs": [one.parts.total for one in choice.ranking],
    }
    found |= {f"quire.placement.cost.{name}": seconds for name, seconds in best.parts._asdict().items()}
    if cause.replica is not None:
        found["quire.placement.from"] = cause.replica
    return found
