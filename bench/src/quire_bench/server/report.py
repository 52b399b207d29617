"""The results of a load: latencies, rates, goodput, errors, and the delays of the client itself."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, check_number
from quire_bench.plot import drawn
from quire_bench.server.client import Record, Run

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
TOO_MANY = "HTTP 429"
MAX_ERRORS = 20  # kinds that are reported
BUSY = 0.8  # of a core: a client that takes more holds the server's answers up


# ----------------------------------------------------------------------------------------------------- arithmetic


@dataclass(frozen=True)
class Latencies:
    """The latencies of one answer, in seconds from when its request was sent."""

    sent: float
    ttft: float
    gaps: tuple[float, ...]  # before each token but those of the first chunk
    e2el: float

    @property
    def tpot(self) -> float | None:
        """The mean gap."""
        return sum(self.gaps) / len(self.gaps) if self.gaps else None

    def largest(self, metric: str) -> float | None:
        """Return the value that a limit on this metric is compared with: for the ITL the longest gap."""
        if metric == "itl":
            return max(self.gaps, default=None)
        return {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}[metric]


def token_gaps(times: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Seconds before each token, of chunks that came at these times with so many tokens each.

    k tokens of one chunk share the gap before it: k gaps of a k-th. Before the first chunk there is none.
    """
    gaps, last = [], times[0]
    for now, count in zip(times[1:], tokens[1:], strict=True):
        if count:
            gaps += [(now - last) / count] * count
            last = now
    return gaps


def latencies(record: Record) -> Latencies | None:
    """Those of a request, if its whole answer came."""
    if not record.completed or record.sent is None or record.ended is None:
        return None
    times = record.answer.times
    gaps = token_gaps(times, record.answer.chunk_tokens())
    return Latencies(record.sent, times[0] - record.sent, tuple(gaps), record.ended - record.sent)


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The value that so many percent lie below, on the line between its two neighbours."""
    place = percent / 100 * (len(ascending) - 1)
    below = int(place)
    above = min(below + 1, len(ascending) - 1)
    return ascending[below] + (place - below) * (ascending[above] - ascending[below])


def summary(values: Iterable[float], percents: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles: {"mean": ..., "p50": ...}; None where there are no values."""
    ascending = sorted(values)
    shown: dict[str, float | None] = {"mean": sum(ascending) / len(ascending) if ascending else None}
    return shown | {f"p{percent:g}": percentile(ascending, percent) if ascending else None for percent in percents}


def met(found: Latencies, limits: Mapping[str, float]) -> bool:
    """Return whether an answer kept all limits, in seconds. Without a metric, such as a gap, it kept that limit."""
    return all((value := found.largest(metric)) is None or value <= limit for metric, limit in limits.items())


# -------------------------------------------------------------------------------------------------------- options


def parse_limits(given: Sequence[str]) -> dict[str, float]:
    """Seconds by metric, from "ttft:200 itl:30" in milliseconds. Raises ConfigError for another form."""
    limits = {}
    for pair in _listed(" ".join(given)):
        metric, _, number = pair.partition(":")
        if metric not in METRICS:
            raise ConfigError(
                f"goodput is {pair!r}; it must be a metric of {', '.join(METRICS)} and ms, as in ttft:200"
            )
        limits[metric] = _number("goodput", pair, number) / 1e3
    return limits


def parse_metrics(given: str) -> list[str]:
    """The metrics to tell. Raises ConfigError for a name that is none."""
    for name in (names := _listed(given)):
        if name not in METRICS:
            raise ConfigError(f"percentile_metrics has {name!r}; the metrics are {', '.join(METRICS)}")
    return names


def parse_percents(given: str) -> list[float]:
    """The percentiles to tell. Raises ConfigError for one outside of 0..100."""
    percents = [_number("metric_percentiles", given, cell) for cell in _listed(given)]
    for percent in percents:
        check_number(ConfigError, "metric_percentiles", percent, 0.0, 100.0)
    return percents


def _listed(text: str) -> list[str]:
    return [part for part in re.split(r"[,\s]+", text) if part]


def _number(name: str, given: str, cell: str) -> float:
    try:
        number = float(cell)
    except ValueError as error:
        raise ConfigError(f"{name} is {given!r}; {cell!r} is no number") from error
    check_number(ConfigError, name, number, 0.0)
    return number


# --------------------------------------------------------------------------------------------------------- report


class Report:
    """The figures of a run."""

    def __init__(
        self,
        run: Run,
        metrics: Sequence[str] = tuple(METRICS),
        percents: Sequence[float] = (50, 90, 99),
        limits: Mapping[str, float] | None = None,
    ) -> None:
        """limits: seconds that a good answer keeps, by metric; None: goodput is not reported."""
        self.run = run
        self.limits = limits or {}
        self._metrics, self._percents = metrics, percents
        self.completed = [record for record in run.records if record.completed]
        self.found = [found for record in self.completed if (found := latencies(record)) is not None]
        self.errors = Counter(record.error for record in run.records if record.error is not None)

    def _values(self, metric: str) -> list[float]:
        if metric == "itl":
            return [gap for found in self.found for gap in found.gaps]
        return [value for found in self.found if (value := found.largest(metric)) is not None]

    def _per_second(self, count: float) -> float:
        return count / self.run.seconds if self.run.seconds > 0 else 0.0

    @property
    def spread(self) -> str:
        """The way of assigning tokens to chunks: "chunks" (one each), "told" (by usage in chunks), or "evenly"."""
        if self.completed and all(record.answer.counts_are_told for record in self.completed):
            return "told"
        return "chunks" if all(r.answer.num_tokens <= len(r.answer.times) for r in self.completed) else "evenly"

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON. Times are in seconds."""
        run, records = self.run, self.run.records
        output = sum(record.answer.num_tokens for record in self.completed)
        counted = [r.answer.prompt_tokens for r in self.completed if r.answer.prompt_tokens is not None]
        prompts = sum(counted) if len(counted) == len(self.completed) else None
        most = self.errors.most_common(MAX_ERRORS)
        good = sum(met(found, self.limits) for found in self.found)
        goodput = {"limits": dict(self.limits), "share": good / max(1, len(records)), "rate": self._per_second(good)}
        late = (record.late for record in records if record.late is not None)
        return {
            "requests": len(records),
            "completed": len(self.completed),
            "failed": sum(self.errors.values()),
            "rejected": sum(n for (kind, _), n in self.errors.items() if kind == TOO_MANY),
            "unfinished": sum(record.ended is None for record in records),
            "errors": [{"kind": kind, "message": message, "count": count} for (kind, message), count in most],
            "seconds": run.seconds,
            "input_tokens": prompts,
            "output_tokens": output,
            "lost_tokens": sum(r.answer.num_tokens for r in records if not r.completed),
            "chunks": sum(len(record.answer.times) for record in self.completed),
            "spread": self.spread,
            "request_throughput": self._per_second(len(self.completed)),
            "output_throughput": self._per_second(output),
            "total_token_throughput": None if prompts is None else self._per_second(output + prompts),
            **{metric: summary(self._values(metric), self._percents) for metric in self._metrics},
            "goodput": goodput if self.limits else None,
            "queued": summary((record.queued for record in records if record.sent is not None), self._percents),
            "late": summary(late, self._percents),
            "client_cpu_seconds": run.cpu_seconds,
            "client_cpu_share": self._per_second(run.cpu_seconds),
        }

    def table(self) -> list[tuple[str, str]]:
        """The figures, to be read: a name and a text each."""
        shown = self.as_dict()
        state = f"{shown['completed']:,} of {shown['requests']:,} completed in {shown['seconds']:,.2f} s"
        state += f", {shown['rejected']:,} rejected with 429" if shown["rejected"] else ""
        state += f", {shown['unfinished']:,} interrupted" if shown["unfinished"] else ""
        lines = [("requests", f"{state}; {shown['request_throughput']:,.2f} a second")]
        lines += [("error", f"{e['count']:,} x {e['kind']}: {e['message']}") for e in shown["errors"]]
        lines.append(("output tokens", f"{shown['output_tokens']:,}, {shown['output_throughput']:,.1f} a second"))
        if shown["input_tokens"] is not None:
            lines.append(("with prompts", f"{shown['total_token_throughput']:,.1f} tokens a second"))
        for metric in self._metrics:
            lines.append((metric.upper(), f"{_milliseconds(shown[metric])}   {METRICS[metric]}"))
        if shown["spread"] != "chunks":
            how = "as the server tells with each" if shown["spread"] == "told" else "thought to be evenly many in each"
            lines.append(("", f"{shown['output_tokens']:,} tokens in {shown['chunks']:,} chunks, {how}"))
        if shown["goodput"]:
            limits = " ".join(f"{metric}:{1e3 * limit:g}" for metric, limit in self.limits.items())
            rate = f"{shown['goodput']['rate']:,.2f} requests a second"
            lines.append(("goodput", f"{shown['goodput']['share']:.1%}, {rate} within {limits} ms"))
        if any(record.queued > 1e-3 for record in self.run.records):
            lines.append(("queued", f"{_milliseconds(shown['queued'])}   in the client, for others to end"))
        lines.append(("sent late", _milliseconds(shown["late"])))
        share = shown["client_cpu_share"]
        busy = "; it was too busy, so these are its own figures more than the server's" if share > BUSY else ""
        lines.append(("client", f"{shown['client_cpu_seconds']:.2f} s of CPU time, {share:.0%} of a core{busy}"))
        return lines

    def plot(self, path: Path) -> None:
        """Draw latencies, TTFT by arrival, tokens a second and requests under way. Raises ConfigError."""
        start, seconds = self.run.started, max(self.run.seconds, 1e-9)
        with drawn(path, 2, 2, (10, 7)) as (_, axes):
            shares, arrivals, rate, flight = axes.flat
            for metric in METRICS:
                if values := sorted(self._values(metric)):
                    heights = [100 * (i + 1) / len(values) for i in range(len(values))]
                    shares.step([1e3 * value for value in values], heights, where="post", label=metric.upper())
            shares.set(xscale="log", xlabel="ms", ylabel="% of them take no longer")
            if self.found:
                shares.legend()
            arrivals.plot([f.sent - start for f in self.found], [1e3 * f.ttft for f in self.found], ".")
            arrivals.set(xlabel="s, when it was sent", ylabel="TTFT in ms")
            times, weights = [], []
            for record in self.completed:
                times += [now - start for now in record.answer.times]
                weights += [count * 50 / seconds for count in record.answer.chunk_tokens()]
            rate.hist(times, bins=50, range=(0, seconds), weights=weights, histtype="step")
            rate.set(xlabel="s", ylabel="output tokens a second")
            changes = [(record.sent - start, 1) for record in self.run.records if record.sent is not None]
            changes += [(record.ended - start, -1) for record in self.run.records if record.ended is not None]
            counts, under_way = [], 0
            for _, change in sorted(changes):
                counts.append(under_way := under_way + change)
            flight.step([at for at, _ in sorted(changes)], counts, where="post")
            flight.set(xlabel="s", ylabel="requests under way")


def _milliseconds(told: Mapping[str, float | None]) -> str:
    cells = (f"{name} {'-' if value is None else f'{1e3 * value:,.2f}'}" for name, value in told.items())
    return ", ".join(cells) + " ms"
