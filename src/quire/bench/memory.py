"""What the KV cache holds over a run: slots reserved, owned, filled, wasted."""

from __future__ import annotations

import random
from dataclasses import dataclass

from quire.bench.watch import watch_steps
from quire.bench.workloads import FIRST_TOKEN, VOCABULARY, Workload
from quire.cache.usage import CacheUsage
from quire.errors import ConfigError
from quire.llm import LLM
from quire.request import SamplingParams


@dataclass(frozen=True)
class MemoryUse:
    """The cache's use in each step of a run."""

    block_size: int
    usages: tuple[CacheUsage, ...]

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON. Waste is the share of owned slots that hold nothing, over all steps."""
        owned = sum(usage.used_slots for usage in self.usages)
        wasted = sum(usage.wasted_slots for usage in self.usages)
        fullest = max(self.usages, key=lambda usage: usage.used_slots)
        return {
            "block_size": self.block_size,
            "steps": len(self.usages),
            "reserved_slots": fullest.num_blocks * self.block_size,
            "most_used_slots": fullest.used_slots,
            "filled_slots_then": fullest.filled_slots,
            "wasted_slots_then": fullest.wasted_slots,
            "mean_used_slots": owned / len(self.usages),
            "waste": wasted / owned,
        }


def sequences(count: int, mean_length: int, new_tokens: int) -> Workload:
    """That many requests whose final lengths spread evenly from half to one and a half times the mean.

    Raises ConfigError where the new tokens alone would make some of them longer.
    """
    if new_tokens >= mean_length // 2:
        raise ConfigError(
            f"new_tokens is {new_tokens}; with a mean length of {mean_length} at most {mean_length // 2 - 1}"
        )
    rng = random.Random(0)
    lengths = [rng.randint(mean_length // 2, mean_length * 3 // 2) for _ in range(count)]
    prompts = [[rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length - new_tokens)] for length in lengths]
    return Workload("memory", prompts, [new_tokens] * count)


def measure(llm: LLM, workload: Workload) -> MemoryUse:
    """Run the workload and look at the cache in every step."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in workload.new_tokens]
    usages: list[CacheUsage] = []
    with watch_steps(llm.engine, usages.append):
        llm.generate([{"prompt_token_ids": prompt} for prompt in workload.prompts], params)
    return MemoryUse(llm.engine.scheduler.manager.block_size, tuple(usages))
