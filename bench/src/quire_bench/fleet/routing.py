"""The gain from a gateway's choice of replicas: traces through it, and to the same replicas in turns.

Two replicas of one thread have caches that hold half of what a trace reads more than once, and one longest request.
Loads are shares of what the two sustain when they are asked in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import fmean
from types import MappingProxyType
from typing import Any

from quire.errors import ConfigError, check_integer
from quire_bench.fleet.running import Fleet, fleet, prefix_hits
from quire_bench.fleet.traces import ANSWER, BLOCK, LONGEST, TURNS, Trace, sessions, shared_prefixes, unshared
from quire_bench.server.client import Record, Server, completed
from quire_bench.server.prompts import MAX_TOKENS, Prompt, arrival_times, random_prompts, request_body
from quire_bench.server.report import percentile

LOADS = (0.3, 0.8)  # of what the replicas sustain
AT_A_TIME = 4  # requests at each replica, to find that out
TRACES: Mapping[str, Callable[[int, int, int], Trace]] = MappingProxyType(
    {"sessions": sessions, "documents": shared_prefixes, "unshared": unshared}
)
WARM_UP = 16  # requests that share nothing
OPTIONS = {"temperature": 0.0, "ignore_eos": True}


Way = Callable[[Fleet, Sequence[bytes], Sequence[float]], list[Record]]


def measure(
    options: Sequence[str],
    names: Collection[str],
    jobs: int,
    longest: int = LONGEST,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Send traces at both loads both ways, each time to fresh processes.

    options: of each replica. names: of TRACES. jobs: requests of a trace. longest: tokens of its longest prompts.
    advance: is called for each of the RUNS of a trace. Raises QuireError where a request fails.
    """
    check_integer(ConfigError, "jobs", jobs, 2 * TURNS)
    check_integer(ConfigError, "trace_len", longest, 512, MAX_TOKENS)
    for one in names:
        if one not in TRACES:
            raise ConfigError(f"there is no trace {one!r}; choose from {', '.join(TRACES)}")
    found = []
    for one in names:
        trace = TRACES[one](jobs, seed, longest)
        num_blocks = trace.working_set // 2 + -(-longest // BLOCK)
        own = (*options, "--block-size", str(BLOCK), "--num-blocks", str(num_blocks))
        with _fresh(own) as running:
            sustained = _sustained(running, trace)
        advance()
        for load in LOADS:
            for name, way in WAYS.items():
                with _fresh(own) as running:
                    records, hit_rate = _asked(running, trace, load * sustained, way, seed)
                times = sorted(record.answer.times[0] - record.due for record in records)
                infinite = trace.hit_rate()  # of one cache that never evicts
                found.append(
                    {
                        "trace": trace.name,
                        "load": load,
                        "way": name,
                        "rate": load * sustained,  # requests a second
                        "mean_first_token": fmean(times),  # seconds
                        "p99_first_token": percentile(times, 99),
                        "hit_rate": hit_rate,  # share of the prompts' tokens that were cached
                        "pooled_hit_rate": trace.hit_rate(2 * num_blocks),  # of a cache as large as all together
                        "infinite_hit_rate": infinite,
                        "of_infinite": hit_rate / (infinite or 1.0),
                    }
                )
                advance()
    return found


@contextmanager
def _fresh(options: Sequence[str]) -> Iterator[Fleet]:
    """A fleet that has computed something, so that its rates are known, but nothing that will be asked for."""
    with fleet(2, *options) as running:
        for url in (running.url, *(one.url for one in running.replicas)):
            _send(url, [_body(one) for one in random_prompts(WARM_UP, 64, ANSWER, -1)], [0.0] * WARM_UP, AT_A_TIME)
        yield running


def _sustained(running: Fleet, trace: Trace) -> float:
    """Requests a second that the replicas serve when each has always some of them."""
    began = time.perf_counter()
    _in_turns(running, [_body(one) for one in trace.prompts], [0.0] * len(trace.prompts), AT_A_TIME)
    return len(trace.prompts) / (time.perf_counter() - began)


def _asked(running: Fleet, trace: Trace, rate: float, way: Way, seed: int) -> tuple[list[Record], float]:
    """Return the record of each request, and the share of the prompts' tokens that were cached."""
    before = prefix_hits(running.replicas)
    records = way(running, [_body(one) for one in trace.prompts], arrival_times(len(trace.prompts), rate, seed))
    looked_for, found = (after - other for after, other in zip(prefix_hits(running.replicas), before, strict=True))
    return records, found / looked_for


def _through_gateway(running: Fleet, bodies: Sequence[bytes], arrivals: Sequence[float]) -> list[Record]:
    return _send(running.url, bodies, arrivals)


def _in_turns(
    running: Fleet, bodies: Sequence[bytes], arrivals: Sequence[float], at_a_time: int | None = None
) -> list[Record]:
    """Every other request to each of the two replicas."""
    with ThreadPoolExecutor(2) as pool:
        sending = [
            pool.submit(_send, one.url, bodies[i::2], arrivals[i::2], at_a_time)
            for i, one in enumerate(running.replicas)
        ]
        return [record for half in sending for record in half.result()]


WAYS: dict[str, Way] = {"round robin": _in_turns, "gateway": _through_gateway}
RUNS = 1 + len(LOADS) * len(WAYS)


def _body(prompt: Prompt) -> bytes:
    return request_body(prompt, "completions", "", OPTIONS)


def _send(url: str, bodies: Sequence[bytes], arrivals: Sequence[float], at_a_time: int | None = None) -> list[Record]:
    return completed(Server(url), bodies, arrivals, at_a_time).records
