"""Parsing of a server's /metrics, and the changes between two scrapes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.errors import QuireError

PREFIXES = ("quire:", "vllm:")  # the second one with --vllm-metrics


@dataclass
class Scrape:
    """The metrics at one moment, by name without the prefix."""

    values: dict[str, float] = field(default_factory=dict)  # a relevant label is part of the name: kv_blocks/used
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # of histograms: counts up to each bound
    labels: dict[str, Mapping[str, str]] = field(default_factory=dict)  # of metrics whose labels are the information
    moment: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, text: str) -> Scrape:
        """Parse a text in Prometheus's format. Raises QuireError for an invalid one."""
        from prometheus_client.parser import text_string_to_metric_families

        found = cls()
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found._take(sample.name, sample.labels, sample.value)
        except ValueError as error:
            raise QuireError(f"/metrics returns no Prometheus text: {error}") from error
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
        """Return a value; 0 if it is missing."""
        return self.values.get(name, 0.0)


@dataclass(frozen=True)
class Change:
    """The changes from one scrape to the next."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        """Seconds between the two scrapes."""
        return max(self.now.moment - self.before.moment, 1e-3)

    def of(self, name: str) -> float:
        """Return the increase of a counter. If it has fallen, the server was restarted."""
        grown = self.now.get(name) - self.before.get(name)
        return grown if grown >= 0 else self.now.get(name)

    def rate(self, name: str) -> float:
        """Return the increase of a counter per second."""
        return self.of(name) / self.seconds

    def mean(self, histogram: str) -> float | None:
        """Return the mean of a histogram's new observations; None without any."""
        count = self.of(f"{histogram}_count")
        return self.of(f"{histogram}_sum") / count if count else None

    def longest(self, histogram: str) -> tuple[float, float] | None:
        """Return the bounds of the bucket with the largest new observation; None without one."""
        now, before = self.now.buckets.get(histogram, {}), self.before.buckets.get(histogram, {})
        lower, total, found = 0.0, 0.0, None
        for bound in sorted(now):
            grown = now[bound] - before.get(bound, 0.0)
            if grown > total:
                total, found = grown, (lower, bound)
            lower = bound
        return found
