"""A few hundred cases of what `python -m tests.server.fuzz` does for long."""

from __future__ import annotations

import pytest

from tests.marks import of_long_runs
from tests.server.fuzz import CANARY_EVERY, Report, attack, faults, fuzz, narrowed, target, told, watching

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("count", "most_examples"), [(60, 2), of_long_runs(400, 12)])  # of an operation
def test_no_case_brings_the_server_down_or_changes_a_text(count: int, most_examples: int) -> None:
    with target() as server:
        report = fuzz(server, count, most_examples, phases=("examples", "fuzzing"))
    assert not report.wrong, told(report)
    assert report.num_cases >= count
    assert report.num_canaries == report.num_cases // CANARY_EVERY > 0
    operations = {label for label, _, _ in report.cases}
    assert len(operations) == 34
    assert {mode for _, _, mode in report.cases} == {"positive", "negative"}
    for route in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/api/generate"):
        assert report.statuses[f"POST {route}", 200] > 0, told(report)


def test_what_is_wrong_is_found() -> None:
    """The checks of the fuzz themselves."""
    good = b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}'
    json = "application/json"
    assert not list(faults(400, json, good, "/v1/completions"))
    assert not list(faults(200, "text/event-stream", b'data: {"a": 1}\n\ndata: [DONE]\n\n', "/v1/completions"))
    for status, kind, content in (
        (500, json, good),
        (307, json, b"{}"),
        (400, "text/plain", b"no"),
        (400, json, b'{"detail": "no"}'),
        (400, json, good.replace(b'"m"', b'"' + b"m" * 500 + b'"')),
        (400, json, good.replace(b'"param": null', b'"param": 5')),
        (200, "text/event-stream", b'data: {"a": 1}\n\n'),
        (200, "text/event-stream", b'data: {"error": {}}\n\ndata: [DONE]\n\n'),
        (200, "text/html", b"<html>"),
    ):
        assert list(faults(status, kind, content, "/v1/completions")), content
    with target() as server:
        document = narrowed(server.get("/openapi.json").json())
        document["paths"] = {"/version": document["paths"]["/version"]}
        document["components"]["schemas"]["Version"]["properties"]["version"] = {"type": "integer"}
        report = Report()
        with watching(report, server):
            attack(server, report, document, "positive", 0, 1, ("fuzzing",))
        assert any("schema" in what for what in report.wrong), report.wrong
