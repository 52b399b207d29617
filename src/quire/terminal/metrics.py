"""What a server's /metrics say, and what happened between two looks at them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.errors import QuireError

PREFIXES = ("quire:", "vllm:")  # as with --vllm-metrics


@dataclass
class Scrape:
    """The numbers at one moment, by their names without a prefix."""

    values: dict[str, float] = field(default_factory=dict)  # with one label of interest, as in kv_blocks/used
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # of histograms: counts up to each bound
    labels: dict[str, Mapping[str, str]] = field(default_factory=dict)  # of what is said by labels alone
    moment: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, text: str) -> Scrape:
        """What stands in a text of Prometheus's format. Raises QuireError where it is none."""
        from prometheus_client.parser import text_string_to_metric_families

        found = cls()
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found._take(sample.name, sample.labels, sample.value)
        except ValueError as error:
            raise QuireError(f"/metrics answers what is no Prometheus text: {error}") from error
        return found

    def _take(self, name: str, labels: Mapping[str, str], value: float) -> None:
        for prefix in PREFIXES:
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                break
        else:
            return
        if "le" in labels:
            bound = float(labels["le"])
            own = self.buckets.setdefault(name.removesuffix("_bucket"), {})
            own[bound] = own.get(bound, 0.0) + value
        elif name.endswith("_config_info"):
            self.labels[name] = dict(labels)
        else:
            name = name if "state" not in labels else f"{name}/{labels['state']}"
            self.values[name] = self.values.get(name, 0.0) + value  # over routes and reasons

    def get(self, name: str) -> float:
        """A number; 0 where there is none."""
        return self.values.get(name, 0.0)


@dataclass(frozen=True)
class Change:
    """What happened from one scrape to the next."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        """From one to the other."""
        return max(self.now.moment - self.before.moment, 1e-3)

    def of(self, name: str) -> float:
        """By how much a counter has grown. One that has fallen is of a server that was started again."""
        grown = self.now.get(name) - self.before.get(name)
        return grown if grown >= 0 else self.now.get(name)

    def rate(self, name: str) -> float:
        """That, a second."""
        return self.of(name) / self.seconds

    def mean(self, histogram: str) -> float | None:
        """The mean of what a histogram has seen meanwhile; None: nothing."""
        count = self.of(f"{histogram}_count")
        return self.of(f"{histogram}_sum") / count if count else None

    def longest(self, histogram: str) -> tuple[float, float] | None:
        """Between which bounds the longest of these lies; None: there is none."""
        now, before = self.now.buckets.get(histogram, {}), self.before.buckets.get(histogram, {})
        lower, total, found = 0.0, 0.0, None
        for bound in sorted(now):
            grown = now[bound] - before.get(bound, 0.0)
            if grown > total:
                total, found = grown, (lower, bound)
            lower = bound
        return found
