"""The results of a simulated fleet."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from quire.simulate.figures import Histogram

SERIES = ("replicas", "running", "waiting", "new_tokens", "prompt_tokens", "cached_tokens", "used_blocks", "blocks")


@dataclass
class Moment:
    """An interval of a run."""

    numbers: Counter[str] = field(default_factory=Counter)  # of SERIES: values in it, or counts within it
    ttft: Histogram = field(default_factory=Histogram)  # of requests whose first token came in it


@dataclass
class Outcome:
    """Figures of a run, which can be added for several cells. Seconds are those of the virtual clock."""

    resolution: float = 1.0  # seconds of a moment
    counts: Counter[str] = field(default_factory=Counter)
    ttft: Histogram = field(default_factory=Histogram)  # from the first attempt to the first token at the client
    itl: Histogram = field(default_factory=Histogram)  # between tokens at a replica
    e2e: Histogram = field(default_factory=Histogram)  # to the last token
    stalls: Histogram = field(default_factory=Histogram)  # of moved answers, from the loss to their next token
    errors: Counter[str] = field(default_factory=Counter)
    first_refusal: str | None = None
    seconds: float = 0.0  # to the last token
    moments: dict[int, Moment] = field(default_factory=dict)
    routed: Counter[str] = field(default_factory=Counter)  # by replica
    hashes: list[str] = field(default_factory=list)  # one for each cell

    def moment(self, now: float) -> Moment:
        """Return the interval that contains a time."""
        return self.moments.setdefault(int(now / self.resolution), Moment())

    def add(self, other: Outcome) -> None:
        """Add the figures of another cell."""
        self.counts.update(other.counts)
        self.errors.update(other.errors)
        self.routed.update(other.routed)
        for name in ("ttft", "itl", "e2e", "stalls"):
            getattr(self, name).merge(getattr(other, name))
        self.first_refusal = self.first_refusal or other.first_refusal
        self.seconds = max(self.seconds, other.seconds)
        self.hashes += other.hashes
        for at, moment in other.moments.items():
            mine = self.moments.setdefault(at, Moment())
            mine.numbers.update(moment.numbers)
            mine.ttft.merge(moment.ttft)

    @property
    def trace_hash(self) -> str:
        """The hash of all decisions in all cells."""
        return (
            self.hashes[0]
            if len(self.hashes) == 1
            else blake2b("".join(self.hashes).encode(), digest_size=16).hexdigest()
        )

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were found in a replica's cache."""
        return self.counts["cached_tokens"] / max(1, self.counts["prompt_tokens"])

    def figure(self, name: str) -> float:
        """Return a figure such as ttft_p90, in seconds."""
        what, _, level = name.partition("_")
        return float(getattr(self, what).as_dict()[level])

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        seconds = max(self.seconds, 1e-9)
        return {
            **{name: self.counts[name] for name in ("requests", "finished", "failed", "refused", "retries", "resumed")},
            "first_refusal": self.first_refusal,
            "errors": dict(self.errors),
            "seconds": self.seconds,
            "prompt_tokens": self.counts["prompt_tokens"],
            "new_tokens": self.counts["new_tokens"],
            "new_tokens_per_second": self.counts["new_tokens"] / seconds,
            "requests_per_second": self.counts["finished"] / seconds,
            "hit_rate": self.hit_rate,
            "preemptions": self.counts["preemptions"],
            "evicted_blocks": self.counts["evicted"],
            "steps": self.counts["steps"],
            **{name: getattr(self, name).as_dict() for name in ("ttft", "itl", "e2e", "stalls")},
            "routed": dict(sorted(self.routed.items())),
            "trace_hash": self.trace_hash,
            "series": [
                {"seconds": at * self.resolution, "ttft_mean": one.ttft.mean, "ttft_p90": one.ttft.percentile(90)}
                | {name: one.numbers[name] for name in SERIES}
                for at, one in sorted(self.moments.items())
            ],
        }
