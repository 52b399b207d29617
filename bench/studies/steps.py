"""Measure steps of a model against the machine's rates: decode of one and of 32 sequences, and a prompt of 2,048.

    python bench/studies/steps.py --model DIR --quantization int4 --trace steps.json

A step's limit is the longer of two times: its bytes at the rate at which the machine reads, and its operations at the
rate of its bf16 product (`quire.engine.cost`). Both rates are measured between the steps, because a shared machine's
speed drifts. Below each step are the parts that take a hundredth of it or more, and --trace writes all calls for
chrome://tracing or Perfetto.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

import torch
import typer

from quire import LLM
from quire.cli.options import fail
from quire.engine.cost import CostModel, Device, cost_of
from quire.engine.engine import Engine
from quire.engine.plan import Plan
from quire.errors import QuireError
from quire.request import Request
from quire_bench.cli.options import Backend, CacheMemory, Dtype, Model
from quire_bench.engine.split import PARTS, Span, Timeline, chrome_trace, recorded
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
        """Return the name that the table shows."""
        return f"decode, {self.streams}" if self.query_len == 1 else f"prompt of {self.query_len}"


CASES = (Case(1, 1), Case(32, 1), Case(1, 2048))


def main(
    model: Model = None,
    dtype: Dtype = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8 or int4, as the weights are loaded.")] = None,
    attention_backend: Backend = "auto",
    kv_cache_memory: CacheMemory = "4GiB",
    count: Annotated[int, typer.Option(min=1, max=256, help="Steps of each kind; their median is reported.")] = 15,
    trace: Annotated[Path | None, typer.Option(help="Write the calls of the last steps of each kind.")] = None,
) -> None:
    """Print each step, its limit and its parts."""
    try:
        llm = LLM(
            model,
            dtype=dtype,
            quantization=quantization,
            attention_backend=attention_backend,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=32,
            num_speculative_tokens=0,
        )
        runs = {case.name: show(llm, case, count if case.query_len == 1 else min(count, 3)) for case in CASES}
    except QuireError as error:
        fail(error)
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace(runs)))


def show(llm: LLM, case: Case, steps: int) -> list[Span]:
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
                    rows, found = plan.num_tokens, len(plan.items)
                    raise QuireError(f"{case.name}: a step computed {rows} tokens of {found} requests")
                to_read = count_bytes(plan, case.streams) / reads() / 1e9
                rounds.append((seconds, to_read, count_operations(plan, case.streams) / multiplies() / 1e9))
            parts.update(timeline.split(0.0))
    total = sum(seconds for seconds, _, _ in rounds)
    took, read, multiplied = (statistics.median(column) for column in zip(*rounds, strict=True))
    milliseconds = [f"{1e3 * value:,.1f} ms" for value in (took, read, multiplied)]
    limits = f"bytes {milliseconds[1]}, operations {milliseconds[2]}: {took / max(read, multiplied):.2f} x"
    print(f"{case.name:16s}{milliseconds[0]:>12s}   {limits}", flush=True)
    shares = {part: parts[part] / total for part in PARTS if parts[part] >= 0.01 * total}
    print("    " + ", ".join(f"{part} {share:.0%}" for part, share in shares.items()), flush=True)
    return timeline.spans


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


if __name__ == "__main__":
    typer.run(main)
