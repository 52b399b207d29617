"""The latency of one batch whose requests arrive at once: of the whole, of first tokens, and of those that follow."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.errors import ConfigError, QuireError, check_integer
from quire.frontend.llm import LLM
from quire_bench.plot import drawn
from quire_bench.server.report import summary, token_gaps
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY, greedy

PERCENTS = (10, 25, 50, 75, 90, 99)
Seconds = dict[str, list[float]]  # "latency": of a batch; "ttft": of each request; "itl": before each further token


@dataclass(frozen=True)
class Batch:
    """Requests of one length. Raises ConfigError for less than one."""

    input_len: int
    output_len: int
    batch_size: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            check_integer(ConfigError, name, value, 1)

    def prompts(self) -> list[list[int]]:
        """Return token ids, the same every time, with nothing in common."""
        rng = random.Random(0)
        return [[rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(self.input_len)] for _ in range(self.batch_size)]


def measure(
    llm: LLM, batch: Batch, warmup: int, iterations: int, advance: Callable[[], None] = lambda: None
) -> Seconds:
    """Run the batch `warmup` times, then `iterations` times against the clock. `advance` is called after each of them.

    Greedy, without stopping at the model's end tokens, and with an empty prefix cache, so that every iteration does the
    same work. Raises RequestError for requests that can never fit, QuireError where one fails or ends early.
    """
    found: Seconds = {"latency": [], "ttft": [], "itl": []}
    for turn in range(warmup + iterations):
        once = iterate(llm, batch)
        advance()
        for name, seconds in once.items() if turn >= warmup else ():
            found[name] += seconds
    return found


def iterate(llm: LLM, batch: Batch) -> Seconds:
    """Run the batch once."""
    llm.reset_prefix_cache()
    prompts = [{"prompt_token_ids": prompt} for prompt in batch.prompts()]
    arrivals: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)  # when a request has how many tokens
    start = time.perf_counter()
    for output in llm.stream(prompts, greedy(batch.output_len)):
        sample = output.outputs[0]
        arrivals[output.request_id].append((time.perf_counter() - start, len(sample.token_ids)))
        if sample.error is not None:
            raise QuireError(f"request {output.request_id} failed: {sample.error}")
        if sample.finished and len(sample.token_ids) != batch.output_len:
            message = f"request {output.request_id} ended with {len(sample.token_ids)} new tokens"
            raise QuireError(f"{message}; expected {batch.output_len}")
    seconds = time.perf_counter() - start
    gaps: list[float] = []
    for seen in arrivals.values():
        times, counts = zip(*seen, strict=True)
        gaps += token_gaps(times, [count - before for before, count in zip((0, *counts), counts, strict=False)])
    return {"latency": [seconds], "ttft": [seen[0][0] for seen in arrivals.values()], "itl": gaps}


def summaries(found: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float | None]]:
    """Return the mean and percentiles of each; None where there are no values."""
    return {name: summary(values, PERCENTS) for name, values in found.items()}


def plot(found: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the share that took at most a time. Raises ConfigError where that cannot be drawn."""
    with drawn(path, 1, 3, (12, 4)) as (_, axes):
        for panel, (name, values) in zip(axes[0], found.items(), strict=True):
            panel.ecdf([1e3 * seconds for seconds in values] or [0.0])
            panel.set_title(name)
            panel.set_xlabel("ms")
