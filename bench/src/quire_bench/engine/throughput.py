"""Tokens a second on a workload: whole runs through the engine, after warm-up runs."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from quire.cache.events import CacheEvent
from quire.errors import QuireError
from quire.frontend.llm import LLM
from quire_bench.workloads import Workload, greedy


@dataclass(frozen=True)
class Throughput:
    """The measured runs of one workload, in order."""

    workload: Workload
    seconds: tuple[float, ...]
    most_blocks: int | None  # KV blocks used at the fullest moment of the warm-up, if there was one

    @property
    def median(self) -> float:
        """The median run, in seconds."""
        return statistics.median(self.seconds)

    @property
    def num_tokens(self) -> int:
        """The tokens of a run: read and written."""
        return self.workload.num_prompt_tokens + self.workload.num_new_tokens

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        new, prompt = self.workload.num_new_tokens, self.workload.num_prompt_tokens
        return {
            "workload": self.workload.name,
            "requests": len(self.workload.prompts),
            "prompt_tokens": prompt,
            "new_tokens": new,
            "seconds": list(self.seconds),
            "median_seconds": self.median,
            "new_tokens_per_second": new / self.median,
            "total_tokens_per_second": self.num_tokens / self.median,
            "most_blocks": self.most_blocks,
        }


def measure(
    llm: LLM, workload: Workload, warmup: int, runs: int, advance: Callable[[], None] = lambda: None
) -> Throughput:
    """Run the workload `warmup` times, then `runs` times against the clock. `advance` is called at each new token.

    Greedy, without stopping at the model's end tokens, and with an empty prefix cache, so that every run does the same
    work.
    Raises QuireError where a request fails or ends early.
    """
    params = [greedy(n) for n in workload.new_tokens]
    prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    manager = llm.engine.scheduler.manager
    used: list[int] = []

    def count_blocks(_: CacheEvent) -> None:
        used.append(sum(pool.num_used for pool in manager.pools))

    def run() -> float:
        llm.reset_prefix_cache()
        start, num_new, known = time.perf_counter(), 0, Counter[str]()
        for output in llm.stream(prompts, params):
            shown = len(output.outputs[0].token_ids)
            for _ in range(known[output.request_id], shown):
                advance()
            known[output.request_id] = shown
            if output.finished:
                if output.outputs[0].error is not None:
                    raise QuireError(f"workload {workload.name}: {output.outputs[0].error}")
                num_new += shown
        if num_new != workload.num_new_tokens:
            raise QuireError(f"workload {workload.name}: {num_new} new tokens; expected {workload.num_new_tokens}")
        return time.perf_counter() - start

    llm.engine.listen(count_blocks)
    for _ in range(warmup):
        run()
    manager.listeners.remove(count_blocks)
    seconds = tuple(run() for _ in range(runs))
    return Throughput(workload, seconds, max(used, default=None))
