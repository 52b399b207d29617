"""What grammars cost: decode steps of a batch, some of whose rows keep to a JSON schema, against steps without any.

Both are timed in turn, so that a drift of the machine's speed is in both.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from dataclasses import asdict, dataclass

from quire.errors import QuireError, RequestError
from quire.frontend.llm import LLM
from quire.request import Request, SamplingParams, StructuredOutputsParams
from quire.sandbox.grammar import Grammars, Spec
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY

CONTEXT = 32  # tokens of a prompt
WARM_UP = 4  # steps after the prompts that do not count
# Records as programs ask for them: texts, numbers, a choice, a list, one in another; more than any answer can hold.
ENTRY = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "kind": {"enum": ["plain", "shared", "none"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "place": {
            "type": "object",
            "properties": {"line": {"type": "integer"}, "text": {"type": "string"}},
            "required": ["line", "text"],
        },
    },
    "required": ["name", "count", "share", "kind", "tags", "place"],
}
SCHEMA = {"type": "array", "items": ENTRY, "minItems": 10_000}


@dataclass(frozen=True)
class Cost:
    """Medians of decode steps."""

    streams: int
    constrained: int  # of these, with the schema
    plain_rate: float  # tokens a second, without any
    rate: float  # tokens a second, with them
    ratio: float  # median of the rounds' ratios of rates: 1 if they cost nothing

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self)


def measure(llm: LLM, streams: int, constrained: int, steps: int, rounds: int) -> Cost:
    """Time that many decode steps without the schema and with it, in that many rounds.

    Raises RequestError where the model has no tokenizer, QuireError where a request fails.
    """
    if llm.tokenizer is None:
        raise RequestError("this model has no tokenizer, so no schema can be kept to")
    grammars = Grammars(llm.tokenizer.json(), llm.engine.vocab_size, llm.engine.eos_token_ids)
    try:
        found = []
        for _ in range(rounds):
            plain = _decoded(llm, grammars, streams, 0, steps)
            found.append((plain, _decoded(llm, grammars, streams, constrained, steps)))
    finally:
        grammars.close()
    ratio = statistics.median(plain / own for plain, own in found)
    plain, own = (statistics.median(column) for column in zip(*found, strict=True))
    return Cost(streams, constrained, streams / plain, streams / own, ratio)


def _decoded(llm: LLM, grammars: Grammars, streams: int, constrained: int, steps: int) -> float:
    """Mean seconds of a decode step; that many of its rows keep to the schema."""
    rng = random.Random(1)
    spec = Spec.of(StructuredOutputsParams(json=SCHEMA))
    requests = []
    for i in range(streams):
        prompt = array("i", [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(CONTEXT)])
        sampling = SamplingParams(max_tokens=steps + WARM_UP + 8, seed=i, ignore_eos=True)
        requests.append(Request(f"constraints-{i}", prompt, CONTEXT, sampling))
        if i < constrained:
            requests[-1].guide = grammars.compile(spec)
    engine = llm.engine
    llm.reset_prefix_cache()
    try:
        for request in requests:
            engine.add(request)
        while any(request.num_generated < WARM_UP for request in requests):
            _step(llm)
        begin = time.perf_counter()
        for _ in range(steps):
            _step(llm)
        return (time.perf_counter() - begin) / steps
    finally:
        for request in requests:
            engine.abort(request.id)
        engine.step()


def _step(llm: LLM) -> None:
    for event in llm.engine.step():
        if event.finish_reason is not None:
            raise QuireError(f"request {event.request_id} ended early: {event.error or event.finish_reason.value}")
