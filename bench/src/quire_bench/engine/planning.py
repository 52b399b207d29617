"""What a step of decoding costs the scheduler and the block manager, without a model."""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from dataclasses import asdict, dataclass

from quire.cache.groups import CacheGroup
from quire.cache.manager import BlockManager
from quire.engine.scheduler import Scheduler
from quire.request import Request, SamplingParams
from quire_bench.engine.no_model import sampled


@dataclass(frozen=True)
class Planning:
    """One measured point. Seconds are of `plan` and `commit` together."""

    sequences: int  # that decode
    context: int  # tokens of each at the start
    pool: int  # blocks
    block_size: int
    step_seconds: float  # mean step
    worst_seconds: float  # slowest step

    @property
    def worst_each(self) -> float:
        """Of the slowest step, for each sequence, in microseconds."""
        return 1e6 * self.worst_seconds / self.sequences

    @property
    def microseconds_each(self) -> float:
        """Of the mean step, for each sequence."""
        return 1e6 * self.step_seconds / self.sequences

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return {**asdict(self), "microseconds_each": self.microseconds_each, "worst_each": self.worst_each}


def measure(sequences: int, context: int, spare: int, block_size: int = 16, steps: int = 64) -> Planning:
    """Decode `steps` tokens of that many sequences, which differ from their first token on.

    spare: blocks in the pool besides those that the sequences fill.
    """
    pool = sequences * -(-(context + steps) // block_size) + spare
    budget = sequences * context  # so that all prompts are taken in by the first step
    scheduler = Scheduler(
        BlockManager((CacheGroup((0,)),), pool, block_size, budget),
        max_model_len=context + steps + 1,
        max_num_seqs=sequences,
        max_num_batched_tokens=budget,
    )
    params = SamplingParams(max_tokens=steps + 1)
    for i in range(sequences):
        prompt = array("i", [i]) + array("i", [0]) * (context - 1)
        scheduler.add(Request(str(i), prompt, context, params))
    _step(scheduler)
    gc.collect()
    gc.disable()  # as servers do; what it takes depends on what else lives
    try:
        seconds = [_step(scheduler) for _ in range(steps - 1)]
    finally:
        gc.enable()
    return Planning(sequences, context, pool, block_size, statistics.fmean(seconds), max(seconds))


def _step(scheduler: Scheduler) -> float:
    """Seconds of a step's plan and commit; what lies between is the model's."""
    start = time.perf_counter()
    plan = scheduler.plan()
    planned = time.perf_counter()
    output = sampled(plan)
    between = time.perf_counter()
    scheduler.commit(plan, output)
    return time.perf_counter() - between + planned - start
