"""What the server's OpenAPI document allows and forbids, tried out; `python -m tests.server.fuzz 20000` for long.

schemathesis makes the cases: for every operation of the document, valid and invalid ones, none filtered out. Its own
checks are on, but for the one in `CHECKS_OFF`; to them comes `faults`, which knows what this server promises. Meanwhile
a canary sings: the same requests again and again, which must be given the same texts, whatever else goes on.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import schemathesis
from schemathesis import engine
from schemathesis.checks import CHECKS, CheckContext
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events

from tests.server.serving import Serving, serving
from tests.server.storm import num_tasks, settle

KEY = "the-key-of-the-fuzz"
BOUND = 30.0  # seconds within which everything is answered
LONGEST_MESSAGE = 400  # characters
LONGEST_PARAM = 100
CANARY_EVERY = 50  # cases
ALL_PHASES = ("examples", "coverage", "fuzzing", "stateful")
# So that nothing takes long, whatever is asked for.
ENGINE = {"max_model_len": 64, "max_num_seqs": 8, "num_blocks": 256, "max_num_batched_tokens": 128}
# A request may be just as the document says and ask for what cannot be: more tokens than there is room for, say.
CHECKS_OFF = ("positive_data_acceptance",)
# What Python below 3.12 may say where two threads, such as schemathesis's, parse Python at the same time.
CPYTHONS_OWN = "AST constructor recursion depth mismatch"
TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2047}, "maxItems": 8}
# Instead of what the document says of these fields, so that more of the requests reach the engine.
NARROW: dict[str, Any] = {
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 12},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": 12},
    "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 12},
    "n_predict": {"type": "integer", "minimum": 0, "maximum": 12},
    "n": {"type": "integer", "minimum": 1, "maximum": 4},
    "min_tokens": {"const": 0},
    "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
    "stop_token_ids": TOKENS,
    "regex": {"enum": ["[a-z]{2,9}", "(0|1)+", "é🎉*"]},
    "priority": {"const": 0},
    "dimensions": {"type": "integer", "minimum": 1, "maximum": 256},
    "input": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 10}, TOKENS | {"minItems": 1}]},
    "prompt": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 10}, TOKENS | {"minItems": 1}]},
    "content": {"type": "string", "maxLength": 4},
}  # fmt: skip
NARROWED_OUT = ("best_of", "grammar", "response_format", "top_logprobs", "use_beam_search", "length_penalty", "name")


@dataclass
class Report:
    """What was asked, what was answered, and what was wrong with it."""

    cases: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # operation, phase, mode
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    num_canaries: int = 0

    @property
    def num_cases(self) -> int:
        return self.cases.total()


def canary(server: Serving) -> list[object]:
    """What requests are given that must always be given the same: texts, and a vector."""
    greedy = {"prompt": "import os\n\n\ndef ", "max_tokens": 12, "temperature": 0}
    seeded = {"prompt": "class A:\n", "max_tokens": 12, "temperature": 0.9, "seed": 7, "n": 2}
    answers = [server.post("/v1/completions", **body) for body in (greedy, seeded)]
    texts = [[choice["text"] for choice in a.json()["choices"]] if a.status == 200 else a.body for a in answers]
    embedded = server.post("/v1/embeddings", input="import os\n\n\ndef ", encoding_format="base64")
    return [*texts, embedded.json()["data"] if embedded.status == 200 else embedded.body]


def faults(status: int, kind: str, content: bytes, path: str) -> Iterator[str]:
    """What is wrong with an answer, whatever was asked."""
    if status >= 500 or not (200 <= status < 300 or status >= 400):
        yield f"status {status}"
    if status >= 400:
        if kind != "application/json":
            yield f"an error of content type {kind!r}"
        elif content:  # what HEAD asks for has none
            yield from _faults_of_error(json.loads(content), path)
    elif kind.startswith("text/event-stream"):
        yield from _faults_of_stream(content, path)
    elif kind == "application/x-ndjson":
        if any("error" in json.loads(line) for line in content.splitlines()):
            yield "an error in a stream"
    elif kind == "application/json":
        if b"NaN" in content or b"Infinity" in content:
            json.loads(content, parse_constant=lambda name: 1 / 0)
    elif path not in ("/health", "/metrics", "/ready"):
        yield f"content type {kind!r}"


def _faults_of_error(body: Any, path: str) -> Iterator[str]:
    error = body.get("error")
    if path.startswith("/v1/messages"):
        if body.keys() != {"type", "error"} or error.keys() != {"type", "message"}:
            yield "an error that is not Anthropic's"
        error = error | {"param": None, "code": None}
    if path.startswith("/api/"):
        error = {"message": error, "type": None, "param": None, "code": None}
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        yield "an error that is not OpenAI's"
        return
    if not isinstance(error["message"], str) or not 0 < len(error["message"]) <= LONGEST_MESSAGE:
        yield f"a message of {len(str(error['message']))} characters"
    if error["param"] is not None and not (isinstance(error["param"], str) and len(error["param"]) <= LONGEST_PARAM):
        yield "a param that is no field's name"


# How the streams of other protocols than OpenAI's chats end.
NATIVE = dict.fromkeys(
    ("/completion", "/infill"), b'data: {"index":0,"content":"","tokens":[],"id_slot":0,"stop":true,'
)
ENDS = {"/v1/responses": b"event: response.", "/v1/messages": b"event: message_stop"} | NATIVE


def _faults_of_stream(content: bytes, path: str) -> Iterator[str]:
    *parts, last, rest = content.split(b"\n\n")
    if rest or not last.startswith(ENDS.get(path, b"data: [DONE]")):
        yield "a stream without an end"
    for part in parts:
        part = part.partition(b"\n")[2] if path in ENDS and path not in NATIVE else part
        if not part.startswith(b"data: "):
            yield "an event without data"
        elif "error" in (found := json.loads(part[6:])) or found.get("type") == "response.failed":
            yield "an error in a stream"


@contextmanager
def watching(report: Report, server: Serving) -> Iterator[None]:
    """Within it, every answer that schemathesis gets is looked at."""
    first, lock = canary(server), threading.Lock()

    def look(_: CheckContext, answer: schemathesis.Response, case: schemathesis.Case) -> None:
        label, meta = case.operation.label, case.meta
        kind = (answer.headers.get("content-type") or [""])[0]
        found = list(faults(answer.status_code, kind, answer.content, case.operation.path))
        with lock:
            report.cases[label, meta.phase.name.value, meta.generation.mode.value] += 1
            report.statuses[label, answer.status_code] += 1
            is_due = report.num_cases % CANARY_EVERY == 0
            report.num_canaries += is_due
        if is_due and canary(server) != first:
            found.append("the canary sings another song")
        if found:
            raise AssertionError("; ".join(found))

    CHECKS.register(look)
    try:
        yield
    finally:
        CHECKS.unregister("look")


def config(server: Serving, mode: str, seed: int, max_examples: int, phases: tuple[str, ...]) -> SchemathesisConfig:
    """All checks but those that are off, no filters, nothing kept on disk."""
    return SchemathesisConfig.from_dict(
        {
            "seed": seed,
            "base-url": server.url,
            "workers": 2,
            "cache": {"enabled": False},
            "suppress-health-check": ["all"],
            "continue-on-failure": True,
            "headers": server.headers,
            "request-timeout": BOUND,
            "max-stream-events": 1_000_000,
            "generation": {"mode": mode, "max-examples": max_examples, "no-shrink": True, "database": ":memory:"},
            "checks": {name: {"enabled": False} for name in CHECKS_OFF}
            | {"negative_data_rejection": {"expected-statuses": ["4xx"]}},  # 413, too, of lists that are too long
            "phases": {name: {"enabled": name in phases} for name in ALL_PHASES},
        }
    )


def attack(
    server: Serving, report: Report, document: Any, mode: str, seed: int, max_examples: int, phases: tuple[str, ...]
) -> None:
    """One run of schemathesis."""
    schema = schemathesis.openapi.from_dict(document, config=config(server, mode, seed, max_examples, phases))
    for event in engine.from_schema(schema).execute():
        if isinstance(event, events.NonFatalError) and CPYTHONS_OWN not in event.info.message:
            report.wrong[f"{event.label}: {event.info.title}: {event.info.message}"[:500]] += 1
        elif isinstance(event, events.FatalError):
            raise event.exception
        elif isinstance(event, events.ScenarioFinished):
            for case_id, nodes in event.recorder.checks.items():
                for node in nodes:
                    if node.failure_info is not None:
                        failure = node.failure_info.failure
                        body = str(event.recorder.cases[case_id].value.body)[:200]
                        message = f"{event.recorder.label}: {node.name}: {failure.title}: {failure.message}"
                        report.wrong[f"{message[:500]} [{body}]"] += 1


def narrowed(document: Any) -> Any:
    """A document that allows less, so that most of what is as it says can be served."""
    found = deepcopy(document)
    for name in (
        "CompletionRequest", "ChatRequest", "EmbeddingRequest", "TokenizeRequest", "Message", "ResponsesRequest",
        "MessagesRequest", "RerankRequest", "ScoreRequest", "OllamaChatRequest", "GenerateRequest", "EmbedRequest",
        "LlamaCompletionRequest",
    ):  # fmt: skip
        properties = found["components"]["schemas"][name]["properties"]
        properties |= {name: NARROW[name] for name in NARROW.keys() & properties.keys()}
        for unwanted in NARROWED_OUT:
            properties.pop(unwanted, None)
        if "messages" in properties:
            properties["messages"]["maxItems"] = 2
    embedded = found["components"]["schemas"]["EmbeddingRequest"]
    embedded["required"] = ["input"]
    del embedded["properties"]["messages"]  # either of both
    return found


def fuzz(server: Serving, count: int, max_examples: int = 100, phases: tuple[str, ...] = ALL_PHASES) -> Report:
    """At least so many cases: once all phases for both documents, then random cases with one seed after the other."""
    report = Report()
    document = server.get("/openapi.json").json()
    targets = ((document, "all"), (narrowed(document), "positive"))
    before = num_tasks(server)
    with watching(report, server):
        seed = 0
        while report.num_cases < count or seed < len(targets):
            now = phases if seed < len(targets) else ("fuzzing",)
            attack(server, report, *targets[seed % 2], seed, max_examples, now)
            seed += 1
    settle(server, are_gone=False)
    worker = server.service.engine_client
    llm = worker.llm
    if not server.is_idle():
        report.wrong["blocks or requests are left"] += 1
    if llm._generations or llm._searches or llm._open or not worker.clocks.is_empty:
        report.wrong["entries of the worker are left"] += 1
    if num_tasks(server) > before:
        report.wrong[f"{num_tasks(server) - before} tasks are left"] += 1
    return report


@contextmanager
def target() -> Iterator[Serving]:
    """A server to be attacked."""
    with serving(ENGINE, api_key=(KEY,), ollama=True) as server:
        server.headers = {"Authorization": f"Bearer {KEY}"}
        yield server


def told(report: Report) -> str:
    """A table of what was asked and answered."""
    lines = []
    for label in sorted({label for label, _, _ in report.cases}):
        kinds = {f"{phase} {mode}": n for (name, phase, mode), n in sorted(report.cases.items()) if name == label}
        statuses = {status: n for (name, status), n in sorted(report.statuses.items()) if name == label}
        lines.append(f"{label}: {sum(kinds.values())} cases")
        lines.append(f"    {', '.join(f'{n} {kind}' for kind, n in kinds.items())}")
        lines.append(f"    answered {', '.join(f'{status} ({n})' for status, n in statuses.items())}")
    lines += [f"WRONG {n} x {what}" for what, n in report.wrong.most_common()]
    return "\n".join(lines)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    start = time.monotonic()
    with target() as server:
        report = fuzz(server, count)
    print(told(report))
    seconds, wrong = time.monotonic() - start, report.wrong.total() or "nothing"
    print(
        f"{report.num_cases} cases in {seconds:.0f} s; the canary was heard {report.num_canaries} times; {wrong} wrong"
    )
    raise SystemExit(bool(report.wrong))


if __name__ == "__main__":
    main()
