"""Measure the time that the scheduler and the block manager take for a step of decoding, without a model.

    python bench/studies/planning.py --sequences 64 --context 1000

Prints microseconds for each sequence: the mean step and the slowest one.
"""

from __future__ import annotations

import gc
import statistics
import time
from array import array
from itertools import product
from typing import Annotated

import typer

from quire.cache.groups import CacheGroup
from quire.cache.manager import BlockManager
from quire.engine.scheduler import Scheduler
from quire.request import Request, SamplingParams
from quire_bench.engine.no_model import sampled

BLOCK_SIZE = 16


def main(
    sequences: Annotated[
        list[int] | None, typer.Option(min=1, help="That decode; may be repeated. Default: 1, 64, 1024.")
    ] = None,
    contexts: Annotated[
        list[int] | None, typer.Option("--context", min=1, help="Tokens of each. Default: 100, 1000, 10000, 100000.")
    ] = None,
    spare: Annotated[
        list[int] | None, typer.Option(min=0, help="Further blocks in the pool. Default: 0, 1000000.")
    ] = None,
) -> None:
    """Print a line for each combination."""
    chosen = (sequences or (1, 64, 1024), contexts or (100, 1_000, 10_000, 100_000), spare or (0, 1_000_000))
    for count, context, more in product(*chosen):
        seconds = measure(count, context, more, steps=max(64, 4096 // count))
        mean, worst = (1e6 * value / count for value in (statistics.fmean(seconds), max(seconds)))
        message = f"{count:6,d} sequences of {context:7,d} tokens, {more:11,d} spare blocks"
        print(f"{message} {mean:8.2f} us each, worst step {worst:8.2f}", flush=True)


def measure(sequences: int, context: int, spare: int, steps: int) -> list[float]:
    """Return the seconds of each step of that number of sequences, which differ from their first token on."""
    pool = sequences * -(-(context + steps) // BLOCK_SIZE) + spare
    budget = sequences * context  # so that all prompts are taken in by the first step
    scheduler = Scheduler(
        BlockManager((CacheGroup((0,)),), pool, BLOCK_SIZE, budget),
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
        return [_step(scheduler) for _ in range(steps - 1)]
    finally:
        gc.enable()


def _step(scheduler: Scheduler) -> float:
    """Return the seconds of a step's plan and commit; the model's time between them does not count."""
    start = time.perf_counter()
    plan = scheduler.plan()
    planned = time.perf_counter()
    output = sampled(plan)
    between = time.perf_counter()
    scheduler.commit(plan, output)
    return time.perf_counter() - between + planned - start


if __name__ == "__main__":
    typer.run(main)
