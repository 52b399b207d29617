"""What adapters cost: decode steps of a batch whose rows have as many adapters, against steps of the model alone.

Both are timed in turn, so that a drift of the machine's speed is in both. The adapters are random and of all linears of
the layers; what a step takes does not depend on their numbers.
"""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from quire.errors import QuireError, Unsupported
from quire.frontend.llm import LLM
from quire.models.lora.slots import Loras, Prepared
from quire.ops.lora import LoraPart, LoraTable
from quire.request import Request
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY, greedy

CONTEXT = 64  # tokens of a sequence before its first step that counts
WARM_UP = 2  # steps after the prompts that do not count
SCALE = 0.02  # of random matrices


@dataclass(frozen=True)
class Cost:
    """Medians of decode steps."""

    adapters: int
    rank: int
    streams: int
    adapter_bytes: int  # of one adapter's matrices
    alone_seconds: float  # a step of the model
    seconds: float  # a step with the adapters
    ratio: float  # median of the rounds' ratios

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return asdict(self)


def random_adapter(loras: Loras, rank: int, seed: int) -> Prepared:
    """An adapter of every linear that may have one."""
    generator = torch.Generator().manual_seed(seed)
    by_table: dict[int, tuple[LoraTable, list[LoraPart]]] = {}
    for target in loras.targets.values():
        if target.table is None:
            continue
        shapes = (rank, target.table.in_size), (target.size, rank)
        a, b = (torch.randn(shape, generator=generator).mul_(SCALE).to(loras.device, loras.dtype) for shape in shapes)
        by_table.setdefault(id(target.table), (target.table, []))[1].append(LoraPart(a, b, 1.0, target.first))
    return Prepared(Path("random"), f"random {seed}", rank, list(by_table.values()))


def measure(llm: LLM, adapters: int, rank: int, streams: int, steps: int, rounds: int) -> Cost:
    """Time that many decode steps without adapters and with them, in that many rounds.

    llm: with room for the adapters. Raises QuireError where a request fails, Unsupported where the model can have none.
    """
    loras = llm.decoder.loras
    if loras is None:
        raise Unsupported("the model was loaded without adapters; give enable_lora=True")
    names = [f"random-{i}" for i in range(adapters)]
    for seed, name in enumerate(names):
        prepared = random_adapter(loras, rank, seed)
        llm.engine.load_lora(name, prepared)
    size = sum(part.a.nbytes + part.b.nbytes for _, parts in prepared.parts for part in parts)
    found = []
    for _ in range(rounds):
        alone = _decoded(llm, [None], streams, steps)
        found.append((alone, _decoded(llm, names, streams, steps)))
    ratios = [own / alone for alone, own in found]
    alone, own = (statistics.median(column) for column in zip(*found, strict=True))
    return Cost(adapters, rank, streams, size, alone, own, statistics.median(ratios))


def _decoded(llm: LLM, names: Sequence[str | None], streams: int, steps: int) -> float:
    """Median seconds of a decode step whose rows have these adapters in turn."""
    rng = random.Random(1)
    requests = []
    for i in range(streams):
        prompt = array("i", [rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(CONTEXT)])
        request = Request(f"lora-{i}", prompt, CONTEXT, greedy(steps + WARM_UP + 8), lora=names[i % len(names)])
        requests.append(request)
    engine = llm.engine
    llm.reset_prefix_cache()
    try:
        for request in requests:
            engine.add(request)
        while any(request.num_generated == 0 for request in requests):
            engine.step()
        times = []
        for _ in range(WARM_UP + steps):
            start = time.perf_counter()
            events = engine.step()
            times.append(time.perf_counter() - start)
            if failed := [event.error for event in events if event.error is not None]:
                raise QuireError(f"a step failed: {failed[0]}")
        return statistics.median(times[WARM_UP:])
    finally:
        for request in requests:
            engine.abort(request.id)
        while engine.has_work:
            engine.step()
