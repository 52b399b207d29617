"""Metrics of a gateway for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from quire.fleet.index import MAX_SLOTS
from quire.fleet.score import PlacementChoice
from quire.fleet.state import ReplicaState
from quire.fleet.view import ReplicaView, Status
from quire.frontend.metrics import OPENMETRICS, WITH_COLONS, request_counters
from quire.server.http.access import Tally

MAX_COUNTED = 2 * MAX_SLOTS  # replicas with counters, including those that have left the fleet

# Upper bounds of the buckets, in seconds.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0)  # fmt: skip
STALL = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0)

# The description and the label of each counter.
COUNTERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "routed": ("Calls that a replica has taken.", "replica"),
        "routed_cached_tokens": ("Prompt tokens of routed calls that the index knew to be cached.",),
        "resumed": ("Calls that another replica had to continue.", "reason"),
        "resume_mismatch": ("Delivered tokens that another replica drew differently.",),
        "late_frames": ("Frames that arrived after their call had moved to another replica.",),
        "contradictions": ("Invalid answers, and sessions that ended with one.", "replica"),
        "left_out": ("Sessions with replicas of another model.", "replica"),
        "lost": ("Sessions that ended.", "replica"),
        "refused": ("Requests that ended with an error of this HTTP status.", "status"),
        "prompt_tokens": ("Tokens of prompts that began to run.",),
        "cached_tokens": ("Prompt tokens that were found in a replica's cache.",),
    }
)
REASONS = ("lost", "failed", "drained")  # why a call has to be continued
OF_REPLICAS = tuple(name for name, (_, *labels) in COUNTERS.items() if labels == ["replica"])
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = MappingProxyType(
    {
        "time_to_first_token": ("From a prompt's arrival to its first token.", FIRST_TOKEN),
        "stall": ("From the last token before another replica continued to the first one after.", STALL),
    }
)
# Gauges of each replica, whether it answers or not.
GAUGES: Mapping[str, tuple[str, Callable[[ReplicaView], float]]] = MappingProxyType(
    {
        "up": ("1: it gets requests, or drains.", lambda one: one.status in (Status.UP, Status.DRAINING)),
        "draining": ("1: it takes no new requests.", lambda one: one.status is Status.DRAINING),
        "samples": ("Samples that it computes for this gateway.", lambda one: one.num_samples),
        "held_blocks": ("Blocks that the gateway knows it to hold.", lambda one: one.held_blocks),
    }
)
# Gauges from a replica's own state, while it answers. The seconds are 0 until it has measured them.
STATE_GAUGES: Mapping[str, tuple[str, Callable[[ReplicaState], float]]] = MappingProxyType(
    {
        "waiting_tokens": ("Prompt tokens that it has still to compute.", lambda state: state.waiting_tokens),
        "requests_waiting": ("Requests that wait at it.", lambda state: state.num_waiting),
        "requests_running": ("Requests that run at it.", lambda state: state.num_running),
        "blocks": ("KV blocks that it has.", lambda state: state.num_blocks),
        "free_blocks": ("Its KV blocks that no request owns, cached ones among them.", lambda state: state.free_blocks),
        "cached_blocks": ("Its free KV blocks that can be reused.", lambda state: state.cached_blocks),
        "seconds_a_step": ("Fixed seconds of each of its steps.", lambda state: state.seconds_a_step),
        "seconds_a_prompt_token": ("Its seconds a prompt token.", lambda state: state.seconds_a_prompt_token),
        "seconds_a_sequence": (
            "Its seconds of each sequence that decodes in a step.",
            lambda state: state.seconds_a_sequence,
        ),
    }
)


class FleetMetrics:
    """Counters, in a separate registry: nothing is shared with the rest of the process. For the event loop only."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=self._registry)

        self._counters = {
            name: Counter(f"quire:fleet_{name}", message, labels, registry=self._registry)
            for name, (message, *labels) in COUNTERS.items()
        }
        for reason in REASONS:  # else the first one would be no increase
            self._counters["resumed"].labels(reason)
        self._histograms = {
            name: Histogram(f"quire:fleet_{name}_seconds", message, registry=self._registry, buckets=bounds)
            for name, (message, bounds) in HISTOGRAMS.items()
        }
        self._counted: dict[str, None] = {}  # replicas with counters, the most recently counted one last
        self._replicas: Callable[[], Sequence[ReplicaView]] = tuple
        self._tally: Tally | None = None
        self._registry.register(self)

    def show(self, replicas: Callable[[], Sequence[ReplicaView]]) -> None:
        """Show gauges of each replica, which are read at each scrape."""
        self._replicas = replicas

    def show_requests(self, tally: Tally) -> None:
        """Show counters of answered requests."""
        self._tally = tally

    def routed(self, replica: str, choice: PlacementChoice) -> None:
        """Count a call that a replica accepted."""
        best = choice.best
        self.count("routed", replica)
        self.count("routed_cached_tokens", amount=best.candidate.num_blocks * best.candidate.state.block_size)

    def observe(self, name: str, seconds: float) -> None:
        """Add a duration to one of HISTOGRAMS."""
        self._histograms[name].observe(seconds)

    def count(self, name: str, *labels: object, amount: int = 1) -> None:
        """Increase one of COUNTERS. labels: its label, if it has one."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(amount)
        if name in OF_REPLICAS:
            self._bound(str(labels[0]))

    def _bound(self, replica: str) -> None:
        """Remove the least recently counted replica if too many have counters.

        Otherwise, in a cluster whose addresses change, counters of all former replicas would be kept.
        """
        self._counted.pop(replica, None)
        self._counted[replica] = None
        if len(self._counted) > MAX_COUNTED:
            oldest = next(iter(self._counted))
            del self._counted[oldest]
            for name in OF_REPLICAS:
                with suppress(KeyError):  # not every counter has this replica
                    self._counters[name].remove(oldest)

    def collect(self) -> Iterator[Metric]:
        """Yield the current gauges of each replica."""
        replicas = self._replicas()
        answering = [(one.url, one.state) for one in replicas if one.state is not None]
        for name, (message, value) in GAUGES.items():
            yield _family(name, message, {one.url: value(one) for one in replicas})
        for name, (message, number) in STATE_GAUGES.items():
            yield _family(name, message, {url: number(state) for url, state in answering})
        if self._tally is not None:
            yield from request_counters(self._tally, "quire")

    def render(self, accept: str) -> tuple[bytes, str]:
        """Return the body of a scrape and its content type."""
        encode, content_type = choose_encoder(WITH_COLONS if OPENMETRICS in accept else "")
        return encode(self._registry), content_type


def _family(name: str, message: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"quire:fleet_replica_{name}", message, labels=["replica"])
    for replica, value in values.items():
        family.add_metric([replica], value)
    return family
