"""The use of KV memory under a load: paged, and contiguous for each request, with the same slots.

The scheduler and the block manager are the real ones, driven step by step without a model; nothing here depends on the
machine. All requests are there from the start, and nobody ends early. Every step is looked at in its middle, when its
memory is handed out and its tokens are in their slots.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch

from quire.cache.groups import CacheGroup
from quire.cache.manager import BlockManager
from quire.cache.sizing import free_memory
from quire.cache.storage import bytes_per_block
from quire.config import CacheConfig, parse_memory
from quire.engine.plan import Plan
from quire.engine.scheduler import Scheduler
from quire.engine.workloads import chat_lengths
from quire.errors import ConfigError, QuireError, check_integer
from quire.models import EMBEDDED, longest_sequence, read_config
from quire.request import Request, SamplingParams
from quire_bench.engine import no_model
from quire_bench.engine.contiguous import ContiguousScheduler, Reservation
from quire_bench.plot import drawn

MAX_NUM_BATCHED_TOKENS = 2048  # query tokens a step, of all systems
Lengths = list[tuple[int, int]]  # prompt tokens and new tokens of each request

# ------------------------------------------------------------------------------------------------- the load


def _chat(rng: random.Random, _: int) -> tuple[int, int]:
    """Draw lengths as the workload "mixed" does, for any longest length."""
    return chat_lengths(rng)


def _uniform(rng: random.Random, longest: int) -> tuple[int, int]:
    """Any length up to the longest."""
    new = rng.randint(8, 264)
    return rng.randint(1, max(1, longest - new)), new


def _long_tailed(rng: random.Random, longest: int) -> tuple[int, int]:
    """Short prompts, and one in twenty that takes half of the longest or more."""
    _, new = chat_lengths(rng)
    if rng.random() < 0.05:
        return rng.randint(longest // 2, longest), new
    return int(rng.lognormvariate(4.0, 0.6)) + 8, new


DISTRIBUTIONS: Mapping[str, Callable[[random.Random, int], tuple[int, int]]] = {
    "chat": _chat,
    "uniform": _uniform,
    "long-tailed": _long_tailed,
}


def draw(distribution: str, count: int, longest: int, seed: int = 0) -> Lengths:
    """The same lengths for the same arguments, each request at most `longest` tokens, its prompt cut where need be.

    Raises ConfigError where there is no such distribution, or a number is too small.
    """
    check_integer(ConfigError, "requests", count, 1)
    check_integer(ConfigError, "max_model_len", longest, 2)
    check_integer(ConfigError, "seed", seed, 0)
    if distribution not in DISTRIBUTIONS:
        raise ConfigError(f"there is no distribution {distribution!r}; there are {', '.join(DISTRIBUTIONS)}")
    rng = random.Random(seed)
    lengths = []
    for _ in range(count):
        prompt, new = DISTRIBUTIONS[distribution](rng, longest)
        new = min(new, longest - 1)
        lengths.append((min(prompt, longest - new), new))
    return lengths


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The memory and the load. Raises ConfigError for sizes that make no sense together."""

    distribution: str = "chat"
    requests: int = 512
    seed: int = 0
    shared_prefix: int = 0  # tokens that all prompts begin with, besides those drawn
    prefix_caching: bool = False
    max_model_len: int = 2048
    block_size: int = 16  # B
    num_blocks: int | None = None  # N; None: as many as 16 requests of max_model_len fill

    def __post_init__(self) -> None:
        check_integer(ConfigError, "max_model_len", self.max_model_len, 2)
        check_integer(ConfigError, "shared_prefix", self.shared_prefix, 0, self.max_model_len - 2)
        CacheConfig(block_size=self.block_size, num_blocks=self.num_blocks)
        if self.slots < self.max_model_len:
            raise ConfigError(
                f"num_blocks is {self.num_blocks}; one request of max_model_len={self.max_model_len} tokens needs "
                f"{-(-self.max_model_len // self.block_size)} blocks of {self.block_size}"
            )

    @property
    def blocks(self) -> int:
        """Blocks that there are."""
        return -(-16 * self.max_model_len // self.block_size) if self.num_blocks is None else self.num_blocks

    @property
    def slots(self) -> int:
        """Slots that there are, for every system."""
        return self.blocks * self.block_size

    @cached_property
    def lengths(self) -> Lengths:
        """The lengths of each request, with the shared prefix."""
        drawn = draw(self.distribution, self.requests, self.max_model_len - self.shared_prefix, self.seed)
        return [(self.shared_prefix + prompt, new) for prompt, new in drawn]


# -------------------------------------------------------------------------------------------------- the use


@dataclass(frozen=True)
class Moment:
    """One step, counted in slots."""

    running: int  # requests
    used: int  # requests own these
    live: int  # and these of them hold a token
    shared: int  # would be owned besides if nothing were shared
    unusable: int  # free ones, where they are enough for the next request in all its length and it was refused
    is_short: bool  # requests wait for memory, and for nothing else


@dataclass(frozen=True)
class Use:
    """Means over some steps, in slots."""

    reserved: float  # there are
    used: float  # owned by requests
    live: float  # hold a token
    shared: float  # saved by sharing
    wasted: float  # used and not live: waste inside
    unusable: float  # free and no use to a request that waits: waste outside
    free: float  # the rest
    waste: float  # share of what is used or unusable that is not live
    mean_batch: float  # requests that run
    largest_batch: int


@dataclass(frozen=True)
class Run:
    """The use of the memory by one system."""

    setup: Setup
    system: str
    moments: tuple[Moment, ...]
    refused: int  # requests that were refused at least once though slots enough for all their length were free
    preemptions: int = 0

    @property
    def short(self) -> tuple[Moment, ...]:
        """The steps in which requests wait for memory."""
        return tuple(moment for moment in self.moments if moment.is_short)

    @property
    def pressed(self) -> Use:
        """Over the steps in which requests wait for memory; over all of them where it never ran short."""
        return self.use(self.short or self.moments)

    def use(self, moments: Sequence[Moment]) -> Use:
        """Means over these steps."""

        def mean(name: str) -> float:
            return float(sum(getattr(moment, name) for moment in moments)) / len(moments)

        used, live, unusable = mean("used"), mean("live"), mean("unusable")
        return Use(
            reserved=self.setup.slots,
            used=used,
            live=live,
            shared=mean("shared"),
            wasted=used - live,
            unusable=unusable,
            free=self.setup.slots - used - unusable,
            waste=1 - live / (used + unusable),
            mean_batch=mean("running"),
            largest_batch=max(moment.running for moment in moments),
        )

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON: over all steps, and over those in which requests wait for memory."""
        return {
            **asdict(self.setup),
            "num_blocks": self.setup.blocks,
            "prompt_tokens": sum(prompt for prompt, _ in self.setup.lengths),
            "new_tokens": sum(new for _, new in self.setup.lengths),
            "system": self.system,
            "steps": len(self.moments),
            "steps_short": len(self.short),
            "refused": self.refused,
            "steps_refused": sum(moment.unusable > 0 for moment in self.moments),
            "preemptions": self.preemptions,
            "overall": asdict(self.use(self.moments)),
            "short": asdict(self.use(self.short)) if self.short else None,
        }


def compare(setup: Setup) -> list[Run]:
    """The same load in the same memory: paged, and contiguous in two ways."""
    return [run_paged(setup), *runs_contiguous(setup)]


def table(runs: Sequence[Run]) -> list[str]:
    """Return a table of the systems under one load."""
    setup, paged = runs[0].setup, runs[0].pressed
    prompts, news = (sum(numbers) for numbers in zip(*setup.lengths, strict=True))
    shown = ("live", "wasted", "unusable", "free")
    lines = [
        f"{setup.distribution}: {setup.requests:,} requests, {prompts:,} prompt tokens, {news:,} new ones; "
        f"{setup.blocks:,} blocks of {setup.block_size}, max_model_len {setup.max_model_len:,}",
        f"{'% of the slots while requests wait':34s}"
        + "".join(f"{name:>9s}" for name in (*shown, "waste", "batch", "largest", "steps", "refused", "preempt")),
    ]
    for run in runs:
        use = run.pressed
        shares = [getattr(use, name) / use.reserved for name in shown]
        lines.append(
            f"{run.system + ('' if run.short else ', all fit'):34s}"
            + "".join(f"{100 * share:9.1f}" for share in (*shares, use.waste))
            + f"{use.mean_batch:9.1f}{use.largest_batch:9d}{len(run.moments):9d}{run.refused:9d}{run.preemptions:9d}"
        )
    for run in runs[1:]:
        lines += [f"paged against {run.system:20s}{paged.mean_batch / run.pressed.mean_batch:9.1f} x the batch"]
    if paged.shared:
        lines.append(f"sharing saves {paged.shared:,.0f} slots besides")
    return lines


def run_paged(setup: Setup) -> Run:
    """Drive the scheduler to the end of the load."""
    manager = BlockManager(
        (CacheGroup((0,)),),
        setup.blocks,
        setup.block_size,
        MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=setup.prefix_caching,
    )
    scheduler = Scheduler(
        manager,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.requests,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    if setup.shared_prefix:  # somebody has been there before, else all would wait for the first of them
        scheduler.add(_request(-1, setup.shared_prefix, 1, setup.shared_prefix))
        for _ in _steps(scheduler):
            pass
    for i, (prompt, new) in enumerate(setup.lengths):
        scheduler.add(_request(i, prompt, new, setup.shared_prefix))
    moments, refused = [], set()
    for plan in _steps(scheduler):
        usage = scheduler.usage()
        free = sum(pool.num_free for pool in manager.pools) * setup.block_size
        is_short = len(scheduler.waiting) > 0 and plan.num_tokens < MAX_NUM_BATCHED_TOKENS
        unusable = 0
        if is_short:
            first = scheduler.waiting.first()
            if first is not None and free >= scheduler.longest(first):
                unusable = free
                refused.add(first.id)
        live = usage.filled_slots + sum(_coming(item.request, item.num_new) for item in plan.items)
        running = len(scheduler.running)
        moments.append(Moment(running, usage.used_slots, live, usage.shared_slots, unusable, is_short))
    return Run(setup, "paged", tuple(moments), len(refused), scheduler.num_preemptions)


def runs_contiguous(setup: Setup) -> list[Run]:
    """With contiguous memory: max_model_len side by side for each request, and just what it will fill."""
    whole = [setup.max_model_len] * setup.requests
    exact = [prompt + new - 1 for prompt, new in setup.lengths]  # what only an oracle knows; the last token has no slot
    return [run_contiguous(setup, "max_model_len", whole), run_contiguous(setup, "exact length", exact)]


def run_contiguous(setup: Setup, what: str, sizes: Sequence[int]) -> Run:
    """The same with contiguous memory. sizes: the slots that each request reserves."""
    requests = [
        Reservation(prompt, prompt + new, size) for (prompt, new), size in zip(setup.lengths, sizes, strict=True)
    ]
    scheduler = ContiguousScheduler(requests, setup.slots, MAX_NUM_BATCHED_TOKENS)
    moments, refused = [], set()
    while scheduler.has_work:
        items = scheduler.plan()
        coming = sum(num_new for _, num_new in items)
        is_short = bool(scheduler.waiting) and coming < MAX_NUM_BATCHED_TOKENS
        free, unusable = scheduler.allocator.num_free, 0
        if is_short and free >= scheduler.waiting[0].longest:
            unusable = free
            refused.add(scheduler.waiting[0])
        live = sum(request.num_computed for request in scheduler.running) + coming
        moments.append(Moment(len(scheduler.running), setup.slots - free, live, 0, unusable, is_short))
        scheduler.commit(items)
    return Run(setup, f"contiguous, {what}", tuple(moments), len(refused))


def _request(ordinal: int, prompt: int, new: int, shared_prefix: int) -> Request:
    """A request whose tokens nobody else has, the shared prefix aside."""
    tokens = array("i", [0] * shared_prefix + [2 + ordinal] * (prompt - shared_prefix))
    return Request(str(ordinal), tokens, prompt, SamplingParams(max_tokens=new))


def _steps(scheduler: Scheduler) -> Iterator[Plan]:
    """Each step's plan, before it is committed, until nothing is left. Raises QuireError where a request fails."""
    while scheduler.has_work:
        plan = scheduler.plan()
        yield plan
        for event in scheduler.commit(plan, no_model.sampled(plan)):
            if event.error is not None:
                raise QuireError(f"request {event.request_id} failed: {event.error}")


def _coming(request: Request, num_new: int) -> int:
    """Slots that these tokens fill; those of tokens found in the cache are full already."""
    stored = max(request.cache.num_computed, request.cache.num_cached)
    return max(0, request.cache.num_computed + num_new - stored)


# ------------------------------------------------------------------------------------------------ the model


@dataclass(frozen=True)
class KVSize:
    """The sizes of a model's K and V, and what they come to."""

    groups: tuple[CacheGroup, ...]
    dtype: torch.dtype
    block_size: int = 16  # B

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return self._bytes(self.groups, 1)

    def _bytes(self, groups: Sequence[CacheGroup], num_slots: int) -> int:
        return bytes_per_block(groups, num_slots, self.dtype)

    def _blocks(self, num_tokens: int) -> list[int]:
        """Blocks of each group that a request of that length owns at most."""
        growth = min(num_tokens, MAX_NUM_BATCHED_TOKENS)
        return [group.most(num_tokens, growth, self.block_size) for group in self.groups]

    def paged_bytes(self, num_tokens: int) -> int:
        """Bytes of the blocks that a request of that length owns at most."""
        counts = zip(self.groups, self._blocks(num_tokens), strict=True)
        return sum(count * self._bytes((group,), self.block_size) for group, count in counts)

    def paged_fit(self, memory: int, num_tokens: int) -> int:
        """Requests of that length that fit in so many bytes. Every group has the same number of blocks."""
        return memory // self._bytes(self.groups, self.block_size) // max(self._blocks(num_tokens))

    def contiguous_fit(self, memory: int, max_model_len: int) -> int:
        """Requests that fit, whatever their length, where each reserves max_model_len slots."""
        return memory // (self.bytes_per_token * max_model_len)


@dataclass(frozen=True)
class ModelFit:
    """The number of requests for whose K and V a memory has room."""

    model: str
    num_layers: int  # L
    size: KVSize
    max_model_len: int
    memory: int  # bytes
    lengths: Mapping[str, int]  # the tokens of a request of full length, and of a mean one of each distribution

    def as_dict(self) -> dict[str, object]:
        """The figures, for JSON."""
        size = self.size
        return {
            "model": self.model,
            "dtype": str(size.dtype).removeprefix("torch."),
            "layers": self.num_layers,
            "kv_heads": [group.heads.num_kv_heads for group in size.groups],
            "head_dim": [group.heads.head_dim for group in size.groups],
            "block_size": size.block_size,
            "max_model_len": self.max_model_len,
            "bytes_per_token": size.bytes_per_token,
            "bytes_per_request": size.paged_bytes(self.max_model_len),
            "memory": self.memory,
            "contiguous": size.contiguous_fit(self.memory, self.max_model_len),
            "paged": {
                name: {"tokens": tokens, "requests": size.paged_fit(self.memory, tokens)}
                for name, tokens in self.lengths.items()
            },
        }

    def table(self) -> list[tuple[str, str]]:
        """The figures, named, for a reader."""
        size = self.size
        heads = dict.fromkeys(f"{of.num_kv_heads} KV heads of {of.head_dim}" for of in (g.heads for g in size.groups))
        kind = f"{self.num_layers} layers, {' and '.join(heads)}, {size.dtype}"
        contiguous = size.contiguous_fit(self.memory, self.max_model_len)
        lines = [
            ("model", f"{self.model}: {kind.replace('torch.', '')}"),
            ("bytes a token", f"{size.bytes_per_token:,}"),
            ("bytes a request", f"{size.paged_bytes(self.max_model_len):,} of {self.max_model_len:,} tokens"),
            ("memory", f"{self.memory:,} bytes"),
            ("contiguous", f"{contiguous:,} requests fit, of any length"),
        ]
        for name, tokens in self.lengths.items():
            lines.append(("paged", f"{size.paged_fit(self.memory, tokens):,} requests of {tokens:,} tokens, {name}"))
        return lines


def model_fit(
    config: Path | None, memory: str, block_size: int, max_model_len: int | None, requests: int, seed: int
) -> ModelFit:
    """Return the size of a model's K and V, and the number of requests that fit in that memory.

    config: a config.json or its directory; None: the embedded model's. memory: bytes, or a share of what is free.
    max_model_len: None for what the model was made for. requests, seed: those whose mean lengths are taken.
    Raises ModelError or ConfigError for what is not understood.
    """
    path = EMBEDDED if config is None else config.resolve()
    CacheConfig(block_size=block_size)
    budget = parse_memory(memory, free_memory(), name="memory")
    decoder, dtype = read_config(path)
    groups = tuple(group for group in decoder.groups if isinstance(group, CacheGroup))
    if len(groups) < len(decoder.groups):
        raise ConfigError(f"{config} has layers that keep a state; what keys and values take is not all it keeps")
    size = KVSize(groups, dtype, block_size)
    most = longest_sequence(decoder)
    longest = most if max_model_len is None else max_model_len
    if longest > most and config is not None:
        raise ConfigError(f"max_model_len is {longest}; {config} was made for sequences of up to {most}")
    longest = min(longest, most)  # the embedded model is but an example
    lengths = {"full length": longest}
    for distribution in DISTRIBUTIONS:
        drawn = draw(distribution, requests, longest, seed)
        lengths[f"mean of {distribution}"] = round(sum(prompt + new for prompt, new in drawn) / requests)
    name = path.parent.name if path.name == "config.json" else path.name
    return ModelFit(name, decoder.num_layers, size, longest, budget, lengths)


# ------------------------------------------------------------------------------------------------- the plot


def plot(comparisons: Sequence[Sequence[Run]], path: Path) -> None:
    """For each load, where the memory goes, and the batch over time. Raises ConfigError where that cannot be drawn."""
    parts = {
        "live": ("live", "tab:blue"),
        "wasted": ("wasted inside", "tab:orange"),
        "unusable": ("wasted outside", "tab:red"),
        "free": ("free", "lightgrey"),
    }
    with drawn(path, 2, len(comparisons), (5 * len(comparisons), 8)) as (drawing, axes):
        for (bars, curves), runs in zip(axes.T, comparisons, strict=True):
            names, bottom = [run.system.replace(", ", "\n") for run in runs], [0.0] * len(runs)
            for part, (label, color) in parts.items():
                shares = [100 * getattr(run.pressed, part) / run.pressed.reserved for run in runs]
                bars.bar(names, shares, bottom=bottom, label=label, color=color)
                bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
            bars.set_title(runs[0].setup.distribution)
            bars.set_ylabel("% of the slots while requests wait")
            for run in runs:
                curves.plot([moment.running for moment in run.moments], label=run.system)
            curves.set_xlabel("step")
            curves.set_ylabel("requests that run")
            curves.legend()
        drawing.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=len(parts))
