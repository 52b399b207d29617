"""What a gateway did, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from quire.fleet.score import Choice

OPENMETRICS = "application/openmetrics-text"


class FleetMetrics:
    """Counts. A registry of its own: nothing is shared with others in the process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector):
            collector(registry=self._registry)

        def counter(name: str, message: str, *labels: str) -> Counter:
            return Counter(f"quire:fleet_{name}", message, labels, registry=self._registry)

        self._routed = counter("routed", "Calls that a replica has taken.", "replica")
        self._expected = counter("routed_cached_tokens", "Tokens of these that the index knew to be cached.")
        self._resumed = counter("resumed", "Calls that another replica had to go on with, by the reason.", "reason")
        self._mismatches = counter("resume_mismatch", "Delivered tokens that another replica drew otherwise.")
        self._late = counter("late_frames", "Frames that came after their call was given to another replica.")
        self._contradictions = counter(
            "contradictions", "Sessions that ended as the replica contradicted itself.", "replica"
        )
        self._left_out = counter("left_out", "Sessions with replicas of another model.", "replica")
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts that began to run.")
        self._cached_tokens = counter("cached_tokens", "Tokens of these that were cached.")
        self._gauges: Mapping[str, Callable[[], Mapping[str, float]]] = {}

    def show(self, gauges: Mapping[str, Callable[[], Mapping[str, float]]]) -> None:
        """Show numbers of each replica, by their names, whenever they are asked for."""
        self._gauges = gauges
        self._registry.register(self)

    def routed(self, replica: str, choice: Choice) -> None:
        """A replica has taken a call."""
        best = choice.best
        self._routed.labels(replica).inc()
        self._expected.inc(best.candidate.num_blocks * best.candidate.state.block_size)

    def resumed(self, reason: str) -> None:
        """Another replica has to go on with a call: its own was lost, has failed, or is drained."""
        self._resumed.labels(reason).inc()

    def mismatched(self, count: int) -> None:
        """Delivered tokens were drawn otherwise."""
        self._mismatches.inc(count)

    def late(self) -> None:
        """A frame came for a call that is no longer waited for."""
        self._late.inc()

    def contradicted(self, replica: str) -> None:
        """A replica has contradicted itself."""
        self._contradictions.labels(replica).inc()

    def left_out(self, replica: str) -> None:
        """A replica serves another model."""
        self._left_out.labels(replica).inc()

    def cached(self, num_cached: int, num_prompt: int) -> None:
        """A prompt began to run."""
        self._prompt_tokens.inc(num_prompt)
        self._cached_tokens.inc(num_cached)

    def collect(self) -> Iterator[Metric]:
        """The numbers of each replica as they are now."""
        for name, numbers in self._gauges.items():
            family = GaugeMetricFamily(
                f"quire:fleet_{name}", f"{name.replace('_', ' ')} of a replica", labels=["replica"]
            )
            for replica, value in numbers().items():
                family.add_metric([replica], value)
            yield family

    def render(self, accept: str) -> tuple[bytes, str]:
        """What a scrape gets, and its content type."""
        encode, content_type = choose_encoder(OPENMETRICS if OPENMETRICS in accept else "")
        return encode(self._registry), content_type
