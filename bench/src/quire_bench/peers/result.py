"""The times of a case: ratios, and whether they meet the targets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from quire_bench.peers.cases import ENGINES, READY, Case
from quire_bench.tables import markdown_row


@dataclass(frozen=True)
class Spread:
    """Figures of several runs: the middle one and the ends."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the median, the minimum and the maximum of these values."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)} to {short(self.high)})"


@dataclass
class Result:
    """The times of one case: the seconds of the runs that count, in order, by engine."""

    case: Case
    weight_bytes: int  # of the model
    seconds: dict[str, list[float]]
    failures: dict[str, str]  # engine -> what went wrong
    read: list[float] = field(default_factory=list)  # GB/s, after each round
    product: list[float] = field(default_factory=list)  # GFLOP/s, after each round

    def speed(self, engine: str, tokens: int) -> Spread:
        """Tokens a second of an engine that handles so many in a run."""
        return Spread.of([tokens / seconds for seconds in self.seconds[engine]])

    def ratio(self, peer: str) -> Spread:
        """The peer's seconds over Quire's, round by round: the two ran next to each other."""
        pairs = zip(self.seconds[peer], self.seconds["quire"], strict=True)
        return Spread.of([theirs / ours for theirs, ours in pairs])

    def weights_read(self) -> float:
        """The share of the read bandwidth at which Quire reads the weights, once for each token of its one sequence."""
        tokens = self.speed("quire", self.case.work.num_new_tokens).median
        return tokens * self.weight_bytes / 1e9 / statistics.median(self.read)

    def verdict(self, engine: str) -> tuple[str, str]:
        """Return the ratio to a peer, or for Quire to the machine; and the target, with whether it is met."""
        if engine == "quire":
            target = self.case.weights_read
            if target is None:
                return "", ""
            share = self.weights_read()
            return f"weights read at {share:.0%}", f"≥ {target:.0%}: {met(share >= target)}"
        if "quire" not in self.seconds:
            return "", ""
        ratio, target = self.ratio(engine), self.case.peers[engine]
        return str(ratio), "" if target is None else f"≥ {target}: {met(ratio.median >= target)}"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """A row for each engine, under COLUMNS."""
        work, name = self.case.work, f"{self.case.workload}, {self.case.variant}"
        for engine, (title, *_) in ENGINES.items():
            if engine in self.failures:
                yield name, title, "failed: " + self.failures[engine].splitlines()[0], "", "", "", ""
            elif engine in self.seconds:
                total = work.num_new_tokens + work.num_prompt_tokens
                speeds = [str(self.speed(engine, tokens)) for tokens in (work.num_new_tokens, total)]
                took = str(Spread.of(self.seconds[engine]))
                yield name, title, took, *(["", ""] if work.name == READY else speeds), *self.verdict(engine)

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        work = self.case.work
        return {
            "workload": work.name,
            "model": self.case.model,
            "quantization": self.case.quantization,
            "prompt_tokens": work.num_prompt_tokens,
            "new_tokens": work.num_new_tokens,
            "seconds": self.seconds,
            "failures": self.failures,
            "read": self.read,
            "product": self.product,
            "weights_read": self.weights_read() if self.case.weights_read and "quire" in self.seconds else None,
            "ratios": {
                peer: asdict(self.ratio(peer)) | {"target": target}
                for peer, target in self.case.peers.items()
                if {"quire", peer} <= self.seconds.keys()
            },
        }


COLUMNS = ("workload", "engine", "seconds", "new tok/s", "total tok/s", "ratio", "target")
WIDTHS = (16, 14, 22, 22, 24, 22, 12)


def short(value: float) -> str:
    """Three digits, or more before the point."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def met(reached: bool) -> str:
    """The word for it."""
    return "met" if reached else "not met"


def line(cells: Sequence[str], markdown: bool) -> str:
    """A row of the table."""
    if markdown:
        return markdown_row(cells)
    return " ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()
