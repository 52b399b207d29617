"""Measure the simulator's leaps against single steps: the same results, and the ratio of their CPU time.

python bench/studies/leaps.py
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

from quire.config import engine_config
from quire.engine.cost import DEVICES, model_cost
from quire.engine.trace import TraceRow
from quire.models import expected_weight_bytes, read_config
from quire.simulate.figures import SimulationResult
from quire.simulate.simulation import Simulation, no_collector

MODEL = Path("examples/fleets/8b")
LOADS = ((1, 300), (4, 600), (16, 1200))  # requests a second, and how many


def chats(rate: float, count: int) -> list[TraceRow]:
    """Requests with log-normal lengths, of 245 tokens and 245 new ones in the middle."""
    rng, now, rows = random.Random(0), 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        prompt, new = (int(rng.lognormvariate(5.5, spread)) + 8 for spread in (0.8, 0.6))
        rows.append(TraceRow(now, min(4000, prompt), min(1000, new)))
    return rows


def measure(rows: list[TraceRow], *, leaps: bool) -> tuple[SimulationResult, float]:
    """What a run comes to, and seconds of CPU time that it takes."""
    model = model_cost(*read_config(MODEL), expected_weight_bytes(MODEL))
    config = engine_config(num_blocks=30_000, max_num_batched_tokens=2048)
    one = Simulation(model, DEVICES["h200"], config, leaps=leaps, sample_every=0)
    with no_collector():
        start = time.process_time()
        return one.run(rows), time.process_time() - start


def main() -> None:
    """Print a line for each load."""
    for rate, count in LOADS:
        rows = chats(rate, count)
        (stepped, slow), (leapt, fast) = measure(rows, leaps=False), measure(rows, leaps=True)
        same = "equal" if stepped == leapt else "NOT EQUAL"
        shown = f"{slow / fast:.1f} times as fast, {slow:.2f} and {fast:.2f} s, {same}"
        sys.stdout.write(f"{rate:3d} requests a second: {shown}\n")


if __name__ == "__main__":
    main()
