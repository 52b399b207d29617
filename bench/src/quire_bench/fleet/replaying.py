"""Traces, sent to real replicas and simulated.

A trace is drawn as rows, as `quire simulate --trace` reads them; its prompts are tokens by the names of their parts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from quire.engine.trace import TraceRow, write_trace
from quire.simulate.device import DeviceFile, write_device
from quire.simulate.fleet import FleetSimulation
from quire.simulate.loads import arrivals, drawn
from quire.simulate.outcome import Outcome
from quire.simulate.spec import Lengths, LoadSpec, make_spec
from quire_bench.fleet.running import Replica, fleet
from quire_bench.proc import cpu_seconds, first_thread_seconds, tells_cpu_time
from quire_bench.server.client import Run, Server, completed
from quire_bench.server.prompts import Prompt, request_body
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY

BLOCK = 16  # tokens
TURNS = 4  # of a conversation
THINK = 2.0  # seconds between turns, on the average
ASKED = Lengths(median=96, spread=0.6, least=8, most=384)
ANSWERED = Lengths(median=40, spread=0.5, least=4, most=128)
WARM_UP = 16  # requests
FILLING = 256  # tokens of each of the prompts that fill a cache
# A chunk for each token, also where a text is held back until its last character is whole.
OPTIONS = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


# ------------------------------------------------------------------------------------------------------- the traces


def poisson(rate: float, seconds: float, seed: int) -> list[TraceRow]:
    """Chats that come independently of one another."""
    return _chats(LoadSpec(rate=rate, duration=seconds), f"{seed}/poisson")


def clusters(rate: float, seconds: float, seed: int) -> list[TraceRow]:
    """Chats that come in clusters, between which there are gaps."""
    return _chats(LoadSpec(arrivals="gamma", variation=2.0, rate=rate, duration=seconds), f"{seed}/clusters")


def _chats(load: LoadSpec, seed: str) -> list[TraceRow]:
    rng = random.Random(f"{seed}/lengths")
    times = arrivals(load, load.rate, f"{seed}/arrivals")
    return [TraceRow(at, drawn(rng, ASKED), drawn(rng, ANSWERED)) for at in times]


def sessions(rate: float, seconds: float, seed: int) -> list[TraceRow]:
    """Conversations: each prompt is all that was said before, with made-up answers, and something new."""
    rng, rows = random.Random(f"{seed}/sessions"), []
    load = LoadSpec(rate=rate / TURNS, duration=seconds)
    for talk, start in enumerate(arrivals(load, load.rate, f"{seed}/sessions/arrivals")):
        at, said, path = start, 0, ""
        for turn in range(TURNS):
            asked, new = drawn(rng, ASKED), drawn(rng, ANSWERED)
            rows.append(TraceRow(at, said + asked, new, f"{path}{seed}-{talk}-{turn}", said + asked))
            path += f"{seed}-{talk}-{turn}@{said + asked}/{seed}-{talk}-{turn}-answer@{said + asked + new}/"
            said += asked + new
            at += rng.expovariate(1 / THINK) + 0.5
    return sorted((row for row in rows if row.arrival < seconds), key=lambda row: row.arrival)


TRACES: Mapping[str, Callable[[float, float, int], list[TraceRow]]] = MappingProxyType(
    {"poisson": poisson, "clusters": clusters, "sessions": sessions}
)


def tokens_of(row: TraceRow, number: int, seed: int, turn: int = 0) -> list[int]:
    """A row's prompt: what has the same name has the same tokens. number: of the row. turn: has tokens of its own."""
    found: list[int] = []
    for name, end in [*row.prefixes(), (f"row {seed}/{number}", row.prompt_tokens)]:
        rng = random.Random(f"{turn}/{name}")
        found += rng.choices(range(FIRST_TOKEN, VOCABULARY), k=end - len(found))
    return found


# -------------------------------------------------------------------------------------------------------- replicas


@dataclass(frozen=True)
class Serving:
    """Replicas that are warm."""

    url: str  # where they are asked
    replicas: Sequence[Replica]
    secret: str = ""  # of their fleet
    gateway: int = 0  # its process; 0: there is none

    def loop_seconds(self) -> float:
        """Seconds of CPU time of event loops: the gateway's, and the replicas', whose other threads compute.

        0.0 where the system does not tell.
        """
        if not tells_cpu_time():
            return 0.0
        loops = sum(first_thread_seconds(one.pid) for one in self.replicas)
        return loops + (cpu_seconds(self.gateway) if self.gateway else 0.0)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a replica."""

    seats: int = 32  # requests that it computes together at most
    blocks: int = 1024  # of its cache, of BLOCK tokens each


def serving(count: int, threads: int, sizes: Sizes, options: Sequence[str]) -> AbstractContextManager[Serving]:
    """So many replicas, which have used all of their caches, behind a gateway where there are several.

    options: of each, besides its sizes. Raises QuireError where a server does not get ready.
    """
    return alone(threads, sizes, options) if count == 1 else behind_gateway(count, threads, sizes, options)


@contextmanager
def alone(threads: int, sizes: Sizes, options: Sequence[str]) -> Iterator[Serving]:
    """Do as `serving`, for one replica."""
    one = Replica(_own(sizes, options), threads)
    try:
        one.start()
        _make_ready(one, sizes)
        yield Serving(one.url, [one])
    finally:
        one.close()


@contextmanager
def behind_gateway(count: int, threads: int, sizes: Sizes, options: Sequence[str]) -> Iterator[Serving]:
    """Do as `serving`, for several replicas."""
    with fleet(count, *_own(sizes, options), threads=threads) as running:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(_make_ready, running.replicas, repeat(sizes)))
        _warm(running.url)
        yield Serving(running.url, running.replicas, running.secret, running.gateway.pid)


def _own(sizes: Sizes, options: Sequence[str]) -> list[str]:
    own = ["--max-num-seqs", str(sizes.seats), "--num-blocks", str(sizes.blocks), "--block-size", str(BLOCK)]
    return ["--num-speculative-tokens", "0", *options, *own]


def _make_ready(replica: Replica, sizes: Sizes) -> None:
    """Touch all memory of a replica: a step waits at the first use of each page, which is not simulated."""
    _warm(replica.url)
    sent(replica.url, [TraceRow(0.0, FILLING, 1)] * -(-sizes.blocks * BLOCK // FILLING), -2, 0)


def _warm(url: str) -> None:
    sent(url, at_once(poisson(10.0, 60.0, -1), WARM_UP), -1, 0)


def at_once(rows: Sequence[TraceRow], count: int) -> list[TraceRow]:
    """The first of these requests, all of which come at the same time."""
    return [replace(row, arrival=0.0) for row in rows[:count]]


def sent(url: str, rows: Sequence[TraceRow], seed: int, turn: int) -> Run:
    """Send a trace. seed, turn: of its tokens. Raises QuireError where a request fails."""
    bodies = [
        request_body(Prompt(tokens_of(row, i, seed, turn), row.new_tokens), "completions", "", OPTIONS)
        for i, row in enumerate(rows)
    ]
    return completed(Server(url), bodies, [row.arrival for row in rows])


def seconds_of(run: Run) -> float:
    """From the first request to the last token, as the simulator counts."""
    records = run.records
    return max(record.ended or 0.0 for record in records) - min(record.due for record in records)


def simulated(
    count: int, gateways: int, sizes: Sizes, rows: Sequence[TraceRow], device: DeviceFile, model: str
) -> Outcome:
    """Simulate `count` replicas on one machine. model: its directory or file; None: the embedded model.

    gateways: without, requests go to replicas in turns.
    """
    with TemporaryDirectory() as directory:
        write_device(Path(directory, "device.json"), device)
        write_trace(Path(directory, "trace.csv"), rows)
        kind = {"kind": "replica", "device": "device.json", "count": count, "per_host": count, "blocks": sizes.blocks,
                "options": {"max_num_seqs": sizes.seats, "block_size": BLOCK}}  # fmt: skip
        fleet_of = {
            "replicas": [kind],
            "load": {"arrivals": "trace", "trace": "trace.csv"},
            "gateways": {"count": gateways, "seconds": device.server.gateway},
            "network": {"to_gateway": 0.0, "to_replica": 0.0},
            "model": model,
        }
        return FleetSimulation(make_spec(fleet_of, Path(directory))).run()
