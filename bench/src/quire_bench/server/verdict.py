"""The findings of a soak, and whether a server with them may run for ever."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.sandbox.chat_template import MAX_TEMPLATES
from quire.sandbox.grammar import num_trials
from quire.server.api.service import MAX_LONG_TEXTS

# Threads that come one by one, when there is more to do: asyncio's own, and those of the server's lanes.
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4) + num_trials() + MAX_LONG_TEXTS + MAX_TEMPLATES
# Of the processes that start where several grammars are tried, or several templates rendered, at once.
TRIAL_DESCRIPTORS = 2 * (num_trials() - 1 + MAX_TEMPLATES - 1)
MAX_GROWTH = 0.01  # of the resident memory, over a whole run
MAX_TOLD = 20  # wrong answers that are reported
# Of what a server counts, what shows how much of it a load has reached.
COUNTED = (
    "generation_tokens",
    "num_preemptions",
    "kv_blocks_swapped/out",
    "kv_blocks_copied",
    "kv_blocks_evicted",
    "prefix_cache_hits",
)


@dataclass(frozen=True)
class Sample:
    """A server at a moment, as its operating system and its metrics tell it."""

    seconds: float  # since the load began to count
    resident: int  # bytes
    anonymous: int  # bytes of it that no file holds
    threads: int
    descriptors: int
    running: int
    waiting: int
    swapped: int
    blocks: int  # owned
    host_blocks: int

    @property
    def left(self) -> dict[str, int]:
        """The resources in use, of those that an idle server has released."""
        names = ("running", "waiting", "swapped", "blocks", "host_blocks")
        return {name: value for name in names if (value := getattr(self, name))}


@dataclass
class Findings:
    """All that a soak noted."""

    samples: list[Sample] = field(default_factory=list)  # under load, after the warm-up
    before: Sample | None = None  # idle, after the warm-up
    after: Sample | None = None  # idle, at the end
    outcomes: dict[str, Counter[str]] = field(default_factory=dict)  # by kind of request: answered, refused, aborted
    num_wrong: int = 0
    wrong: list[str] = field(default_factory=list)  # the first ones of the answers that should not be
    canaries: Counter[str] = field(default_factory=Counter)  # answers to the one request that is asked again and again
    num_healthy: int = 0
    unhealthy: list[str] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)  # of the server's counters, at the end
    logged: list[str] = field(default_factory=list)  # errors in the server's log
    ended_early: str | None = None  # why
    status: int | None = None  # with which the server ended

    def note(self, kind: str, outcome: str) -> None:
        """A request had an outcome."""
        self.outcomes.setdefault(kind, Counter())[outcome] += 1

    def note_wrong(self, kind: str, why: str) -> None:
        """An answer is not what it must be."""
        self.note(kind, "wrong")
        self.num_wrong += 1
        if len(self.wrong) < MAX_TOLD:
            self.wrong.append(f"{kind}: {why}")

    def total(self, outcome: str) -> int:
        """Requests with that outcome."""
        return sum(counter[outcome] for counter in self.outcomes.values())

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        memory = [sample.resident for sample in self.samples]
        figures = {
            "seconds": self.samples[-1].seconds if self.samples else 0.0,
            "growth": growth([sample.seconds for sample in self.samples], memory) if memory else None,
            "spread_bytes": max(memory) - min(memory) if memory else None,
            "problems": judge(self),
        }
        plain = {name: value for name, value in vars(self).items() if name not in ("samples", "before", "after")}
        samples = {"before": self.before and asdict(self.before), "after": self.after and asdict(self.after)}
        return figures | plain | samples | {"samples": [asdict(sample) for sample in self.samples]}


def growth(times: Sequence[float], values: Sequence[float]) -> float:
    """By what share of its first value the least-squares line through these points grows; 0 for a single moment."""
    mean_time, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((time - mean_time) ** 2 for time in times)
    if spread == 0:
        return 0.0
    slope = sum((time - mean_time) * (value - mean) for time, value in zip(times, values, strict=True)) / spread
    return slope * (times[-1] - times[0]) / (mean + slope * (times[0] - mean_time))


def judge(found: Findings) -> list[str]:
    """Return the faults of a server with these findings, in words; empty if it may run for ever."""
    problems = []
    if found.ended_early is not None:
        problems.append(f"the soak ended early: {found.ended_early}")
    if found.samples:
        grown = growth([sample.seconds for sample in found.samples], [sample.resident for sample in found.samples])
        if grown >= MAX_GROWTH:
            problems.append(f"resident memory grew by {grown:.2%} over the run; it must be less than {MAX_GROWTH:.0%}")
    if found.before is not None and found.after is not None:
        for name, spare in (("threads", POOL_THREADS), ("descriptors", TRIAL_DESCRIPTORS)):
            then, now = getattr(found.before, name), getattr(found.after, name)
            if now > then + spare:
                problems.append(f"{now - then} {name} are left: {now}, and {then} after the warm-up")
    if found.after is not None and found.after.left:
        problems.append("not everything came back: " + ", ".join(f"{n} {name}" for name, n in found.after.left.items()))
    if found.num_wrong:
        problems.append(f"{found.num_wrong:,} answers were wrong; the first: {found.wrong[0]}")
    if not found.canaries:
        problems.append("the canary was never answered")
    if len(found.canaries) > 1:
        problems.append(f"one request had {len(found.canaries)} answers: {', '.join(map(repr, found.canaries))[:200]}")
    if found.unhealthy:
        problems.append(f"/health failed {len(found.unhealthy):,} times; first: {found.unhealthy[0]}")
    if found.logged:
        problems.append(f"{len(found.logged):,} errors in the server's log; the first: {found.logged[0]}")
    if found.status not in (None, 0, -signal.SIGTERM):  # it obeys, or ends of the signal once it has obeyed
        problems.append(f"the server ended with status {found.status}")
    return problems


def table(found: Findings) -> list[tuple[str, str]]:
    """Return the findings, as lines with a name each."""
    mib = 2**20
    rows = [
        (kind, ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counter.items())))
        for kind, counter in sorted(found.outcomes.items())
    ]
    rows.append(("the server counted", ", ".join(f"{name} {found.counts.get(name, 0):,.0f}" for name in COUNTED)))
    if samples := found.samples:
        memory = [sample.resident for sample in samples]
        grown = growth([sample.seconds for sample in samples], memory)
        hours = samples[-1].seconds / 3600
        message = (
            f"{min(memory) / mib:,.1f} to {max(memory) / mib:,.1f} MiB in {len(samples):,} samples of {hours:.2f} h"
        )
        rows.append(("resident memory", f"{message}; its line grows by {grown:+.2%}"))
        rows.append(
            (
                "at most",
                f"{max(sample.running for sample in samples)} running, {max(sample.waiting for sample in samples)} "
                f"waiting, {max(sample.swapped for sample in samples)} swapped, "
                f"{max(sample.blocks for sample in samples):,} blocks",
            )
        )
    for name, idle in (("idle, warmed up", found.before), ("idle, at the end", found.after)):
        if idle is not None:
            sizes = f"{idle.resident / mib:,.1f} MiB ({idle.anonymous / mib:,.1f} anonymous)"
            left = ", ".join(f"{n} {what}" for what, n in idle.left.items()) or "all blocks free"
            rows.append((name, f"{sizes}, {idle.threads} threads, {idle.descriptors} descriptors, {left}"))
    rows.append(("canary", f"{found.canaries.total()} times, {len(found.canaries)} answers"))
    rows.append(("health", f"{found.num_healthy} times well, {len(found.unhealthy)} times not"))
    return rows
