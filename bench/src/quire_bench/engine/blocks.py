"""What the size of a block does to a workload: its speed, and the memory that its requests own.

What is said of it, and where it shows:

| claim | look at |
|---|---|
| blocks of one token waste nothing; others about half a block a request: 8 slots with 16, 64 with 128 | wasted_each |
| a block table of 4,096 tokens has 4,096, 256 or 32 entries with blocks of 1, 16 or 128 | table_entries |
| less than 4 % is wasted, where contiguous memory wastes 60 to 80 % | waste |
| faster by 2 to 3 times from 1 to 16, by 10 to 20 % from 16 to 32, and hardly beyond | new_tokens_per_second |

The last one was said of a GPU's kernel. The kernel alone is measured by `quire bench attention blocks`.

The memory is that of `quire_bench.engine.memory`: the real scheduler and block manager, driven without the model,
beside contiguous memory under the same schedule. There is room for all requests at once, in every system, and a prefix
that all prompts share stands in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from quire.frontend.llm import LLM
from quire_bench.engine.memory import Lengths, Moment, Run, Setup, Use, run_paged, runs_contiguous
from quire_bench.engine.throughput import Throughput, measure
from quire_bench.plot import drawn
from quire_bench.workloads import Workload

SIZES = tuple(2**power for power in range(9))


@dataclass(frozen=True, kw_only=True)
class Load(Setup):
    """Memory as in `Setup`, for a workload."""

    workload: Workload

    @cached_property
    def lengths(self) -> Lengths:
        """Of each request."""
        prompts, new = self.workload.prompts, self.workload.new_tokens
        return [(len(prompt), count) for prompt, count in zip(prompts, new, strict=True)]


@dataclass(frozen=True)
class Memory:
    """How one system used it, in slots."""

    run: Run

    @property
    def fullest(self) -> Moment:
        """The step in which most slots are owned, and of several the one in which most hold a token."""
        return max(self.run.moments, key=lambda moment: (moment.used, moment.live))

    @property
    def waste(self) -> float:
        """Share of the owned slots that held nothing then."""
        return 1 - self.fullest.live / self.fullest.used

    @property
    def mean(self) -> Use:
        """Over all steps."""
        return self.run.use(self.run.moments)

    @property
    def wasted_each(self) -> float:
        """Slots that hold nothing of each request that runs, over all steps."""
        return self.mean.wasted / self.mean.mean_batch

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        return {
            "system": self.run.system,
            "peak_slots": self.fullest.used,
            "waste": self.waste,
            "mean_waste": self.mean.waste,
            "wasted_each": self.wasted_each,
        }


@dataclass(frozen=True)
class Figure:
    """One size of block."""

    block_size: int  # B
    throughput: Throughput
    memory: Memory

    @property
    def peak_blocks(self) -> int:
        """That requests own at the fullest moment."""
        return self.memory.fullest.used // self.block_size

    @property
    def table_entries(self) -> int:
        """Of the longest request."""
        longest = max(prompt + new - 1 for prompt, new in self.memory.run.setup.lengths)
        return -(-longest // self.block_size)

    @property
    def speed(self) -> float:
        """New tokens a second, the median."""
        return self.throughput.workload.num_new_tokens / self.throughput.median

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        blocks = {"block_size": self.block_size, "peak_blocks": self.peak_blocks, "table_entries": self.table_entries}
        return blocks | self.memory.as_dict() | self.throughput.as_dict()


def paged(work: Workload, block_size: int, max_model_len: int) -> Memory:
    """The memory that the workload owns in blocks of that size. Raises ConfigError for a size that cannot be."""
    alike = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*work.prompts, strict=False))
    shared = sum(1 for _ in alike) if len(work.prompts) > 1 else 0
    lengths = zip(work.prompts, work.new_tokens, strict=True)
    enough = sum(-(-(len(prompt) + new) // block_size) for prompt, new in lengths)
    load = Load(
        workload=work,
        requests=len(work.prompts),
        shared_prefix=shared,
        prefix_caching=True,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=max(enough, -(-max_model_len // block_size)),
    )
    return Memory(run_paged(load))


def contiguous(work: Workload, max_model_len: int) -> list[Memory]:
    """The same where each request reserves max_model_len slots, or as many as it will fill."""
    count = len(work.prompts)
    load = Load(
        workload=work, requests=count, max_model_len=max_model_len, block_size=1, num_blocks=count * max_model_len
    )
    return [Memory(run) for run in runs_contiguous(load)]


def sweep(
    work: Workload,
    sizes: Sequence[int],
    warmup: int,
    runs: int,
    advance: Callable[[], None] = lambda: None,
    **options: Any,
) -> Iterator[Figure]:
    """The workload with blocks of each size, as `quire_bench.engine.throughput` measures it. options: others of LLM's.

    Raises ConfigError for a size that no cache has, RequestError for a workload that does not fit the model.
    """
    for block_size in sizes:
        yield _measured(work, block_size, LLM(block_size=block_size, **options), warmup, runs, advance)


def _measured(work: Workload, block_size: int, llm: LLM, warmup: int, runs: int, advance: Callable[[], None]) -> Figure:
    throughput = measure(llm, work, warmup, runs, advance)
    return Figure(block_size, throughput, paged(work, block_size, llm.decoder.max_model_len))


def table(figures: Sequence[Figure], others: Sequence[Memory]) -> list[str]:
    """All of it, for a reader."""
    used = ("waste", "mean waste", "wasted each", "peak slots")
    lines = [
        f"{'block size':34s}"
        + "".join(f"{name:>12s}" for name in (*used, "peak blocks", "table", "new tok/s", "of the best"))
    ]
    best = max(figure.speed for figure in figures)
    for figure in figures:
        sizes = f"{figure.peak_blocks:12,d}{figure.table_entries:12,d}"
        speed = f"{figure.speed:12,.1f}{figure.speed / best:12.1%}"
        lines.append(f"{figure.block_size:<34d}{_used(figure.memory)}{sizes}{speed}")
    return lines + [f"{other.run.system:34s}{_used(other)}" for other in others]


def _used(memory: Memory) -> str:
    return f"{memory.waste:12.1%}{memory.mean.waste:12.1%}{memory.wasted_each:12.1f}{memory.fullest.used:12,d}"


def plot(figures: Sequence[Figure], others: Sequence[Memory], path: Path) -> None:
    """Speed and waste by the size of a block. Raises ConfigError where that cannot be drawn."""
    sizes = [figure.block_size for figure in figures]
    with drawn(path, 1, 2, (12, 4)) as (_, axes):
        speed, waste = axes[0]
        speed.plot(sizes, [figure.speed for figure in figures], marker="o")
        speed.set_ylabel("new tokens/s")
        speed.set_ylim(bottom=0)
        waste.plot(sizes, [100 * figure.memory.mean.waste for figure in figures], marker="o", label="paged")
        for other, style in zip(others, ("--", ":"), strict=True):
            waste.axhline(100 * other.mean.waste, linestyle=style, color="grey", label=other.run.system)
        waste.set_ylabel("% of the owned slots wasted, over all steps")
        waste.legend()
        for panel in axes[0]:
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.set_xlabel("block size")
