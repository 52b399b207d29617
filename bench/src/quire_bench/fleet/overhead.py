"""What a gateway costs: the same load on a plain server, and on one replica through a gateway, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Streams:
    """Runs with so many streams at a time, in order."""

    count: int
    direct: tuple[float, ...]  # tokens a second
    gateway: tuple[float, ...]
    cpu: tuple[float, ...]  # seconds of the gateway's CPU time a token

    @property
    def shares(self) -> list[float]:
        """Of each run, the gateway's part of the tokens a second: both ways had the same requests."""
        return [through / direct for through, direct in zip(self.gateway, self.direct, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON: medians, and all runs."""
        return {
            "streams": self.count,
            "direct_tokens_per_second": median(self.direct),
            "gateway_tokens_per_second": median(self.gateway),
            "share": median(self.shares),
            "cpu_microseconds_per_token": 1e6 * median(self.cpu),
            "direct_runs": list(self.direct),
            "gateway_runs": list(self.gateway),
            "cpu_runs": list(self.cpu),
        }


@dataclass(frozen=True)
class Overhead:
    """What was measured."""

    streams: tuple[Streams, ...]
    direct: tuple[float, ...]  # seconds to the first token, of one request at a time
    gateway: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        first: dict[str, float] = {}
        for percent in (50, 99):
            direct, gateway = (1e3 * percentile(sorted(one), percent) for one in (self.direct, self.gateway))
            first |= {f"direct_p{percent}_ms": direct, f"gateway_p{percent}_ms": gateway}
            first[f"added_p{percent}_ms"] = gateway - direct
        return {"first_token": first, "streams": [one.as_dict() for one in self.streams]}


def measure(
    options: Sequence[str],
    streams: Sequence[int],
    requests: int,
    output_len: int,
    runs: int,
    advance: Callable[[], None] = lambda: None,
) -> Overhead:
    """Measure both ways in turns, with one replica of one thread, and a server like it.

    options: of both. requests: each way, for the time to the first token. output_len: tokens of each stream.
    advance: is called after each run. Raises QuireError where a server fails or tokens are missing.
    """
    for name, value in (("requests", requests), ("output_len", output_len), ("runs", runs)):
        check_integer(ConfigError, name, value, 1)
    with server(*options, environment=ONE_THREAD) as plain, fleet(1, *options) as found:
        ways, seeds = (plain.url, found.url), count()  # two engines: no prompt is found in a cache
        for url in ways:
            _send(url, max(streams), 2 * max(streams), output_len, next(seeds))  # warms up
        first: tuple[list[float], list[float]] = ([], [])
        for start in range(0, requests, AT_A_TIME):
            seed = next(seeds)
            for url, times in zip(ways, first, strict=True):
                run = _send(url, 1, min(AT_A_TIME, requests - start), 2, seed)
                times += [record.answer.times[0] - (record.sent or 0.0) for record in run.records]
            advance()
        measured = []
        for many in streams:
            rates: dict[str, list[float]] = {url: [] for url in ways}
            cpu: list[float] = []
            for turn in range(runs):
                seed, before = next(seeds), cpu_seconds(found.gateway.pid)
                for url in ways[:: 1 if turn % 2 else -1]:  # each way is the first one every other time
                    run = _send(url, many, max(8, 2 * many), output_len, seed)
                    rates[url].append(_num_tokens(run) / run.seconds)
                cpu.append((cpu_seconds(found.gateway.pid) - before) / _num_tokens(run))
                advance()
            direct, gateway = (tuple(rates[url]) for url in ways)
            measured.append(Streams(many, direct, gateway, tuple(cpu)))
    return Overhead(tuple(measured), tuple(first[0]), tuple(first[1]))


def _send(url: str, streams: int, requests: int, output_len: int, seed: int) -> Run:
    """So many requests, so many at a time. No two seeds have a prompt in common."""
    prompts = random_prompts(requests, PROMPT, output_len, seed)
    bodies = [request_body(prompt, "completions", "", OPTIONS) for prompt in prompts]
    return completed(Server(url), bodies, [0.0] * requests, streams)


def _num_tokens(run: Run) -> int:
    return sum(record.answer.num_tokens for record in run.records)
