"""The cost of a gateway: the same load on a plain server, and on one replica through a gateway, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from statistics import median
from typing import Any

from quire.errors import ConfigError, check_integer
from quire_bench.fleet.running import ONE_THREAD, fleet
from quire_bench.proc import cpu_seconds
from quire_bench.server.client import Run, Server, completed
from quire_bench.server.process import server
from quire_bench.server.prompts import random_prompts, request_body
from quire_bench.server.report import percentile

PROMPT = 32  # tokens
AT_A_TIME = 10  # requests for first tokens, before the other way has its turn
OPTIONS = {"temperature": 0.0, "ignore_eos": True}


def measure(
    options: Sequence[str],
    streams: Sequence[int],
    requests: int,
    output_len: int,
    runs: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure both ways in turns, with one replica of one thread, and a server like it.

    options: of both. requests: each way, for the time to the first token. output_len: tokens of each stream.
    advance: is called after each run. Raises QuireError where a server fails or tokens are missing.
    """
    for name, value in (("requests", requests), ("output_len", output_len), ("runs", runs)):
        check_integer(ConfigError, name, value, 1)
    with server(*options, environment=ONE_THREAD) as plain, fleet(1, *options) as found:
        ways, seeds = {"direct": plain.url, "gateway": found.url}, count()  # two engines: no prompt is in a cache
        for url in ways.values():
            _send(url, max(streams), 2 * max(streams), output_len, next(seeds))  # warms up
        times: dict[str, list[float]] = {way: [] for way in ways}
        for start in range(0, requests, AT_A_TIME):
            seed = next(seeds)
            for way, url in ways.items():
                run = _send(url, 1, min(AT_A_TIME, requests - start), 2, seed)
                times[way] += [record.answer.times[0] - (record.sent or 0.0) for record in run.records]
            advance()
        measured = []
        for many in streams:
            rates: dict[str, list[float]] = {way: [] for way in ways}
            cpu: list[float] = []
            for turn in range(runs):
                seed, before = next(seeds), cpu_seconds(found.gateway.pid)
                for way in list(ways)[:: 1 if turn % 2 else -1]:  # each way is the first one every other time
                    run = _send(ways[way], many, max(8, 2 * many), output_len, seed)
                    rates[way].append(_num_tokens(run) / run.seconds)
                cpu.append((cpu_seconds(found.gateway.pid) - before) / _num_tokens(run))
                advance()
            measured.append(_of_streams(many, rates["direct"], rates["gateway"], cpu))
    first: dict[str, float] = {}
    for percent in (50, 99):
        direct, gateway = (1e3 * percentile(sorted(times[way]), percent) for way in ways)
        first |= {f"direct_p{percent}_ms": direct, f"gateway_p{percent}_ms": gateway}
        first[f"added_p{percent}_ms"] = gateway - direct
    return {"first_token": first, "streams": measured}


def _of_streams(many: int, direct: list[float], gateway: list[float], cpu: list[float]) -> dict[str, Any]:
    """Return medians, and all runs: tokens a second each way, and seconds of the gateway's CPU time a token."""
    return {
        "streams": many,
        "direct_tokens_per_second": median(direct),
        "gateway_tokens_per_second": median(gateway),
        "share": median(through / alone for through, alone in zip(gateway, direct, strict=True)),
        "cpu_microseconds_per_token": 1e6 * median(cpu),
        "direct_runs": direct,
        "gateway_runs": gateway,
        "cpu_runs": cpu,
    }


def _send(url: str, streams: int, requests: int, output_len: int, seed: int) -> Run:
    """Send that many requests, `streams` at a time. No two seeds have a prompt in common."""
    prompts = random_prompts(requests, PROMPT, output_len, seed)
    bodies = [request_body(prompt, "completions", "", OPTIONS) for prompt in prompts]
    return completed(Server(url), bodies, [0.0] * requests, streams)


def _num_tokens(run: Run) -> int:
    return sum(record.answer.num_tokens for record in run.records)
