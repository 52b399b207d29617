"""Values of metrics for Python's callers: counters, gauges and histograms, as vLLM's `LLM.get_metrics` returns them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


@dataclass(frozen=True)
class Metric:
    """The value of a metric for one set of labels."""

    name: str  # as on /metrics, without the suffix of a counter or histogram
    labels: dict[str, str]


@dataclass(frozen=True)
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass(frozen=True)
class Vector(Metric):
    """Counts by position. Quire has no such metric; vLLM's scripts test for the class."""

    values: list[int]


@dataclass(frozen=True)
class Gauge(Metric):
    """A current number."""

    value: float


@dataclass(frozen=True)
class Histogram(Metric):
    """Observations by size."""

    count: int  # all observations
    sum: float  # of their values
    buckets: dict[str, int]  # for each upper bound, "+Inf" last: observations up to it


def read_families(families: Iterable[Family]) -> Iterator[Metric]:
    """Yield the values of Prometheus's metrics."""
    for family in families:
        if family.type == "histogram":
            yield from _read_histogram(family)
            continue
        for sample in family.samples:
            if family.type == "counter":
                yield Counter(family.name, dict(sample.labels), int(sample.value))
            else:
                yield Gauge(family.name, dict(sample.labels), sample.value)


def _read_histogram(family: Family) -> Iterator[Histogram]:
    """Yield a histogram for each set of labels other than a bucket's bound."""
    buckets: dict[str, int] = {}
    counted = 0
    for sample in family.samples:  # of a histogram its buckets come first, then its count and its sum
        labels = dict(sample.labels)
        if (bound := labels.pop("le", None)) is not None:
            buckets[bound] = int(sample.value)
        elif sample.name.endswith("_count"):
            counted = int(sample.value)
        elif sample.name.endswith("_sum"):
            yield Histogram(family.name, labels, counted, sample.value, buckets)
            buckets = {}
