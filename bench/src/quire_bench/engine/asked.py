"""Requests of a calibration over HTTP."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from quire_bench.fleet.replaying import OPTIONS
from quire_bench.server.client import Run, Server, completed
from quire_bench.server.prompts import random_prompts, request_body
from quire_bench.server.report import latencies

FIRST_GAPS = 4  # of a stream, in which prompts of others are computed


def mean_gap(gaps: Sequence[float]) -> float:
    """The mean of seconds, the longest ones left out: they are of other programs."""
    return statistics.fmean(sorted(gaps)[: len(gaps) * 98 // 100])


def ttft(server: Server, length: int) -> float:
    """Seconds to the first token of a prompt."""
    run = asked(server, 1, length, 1, 1)
    return statistics.fmean(one.ttft for one in map(latencies, run.records) if one is not None)


def asked(server: Server, count: int, length: int, new: int, at_a_time: int) -> Run:
    """Send that many requests. Raises QuireError where one fails."""
    seed = random.randrange(2**30)
    bodies = [request_body(one, "completions", "", OPTIONS) for one in random_prompts(count, length, new, seed)]
    return completed(server, bodies, [0.0] * count, at_a_time)
