"""Prometheus metrics: vLLM's names under our prefix, or under theirs, and a few that only Quire has.

Events are counted on the engine's thread, in plain numbers and without a lock. A scrape reads these, and the engine's
own numbers, while the engine runs: nothing here waits for a step, and no changing collection is iterated.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from quire.errors import check_installed

check_installed("quire.frontend.metrics", "prometheus_client")

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from quire.cache.disk.tier import DiskTier
from quire.cache.events import BlockCopied, BlockRemoved, BlocksSwappedIn, BlocksSwappedOut, CacheEvent
from quire.cache.groups import AnyGroup, CacheGroup, RowGroup, StateGroup
from quire.cache.incoming import BlockSource, Fault
from quire.engine.engine import Engine
from quire.engine.scheduler import Scheduler
from quire.request import FinishReason

OPENMETRICS = "application/openmetrics-text"
# Else prometheus_client 0.26 writes an underscore for the colon in the names of samples.
WITH_COLONS = f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"

# Upper bounds of the buckets, vLLM's.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
NEXT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
REQUEST = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
           1920.0, 7680.0)  # fmt: skip
SAMPLES = (1, 2, 5, 10, 20)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Ours.
STEP = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

# Name -> description and buckets; None: 1, 2, 5, 10, ... up to the model's maximum length.
HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between two steps that gave a request tokens.", NEXT_TOKEN),
    "request_time_per_output_token_seconds": ("Mean time between a request's tokens.", NEXT_TOKEN),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", REQUEST),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", REQUEST),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", REQUEST),
    "request_decode_time_seconds": ("From a request's first token to its last.", REQUEST),
    "request_inference_time_seconds": ("From a request's first step to its last token.", REQUEST),
    "request_prompt_tokens": ("Tokens of a request's prompt.", None),
    "request_generation_tokens": ("Tokens that a request got.", None),
    "request_max_num_generation_tokens": ("Most tokens that a sample of a request got.", None),
    "request_params_max_tokens": ("max_tokens of a request that has one.", None),
    "request_params_n": ("n of a request.", SAMPLES),
    "iteration_tokens_total": ("Tokens of a step: generated ones, and those of completed prompts.", STEP_TOKENS),
    "engine_step_seconds": ("Time that a step took.", STEP),
}

# The kinds of blocks: their gauge, their gauge on the host, and their name. All models have the first kind.
KINDS: tuple[tuple[str, str, str, type[AnyGroup]], ...] = (
    ("kv_blocks", "kv_host_blocks", "KV blocks", CacheGroup),
    ("states", "host_states", "States at the ends of pieces", StateGroup),
    ("open_pieces", "host_open_pieces", "Rows of pieces in progress", RowGroup),
)

# Name -> description and reader. Each reads a current length or number without a lock.
GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "num_requests_running": ("Requests that own blocks.", lambda engine: len(engine.scheduler.running)),
    "num_requests_waiting": ("Requests that wait for blocks or a slot.", lambda engine: len(engine.scheduler.waiting)),
    "num_requests_swapped": ("Requests whose blocks are on the host.", lambda engine: len(engine.scheduler.swapped)),
    "kv_cache_usage_perc": (
        "Share of the KV blocks that are owned, 0 to 1; with states, of the most used kind of blocks.",
        lambda engine: cache_use(engine.scheduler),
    ),
    "kv_waste_ratio": (
        "Share of the owned KV slots without a token: the unused ends of last blocks.",
        lambda engine: _waste(engine.scheduler),
    ),
}
ENGINE_COUNTERS: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "num_preemptions": ("Times that a request was preempted.", lambda engine: engine.scheduler.num_preemptions),
    "prefix_cache_queries": (
        "Prompt tokens that were looked for in the prefix cache.",
        lambda engine: engine.scheduler.manager.hits.prompt_tokens,
    ),
    "prefix_cache_hits": (
        "Prompt tokens that were found in the prefix cache.",
        lambda engine: engine.scheduler.manager.hits.cached_tokens,
    ),
    "prompt_tokens_cached": (
        "Prompt tokens that need not be computed.",
        lambda engine: engine.scheduler.manager.hits.cached_tokens,
    ),
    "spec_decode_num_drafts": ("Drafts that were verified.", lambda engine: _drafts(engine, "num_drafts")),
    "spec_decode_num_draft_tokens": ("Draft tokens.", lambda engine: _drafts(engine, "num_draft_tokens")),
    "spec_decode_num_accepted_tokens": ("Accepted draft tokens.", lambda engine: _drafts(engine, "num_right")),
}


class Histogram:
    """Observations by size. A list and a bisection, because this runs on the engine's thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last one counts values above all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return Prometheus's buckets: each bound with the number of observations up to it."""
        names = [str(float(bound)) for bound in self.bounds]
        return list(zip([*names, "+Inf"], accumulate(self.counts[:]), strict=True))


class Tally(Protocol):
    """The counters of a server's requests."""

    answered: Counter[tuple[str, str, str]]  # by route, method and status
    refused: Counter[str]  # by reason


class Moments(NamedTuple):
    """The times of a request's events, in seconds of time.monotonic(). None: the event has not happened."""

    arrived: float
    scheduled: float | None  # it ran for the first time
    first: float | None  # its first token
    last: float | None  # its last token
    num_tokens: int


class RequestClock:
    """The times of one sample, or of one search with all its beams, in seconds of time.monotonic().

    Tokens of the same moment count as one arrival: a step with accepted draft tokens has several, a search all of them.
    """

    __slots__ = ("_arrived", "_first", "_gaps", "_last", "_longest", "_max_tokens", "_metrics", "_n", "_num_prompt",
                 "_num_tokens", "_scheduled")  # fmt: skip

    def __init__(self, metrics: Metrics, num_prompt: int, max_tokens: int | None, n: int, arrived: float) -> None:
        self._metrics = metrics
        self._gaps = metrics.histograms["inter_token_latency_seconds"]
        self._num_prompt, self._max_tokens, self._n = num_prompt, max_tokens, n
        self._num_tokens = self._longest = 0
        self._arrived = arrived
        self._scheduled = self._first = self._last = -1.0  # has not happened

    def scheduled(self, now: float) -> None:
        """Record that it runs for the first time."""
        self._scheduled = now
        self._metrics.histograms["request_queue_time_seconds"].observe(now - self._arrived)

    def tokens(self, count: int, now: float) -> None:
        """Record that a sample got `count` tokens."""
        self._num_tokens += count
        self._longest += count
        last = self._last
        if now == last:
            return
        self._last = now
        if last >= 0:
            gap, gaps = now - last, self._gaps
            gaps.counts[bisect_left(gaps.bounds, gap)] += 1
            gaps.total += gap
        else:
            self._first = now
            self._metrics.prompt_done(self._num_prompt, now - self._arrived)

    def computed(self, now: float) -> None:
        """Record that its prompt is computed and no token was requested."""
        self._first = self._last = now
        self._metrics.prompt_computed(self._num_prompt)

    def found(self, lengths: Sequence[int], now: float) -> None:
        """Record that a search found sequences with these numbers of new tokens, all at once."""
        self.tokens(sum(lengths), now)
        self._longest = max(lengths)

    @property
    def moments(self) -> Moments:
        """The times of the events so far."""
        scheduled, first, last = (
            None if moment < 0 else moment for moment in (self._scheduled, self._first, self._last)
        )
        return Moments(self._arrived, scheduled, first, last, self._num_tokens)

    def ended(self, reason: str, now: float) -> None:
        """Record that it ended, with a value of FinishReason. Events that have not happened are not counted."""
        metrics, histograms = self._metrics, self._metrics.histograms
        metrics.num_ended[reason] += 1
        histograms["e2e_request_latency_seconds"].observe(now - self._arrived)
        histograms["request_prompt_tokens"].observe(self._num_prompt)
        histograms["request_generation_tokens"].observe(self._num_tokens)
        histograms["request_max_num_generation_tokens"].observe(self._longest)
        histograms["request_params_n"].observe(self._n)
        if self._max_tokens is not None:
            histograms["request_params_max_tokens"].observe(self._max_tokens)
        if self._first >= 0 and self._scheduled >= 0:
            decoding = self._last - self._first
            histograms["request_prefill_time_seconds"].observe(self._first - self._scheduled)
            histograms["request_decode_time_seconds"].observe(decoding)
            histograms["request_inference_time_seconds"].observe(self._last - self._scheduled)
            if decoding > 0:  # otherwise all tokens arrived at one moment
                histograms["request_time_per_output_token_seconds"].observe(decoding / (self._num_tokens - 1))


class Metrics:
    """The Prometheus metrics of one engine. The registry is separate: it shares nothing with others in the process.

    Any thread may call `request`, `render` and `collect`; only the engine's thread may call the other methods and those
    of a RequestClock.
    """

    def __init__(
        self, engine: Engine, model_name: str, vllm_names: bool, model_info: Mapping[str, str] | None = None
    ) -> None:
        """Create the metrics of an engine.

        vllm_names: call everything `vllm:...` instead of `quire:...`, so that dashboards made for vLLM work.
        model_info: the formats of the model's weights and its cache, by label; None: they are not shown.
        """
        self.histograms = {
            name: Histogram(_one_two_five(engine.scheduler.max_model_len) if bounds is None else bounds)
            for name, (_, bounds) in HISTOGRAMS.items()
        }
        self.num_ended = {reason.value: 0 for reason in FinishReason}
        self._engine = engine
        self._prefix = "vllm" if vllm_names else "quire"
        self._labels = {"model_name": model_name, "engine": "0"}
        self._model_info = model_info
        self._prompt_tokens = self._generation_tokens = 0
        self._step_prompt_tokens = 0  # of prompts that the current step completed
        self._copied = self._evicted = 0
        self._swapped = {"out": 0, "in": 0}
        self._alive = time.monotonic()  # when the engine last made progress
        # Additional metrics by name: description and reader.
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._counters: dict[str, tuple[str, Callable[[], float]]] = {}
        self._tally: Tally | None = None
        engine.listen(self._hear)
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(self)

    def show_gauge(self, name: str, message: str, read: Callable[[], float]) -> None:
        """Add a gauge. Any thread may call `read`."""
        self._gauges[name] = (message, read)

    def show_counter(self, name: str, message: str, read: Callable[[], float]) -> None:
        """Add a counter. Any thread may call `read`."""
        self._counters[name] = (message, read)

    def show_requests(self, tally: Tally) -> None:
        """Include the counters of answered and refused requests. Afterwards only the event loop may call `render`."""
        self._tally = tally

    # ---------------------------------------------------------------------------------- reported by the engine's side

    def request(self, num_prompt_tokens: int, max_tokens: int | None, n: int) -> RequestClock:
        """Start the clock of a request that arrives now."""
        return RequestClock(self, num_prompt_tokens, max_tokens, n, time.monotonic())

    def prompt_done(self, num_prompt_tokens: int, seconds: float) -> None:
        """Record a request's first token, `seconds` after its arrival. For RequestClock."""
        self.prompt_computed(num_prompt_tokens)
        self.histograms["time_to_first_token_seconds"].observe(seconds)

    def prompt_computed(self, num_prompt_tokens: int) -> None:
        """Record that the current step completed a request's prompt. For RequestClock."""
        self._step_prompt_tokens += num_prompt_tokens

    def step(self, num_generated: int, seconds: float) -> None:
        """Record a finished step, after all clocks have recorded its tokens."""
        prompt_tokens, self._step_prompt_tokens = self._step_prompt_tokens, 0
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += num_generated
        self.histograms["iteration_tokens_total"].observe(prompt_tokens + num_generated)
        self.histograms["engine_step_seconds"].observe(seconds)
        self._alive = time.monotonic()

    def _hear(self, event: CacheEvent) -> None:
        self._alive = max(self._alive, event.time)  # a step after an idle time begins long after the last one ended
        if isinstance(event, BlockCopied):
            self._copied += 1
        elif isinstance(event, BlockRemoved):
            self._evicted += len(event.blocks) * event.evicted
        elif isinstance(event, BlocksSwappedOut):
            self._swapped["out"] += len(event.blocks)
        elif isinstance(event, BlocksSwappedIn):
            self._swapped["in"] += len(event.blocks)

    # --------------------------------------------------------------------------------------------- reported to others

    @property
    def num_generated(self) -> int:
        """The number of tokens generated so far."""
        return self._generation_tokens

    def render(self, accept_header: str) -> tuple[bytes, str]:
        """Return the text of a scrape and its content type: OpenMetrics if accepted, else Prometheus's own format."""
        # The function gets one of two fixed values: it fails for odd headers, and repeats them in the content type.
        encode, content_type = choose_encoder(WITH_COLONS if OPENMETRICS in accept_header else "")
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their current values."""
        engine, manager = self._engine, self._engine.scheduler.manager
        speculation = engine.scheduler.speculation
        for name, (message, gauge) in GAUGES.items():
            yield self._family(GaugeMetricFamily, name, message, {"": gauge(engine)})
        for name, (message, read) in self._gauges.items():
            yield self._family(GaugeMetricFamily, name, message, {"": read()})
        for name, on_host, what, kind in KINDS if manager.state_groups else KINDS[:1]:
            blocks, hosts = _blocks(engine.scheduler, kind), _host_blocks(engine.scheduler, kind)
            yield self._family(GaugeMetricFamily, name, f"{what} by state.", blocks, "state")
            yield self._family(GaugeMetricFamily, on_host, f"{what} on the host.", hosts, "state")
        age = max(0.0, time.monotonic() - self._alive) if engine.can_step else 0.0
        message = "Time since an engine with work last made progress."
        yield self._family(GaugeMetricFamily, "engine_heartbeat_age_seconds", message, {"": age})
        labels = self._labels | {
            "block_size": str(manager.block_size),
            "num_gpu_blocks": str(manager.num_blocks),  # vLLM's name, whatever the device is
            "num_cpu_blocks": str(manager.host_pools[0].num_blocks),
            "enable_prefix_caching": str(manager.enable_prefix_caching),
        }
        yield self._info("cache_config_info", "How the KV cache is set up.", labels)
        if self._model_info is not None:
            labels = self._labels | dict(self._model_info)
            yield self._info("model_config_info", "How the model's weights and its cache are stored.", labels)

        for name, (message, counter) in ENGINE_COUNTERS.items():
            yield self._family(CounterMetricFamily, name, message, {"": counter(engine)})
        for name, (message, read) in self._counters.items():
            yield self._family(CounterMetricFamily, name, message, {"": read()})
        if manager.disk is not None:
            yield from self._of_disk(manager.disk)
        for source in () if engine.scheduler.prefetch is None else engine.scheduler.prefetch.sources:
            yield from self._of_source(source)
        for name, message, by, values in (
            ("prompt_tokens", "Tokens of completed prompts.", "", {"": self._prompt_tokens}),
            ("generation_tokens", "Tokens that were generated.", "", {"": self._generation_tokens}),
            ("request_success", "Requests that ended.", "finished_reason", self.num_ended),
            ("kv_blocks_copied", "KV blocks copied before a write.", "", {"": self._copied}),
            ("kv_blocks_evicted", "Cached KV blocks that were evicted.", "", {"": self._evicted}),
            ("kv_blocks_swapped", "KV blocks moved to and from the host.", "way", self._swapped),
            ("draft_tokens", "Draft tokens by their source.", "source", speculation.drafted if speculation else {}),
            ("draft_tokens_accepted", "Accepted ones.", "source", speculation.accepted if speculation else {}),
        ):
            yield self._family(CounterMetricFamily, name, message, values, by)

        if self._tally is not None:
            yield from request_counters(self._tally, self._prefix)
        for name, (message, _) in HISTOGRAMS.items():
            histogram = self.histograms[name]
            family = HistogramMetricFamily(f"{self._prefix}:{name}", message, labels=[*self._labels])
            family.add_metric([*self._labels.values()], histogram.buckets(), histogram.total)
            yield family

    def _of_disk(self, disk: DiskTier) -> Iterator[Metric]:
        """Yield the metrics of blocks on the disk."""
        blocks, size = "KV blocks on the disk.", "Bytes of KV blocks on the disk."
        yield self._family(GaugeMetricFamily, "kv_disk_blocks", blocks, {"": len(disk.store)})
        yield self._family(GaugeMetricFamily, "kv_disk_used_bytes", size, {"": disk.store.num_bytes})
        for name, message, by, values in (
            ("kv_disk_written_bytes", "Bytes of KV blocks written.", "", {"": disk.counts.bytes}),
            ("kv_disk_unwritten", "KV blocks that were not written.", "reason", dict(disk.counts.unwritten)),
        ):
            yield self._family(CounterMetricFamily, name, message, values, by)

    def _of_source(self, source: BlockSource) -> Iterator[Metric]:
        """Yield the metrics of blocks that were read from the disk or from other replicas."""
        counts, kind = source.counts, source.name
        misses = dict.fromkeys((fault.value for fault in Fault), 0) | counts.misses
        for name, message, by, values in (
            ("hits", "Requests for which KV blocks were read from there.", "", {"": counts.hits}),
            ("hit_tokens", "Prompt tokens that were read instead of computed.", "", {"": counts.tokens}),
            ("read_bytes", "Bytes of KV blocks read.", "", {"": counts.bytes}),
            ("misses", "KV blocks and requests that were not read but computed.", "reason", misses),
        ):
            yield self._family(CounterMetricFamily, f"kv_{kind}_{name}", message, values, by)

    def _info(self, name: str, description: str, labels: Mapping[str, str]) -> Metric:
        """Return a metric whose information is in its labels alone."""
        info = GaugeMetricFamily(f"{self._prefix}:{name}", description, labels=[*labels])
        info.add_metric([*labels.values()], 1)
        return info

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        description: str,
        values: Mapping[str, float],
        by: str = "",
    ) -> Metric:
        """Return a metric with one sample for each value of the label `by`, or a single sample without it."""
        own, others = [*self._labels], [*self._labels.values()]
        family = kind(f"{self._prefix}:{name}", description, labels=[*own, by] if by else own)
        for key, value in values.items():
            family.add_metric([*others, key] if by else others, value)
        return family


def request_counters(tally: Tally, prefix: str) -> Iterator[Metric]:
    """Yield the counters of answered and refused requests."""
    answered = CounterMetricFamily(
        f"{prefix}:http_requests", "Requests that were answered.", labels=["handler", "method", "status"]
    )
    for labels, count in tally.answered.items():
        answered.add_metric(labels, count)
    refused = CounterMetricFamily(
        f"{prefix}:requests_refused", "Requests that were answered with an error, by its code.", labels=["reason"]
    )
    for reason, count in tally.refused.items():
        refused.add_metric([reason], count)
    yield answered
    yield refused


def _one_two_five(longest: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, ... up to `longest`."""
    return [
        bound
        for exponent in range(len(str(longest)))
        for bound in (10**exponent, 2 * 10**exponent, 5 * 10**exponent)
        if bound <= longest
    ]


def _drafts(engine: Engine, name: str) -> float:
    """Return a counter of speculative decoding, or 0 if it is off."""
    speculation = engine.scheduler.speculation
    return 0.0 if speculation is None else float(getattr(speculation, name))


def cache_use(scheduler: Scheduler) -> float:
    """Return the share of owned blocks, for the most used kind of blocks."""
    counts = [_blocks(scheduler, kind) for kind in (CacheGroup, StateGroup, RowGroup)]
    return max(count["used"] / total for count in counts if (total := sum(count.values())))


def _blocks(scheduler: Scheduler, kind: type[AnyGroup]) -> dict[str, int]:
    """Return the numbers of used, cached and free blocks of one kind. They add up to all blocks."""
    cached = free = total = 0
    manager = scheduler.manager
    for group, pool, index in zip(manager.groups, manager.pools, manager.indexes, strict=True):
        if not isinstance(group, kind):
            continue
        reusable = list(index.by_block)  # a single interpreter operation, so no other thread changes it meanwhile
        idle = list(map(pool.ref_counts.__getitem__, reusable)).count(0)
        num_free = pool.num_free
        cached += min(idle, num_free)
        free += max(0, num_free - idle)
        total += pool.num_blocks
    return {"used": total - cached - free, "cached": cached, "free": free}


def _host_blocks(scheduler: Scheduler, kind: type[AnyGroup]) -> dict[str, int]:
    """Return the numbers of used and free host blocks of one kind. Swapped requests use them."""
    manager = scheduler.manager
    pools = [pool for group, pool in zip(manager.groups, manager.host_pools, strict=True) if isinstance(group, kind)]
    return {"used": sum(pool.num_used for pool in pools), "free": sum(pool.num_free for pool in pools)}


def _waste(scheduler: Scheduler) -> float:
    """Return the share of owned slots after their requests' last tokens. Slots of a running step count as written."""
    size = scheduler.manager.block_size
    empty: dict[tuple[int, int], int] = {}  # by group and block: slots that not even its longest owner uses
    for request in list(scheduler.running):
        num_tokens = len(request.tokens)
        tables = request.cache.block_ids  # safe to read: the list is replaced as a whole, and a table only grows
        for g, table in enumerate(tables):
            if g in scheduler.manager.attention_groups and (room := len(table) * size - num_tokens) > 0:
                block = (g, table[-1])
                empty[block] = min(room, empty.get(block, room))
    used = sum(scheduler.manager.pools[g].num_used for g in scheduler.manager.attention_groups) * size
    return min(1.0, sum(empty.values()) / used) if used else 0.0
