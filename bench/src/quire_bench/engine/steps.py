"""Steps of a model against what the machine can do: decode of few and many sequences, and a long prompt.

A step's limit is the longer of two times: its bytes at the rate at which the machine reads, and its operations at the
rate of its bf16 product (`quire.engine.cost`). Both rates are measured between the steps, because a shared machine's
speed drifts.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf

import torch

from quire.engine.cost import CostModel, Device, cost_of
from quire.engine.engine import Engine
from quire.engine.plan import Plan
from quire.errors import QuireError
from quire.frontend.llm import LLM
from quire.request import Request
from quire_bench.engine.split import PARTS, Timeline, recorded
from quire_bench.kernels.attention import product_rate, read_rate
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY, greedy

CONTEXT = 64  # tokens of a sequence that decodes, before its first step that counts
MOST_STEPS = 512


@dataclass(frozen=True)
class Case:
    """Sequences that all do the same in a step."""

    streams: int
    query_len: int  # 1: decode

    @property
    def name(self) -> str:
        """As a table says it."""
        return f"decode, {self.streams}" if self.query_len == 1 else f"prompt of {self.query_len}"


CASES = (Case(1, 1), Case(32, 1), Case(1, 2048))


@dataclass(frozen=True)
class Step:
    """Medians of steps."""

    case: Case
    seconds: float
    bytes_seconds: float  # what the step reads and writes, at the rate at which the machine reads
    operations_seconds: float  # at the rate of its product
    shares: dict[str, float]  # of the time, by part

    @property
    def ratio(self) -> float:
        """The time over the limit."""
        return self.seconds / max(self.bytes_seconds, self.operations_seconds)

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self) | {"name": self.case.name, "ratio": self.ratio}


def measure(llm: LLM, case: Case, steps: int) -> Step:
    """Time that many steps of the case, and the machine's rates after each. The first time is not counted.

    Raises QuireError where a request fails, as when the model takes no such prompt.
    """
    reads, multiplies = read_rate(torch.get_num_threads()), product_rate("bfloat16", torch.get_num_threads())
    model, block_size = cost_of(llm.decoder), llm.config.cache.block_size
    count_bytes = CostModel(model, Device("bytes", 1.0, inf, inf), block_size).seconds
    count_operations = CostModel(model, Device("operations", inf, 1.0, inf), block_size).seconds
    a_time, times = (steps, 1) if case.query_len == 1 else (1, steps)
    with _stepping(llm, case) as (engine, _, _):
        _timed_step(engine, case)
        reads(), multiplies()
    rounds: list[tuple[float, float, float]] = []
    parts: Counter[str] = Counter()
    for _ in range(times):
        with _stepping(llm, case) as (engine, timeline, plans):
            for _ in range(a_time):
                seconds, plan = _timed_step(engine, case), plans.pop()
                if [item.num_new for item in plan.items] != [case.query_len] * case.streams:
                    rows, count = plan.num_tokens, len(plan.items)
                    raise QuireError(f"{case.name}: a step computed {rows} tokens of {count} requests")
                to_read = count_bytes(plan, case.streams) / reads() / 1e9
                rounds.append((seconds, to_read, count_operations(plan, case.streams) / multiplies() / 1e9))
            parts.update(timeline.split(0.0))
    total = sum(seconds for seconds, _, _ in rounds)
    shares = {part: parts[part] / total for part in PARTS if parts[part] > 0}
    return Step(case, *_medians(rounds), shares)


def _medians(rounds: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    first, second, third = (statistics.median(column) for column in zip(*rounds, strict=True))
    return first, second, third


def _timed_step(engine: Engine, case: Case) -> float:
    start = time.perf_counter()
    events = engine.step()
    seconds = time.perf_counter() - start
    failed = [event.error for event in events if event.error is not None]
    if failed:
        raise QuireError(f"{case.name}: {failed[0]}")
    return seconds


@contextmanager
def _stepping(llm: LLM, case: Case) -> Iterator[tuple[Engine, Timeline, list[Plan]]]:
    """An engine whose next steps are the case's, what they take, and a list of their plans."""
    plans: list[Plan] = []
    length = CONTEXT if case.query_len == 1 else case.query_len
    rng = random.Random(1)
    requests = []
    for i in range(case.streams):
        prompt = array("i", [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)])
        requests.append(Request(f"step-{i}", prompt, length, greedy(MOST_STEPS)))
    llm.reset_prefix_cache()
    try:
        for request in requests:
            llm.engine.add(request)
        while case.query_len == 1 and any(request.cache.num_computed < length for request in requests):
            llm.engine.step()
        with recorded(llm) as (engine, timeline):
            plan = engine.scheduler.plan

            def noted() -> Plan:
                plans.append(plan())
                return plans[-1]

            engine.scheduler.plan = noted  # type: ignore[method-assign]
            yield engine, timeline, plans
    finally:
        for request in requests:
            llm.engine.abort(request.id)
        while llm.engine.has_work:
            llm.engine.step()
