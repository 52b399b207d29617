"""Predictions of the simulator against real servers: the same traces, replayed and simulated.

A trace is drawn as rows, as `quire simulate --trace` reads them; its prompts are tokens by the names of their parts.
Nothing of it was known to `quire bench calibrate`, whose device file the prediction is made with.

A run of some seconds has few requests, and no two runs of the same rows are alike. So the same rows are sent several
times, with other tokens, and the requests of all runs are looked at together; how far the runs lie apart is noted
besides. Memory and cores are as fast as others on the same machine let them be, from minute to minute. So around each
run streams show how long reading takes now, at one replica and at all of them, and prompts how long computing does.
Each run is simulated with that; all else is as it was calibrated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple

from quire.engine.cost import ModelCost, StepWork, model_cost
from quire.engine.trace import TraceRow, write_trace
from quire.errors import QuireError
from quire.models import EMBEDDED, expected_weight_bytes, read_config
from quire.simulate.device import DeviceFile, ReplicaCost, write_device
from quire.simulate.fleet import FleetSimulation
from quire.simulate.loads import arrivals, drawn
from quire.simulate.outcome import Outcome
from quire.simulate.replica import host_of
from quire.simulate.spec import Lengths, LoadSpec, make_spec
from quire_bench.fleet.running import Replica, fleet
from quire_bench.server.client import Run, Server, send
from quire_bench.server.prompts import Prompt, request_body
from quire_bench.server.report import latencies, percentile
from quire_bench.workloads import FIRST_TOKEN, VOCABULARY

LOADS = (0.3, 0.6, 0.8, 0.95)  # of what the replicas sustain
SEATS = 32  # requests that a replica computes together at most
BLOCKS = 1024  # of each cache
BLOCK = 16  # tokens
TURNS = 4  # of a conversation
THINK = 2.0  # seconds between turns, on the average
ASKED = Lengths(median=96, spread=0.6, least=8, most=384)
ANSWERED = Lengths(median=40, spread=0.5, least=4, most=128)
SATURATING = 3  # times as many requests as there are seats, to find what the replicas sustain
WARM_UP = 16  # requests
FILLING = 256  # tokens of each of the prompts that fill a cache
SHORTEST = 1e-6  # seconds: tokens that a busy client reads together have none between them
SCALES = (0.5, 2.0)  # of what reading and computing take, at most
CROWDED = 4.0  # times as long may reading take where all replicas do at once
STREAM = (32, 32)  # tokens of the prompt and of the answer of the stream that shows how fast the machine reads
PROMPT, PROMPTS = 512, 3  # tokens of the prompts that show how fast it computes, and how many these are
# A chunk for each token, also where a text is held back until its last character is whole.
OPTIONS = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
GOALS: Mapping[str, float] = MappingProxyType(  # the largest error of each figure
    {"throughput": 0.05, "ttft_p50": 0.1, "ttft_p90": 0.1, "itl_p50": 0.1, "itl_p99": 0.1, "hit_rate": 0.1}
)
FIGURES = tuple(GOALS)
MOST_LOAD = 0.8  # to which they are goals


@dataclass(frozen=True)
class Compared:
    """A trace at a load: figures of the replicas, and what the simulator said they would be."""

    replicas: int
    trace: str
    load: float  # of what was sustained; infinite: all requests came at once
    requests: int
    real: Mapping[str, float]  # of FIGURES: tokens or requests a second, seconds, a share
    simulated: Mapping[str, float]
    spread: Mapping[str, float]  # half of how far the runs of the same rows lie apart, relative to all together
    speeds: Sequence[Speed]  # before and after each run
    client_share: float  # of a core that sending took

    def error(self, figure: str) -> float:
        """Of the prediction, relative to what was measured."""
        real = self.real[figure]
        return self.simulated[figure] / real - 1 if real else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {"errors": {name: self.error(name) for name in self.real}}


class Speed(NamedTuple):
    """How fast a machine is, next to when it was calibrated."""

    reading: float
    computing: float
    at_once: float  # reading, where all replicas do


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


# --------------------------------------------------------------------------------------------------- the comparison


def validate(
    device: DeviceFile,
    model: str | None,
    counts: Sequence[int],
    traces: Sequence[str],
    loads: Sequence[float],
    seconds: float,
    repeats: int = 1,
    options: Sequence[str] = (),
    advance: Callable[[], None] = lambda: None,
) -> Iterator[Compared]:
    """Each trace at each load, with each number of replicas; before, what these sustain of it.

    model: as `quire serve` has it. seconds: in which the requests of a run come. repeats: runs of each load.
    options: of each replica. advance: is called for each load.
    Raises QuireError where a request fails or a server does not get ready.
    """
    for count in counts:
        with _serving(count, device, model, options) as serving:
            for number, name in enumerate(traces):
                seed = 1000 * count + 100 * number
                rows = _at_once(TRACES[name](1.0, SATURATING * SEATS * count * 1.1, seed), SATURATING * SEATS * count)
                runs = [_replayed(serving, rows, seed, 0)]
                sustained = _rate(sorted(record.ended for record in runs[0].run.records if record.ended is not None))
                yield _compared(serving, name, float("inf"), rows, runs)
                advance()
                for at, load in enumerate(loads):
                    rows = TRACES[name](load * sustained, seconds, seed + at + 1)
                    runs = [_replayed(serving, rows, seed + at + 1, turn) for turn in range(repeats)]
                    yield _compared(serving, name, load, rows, runs)
                    advance()


def _at_once(rows: Sequence[TraceRow], count: int) -> list[TraceRow]:
    return [replace(row, arrival=0.0) for row in rows[:count]]


@dataclass(frozen=True)
class _Serving:
    """Replicas that are warm."""

    url: str  # where they are asked
    replicas: Sequence[Replica]
    device: DeviceFile
    model: str | None
    model_cost: ModelCost


@contextmanager
def _serving(count: int, device: DeviceFile, model: str | None, options: Sequence[str]) -> Iterator[_Serving]:
    own = ["--num-speculative-tokens", "0", "--max-num-seqs", str(SEATS), "--num-blocks", str(BLOCKS)]
    own += ["--block-size", str(BLOCK), *options, *([] if model is None else ["--model", model])]
    threads = int(device.machine.get("threads", 1))
    path = EMBEDDED if model is None else Path(model)
    cost = model_cost(*read_config(path), expected_weight_bytes(path))
    if count == 1:
        one = Replica(own, threads)
        try:
            one.start()
            _warm(one.url)
            _fill(one.url)
            yield _Serving(one.url, [one], device, model, cost)
        finally:
            one.close()
        return
    with fleet(count, *own, threads=threads) as running:
        urls = [one.url for one in running.replicas]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(_warm, urls))
            list(pool.map(_fill, urls))
        _warm(running.url)
        yield _Serving(running.url, running.replicas, device, model, cost)


def _warm(url: str) -> None:
    rows = _at_once(poisson(10.0, 60.0, -1), WARM_UP)
    _send(url, rows, -1, 0)


def _fill(url: str) -> None:
    """Let a cache have all of its memory: the first use of each page makes a step wait, which is not simulated."""
    _send(url, [TraceRow(0.0, FILLING, 1)] * (BLOCKS * BLOCK // FILLING), -2, 0)


def _send(url: str, rows: Sequence[TraceRow], seed: int, turn: int) -> Run:
    bodies = [
        request_body(Prompt(tokens_of(row, i, seed, turn), row.new_tokens), "completions", "", OPTIONS)
        for i, row in enumerate(rows)
    ]
    run = send(Server(url), bodies, [row.arrival for row in rows])
    for record in run.records:
        if not record.completed:
            raise QuireError(f"a request to {url} failed: {record.error}")
    return run


@dataclass(frozen=True)
class _Replay:
    """One run of a load."""

    run: Run
    looked_for: float  # tokens of prompts, in the caches
    hits: float
    speeds: tuple[Speed, Speed]  # before and after


def _replayed(serving: _Serving, rows: Sequence[TraceRow], seed: int, turn: int) -> _Replay:
    if not rows:
        raise QuireError("a trace has no request within its seconds; give more of them")
    speed, before = _speed(serving, 2 * turn), _hits(serving.replicas)
    run = _send(serving.url, rows, seed, turn)
    looked_for, hits = (after - other for after, other in zip(_hits(serving.replicas), before, strict=True))
    return _Replay(run, looked_for, hits, (speed, _speed(serving, 2 * turn + 1)))


def _speed(serving: _Serving, turn: int) -> Speed:
    """How fast the replicas are next to what the device file says: one after the other, then all at once."""
    gaps: list[float] = []
    firsts: list[float] = []
    for one in serving.replicas:
        gaps += _stream(one, 2 * turn)
        for number in range(PROMPTS):
            found = latencies(_send(one.url, [TraceRow(0.0, PROMPT, 1)], -4, PROMPTS * turn + number).records[0])
            firsts += [] if found is None else [found.ttft]
    with ThreadPoolExecutor(len(serving.replicas)) as pool:
        at_once = [gap for those in pool.map(_stream, serving.replicas, repeat(2 * turn + 1)) for gap in those]
    says = _probes(serving.model_cost, serving.device, len(serving.replicas))
    took = (percentile(sorted(those), 50) for those in (gaps, firsts, at_once))
    return Speed(*(expected / max(measured, SHORTEST) for expected, measured in zip(says, took, strict=True)))


def _stream(replica: Replica, turn: int) -> list[float]:
    """Seconds between the tokens of a single stream."""
    found = latencies(_send(replica.url, [TraceRow(0.0, *STREAM)], -3, turn).records[0])
    return [] if found is None else list(found.gaps)


def _probes(model: ModelCost, device: DeviceFile, count: int) -> Speed:
    """Seconds that a device needs for what `_speed` measures, with so many replicas."""
    cost, (asked, new) = ReplicaCost(model, device.step, BLOCK, device.server), STREAM
    keys = PROMPT * (PROMPT + 1) // 2  # that the prompt's tokens see
    prompt = StepWork(
        PROMPT, 1, 1, model.weight_bytes(PROMPT), 2 * PROMPT * cost.kv_bytes, model.linear_flops(PROMPT, 1),
        keys * cost.pair_flops, 0.0,
    )  # fmt: skip
    stream = cost.decode_seconds(1, asked + new // 2)
    first = cost.time_of(prompt) + device.server.request + device.server.prompt_token * PROMPT
    host = host_of("any", device)
    host.computing = set(range(count))
    cost.rates = host.rates()
    return Speed(stream, first, cost.decode_seconds(1, asked + new // 2))


def _seconds(replay: _Replay) -> float:
    """From the first request to the last token, as the simulator counts."""
    records = replay.run.records
    return max(record.ended or 0.0 for record in records) - min(record.due for record in records)


def _figures(replays: Sequence[_Replay]) -> dict[str, float]:
    """What runs came to, all together."""
    records = [record for one in replays for record in one.run.records]
    found = [one for one in map(latencies, records) if one is not None]
    first, gaps = sorted(one.ttft for one in found), sorted(gap for one in found for gap in one.gaps)
    return {
        "throughput": sum(record.answer.num_tokens for record in records) / sum(map(_seconds, replays)),
        "ttft_p50": percentile(first, 50),
        "ttft_p90": percentile(first, 90),
        "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99),
        "hit_rate": sum(one.hits for one in replays) / max(1.0, sum(one.looked_for for one in replays)),
    }


def _rate(ends: Sequence[float]) -> float:
    """Requests a second that end in the middle of a run, without its start and its tail."""
    low, high = len(ends) // 5, len(ends) * 4 // 5
    return (high - low) / max(1e-9, ends[high] - ends[low]) if high > low else len(ends) / max(1e-9, ends[-1])


def _hits(replicas: Sequence[Replica]) -> tuple[float, float]:
    """Tokens of prompts that were looked for in the replicas' caches, and those that were found."""
    looked_for, found = (
        sum(one.metric(f"prefix_cache_{name}_total") for one in replicas) for name in ("queries", "hits")
    )
    return looked_for, found


def _compared(
    serving: _Serving, name: str, load: float, rows: Sequence[TraceRow], replays: Sequence[_Replay]
) -> Compared:
    count, real, each = len(serving.replicas), _figures(replays), [_figures([one]) for one in replays]
    outcomes = [
        simulated(count, rows, at_speed(serving.device, serving.model_cost, count, _mean(one.speeds)), serving.model)
        for one in replays
    ]
    seconds = sum(one.seconds for one in outcomes)
    together = Outcome()
    for one in outcomes:
        together.add(one)
    predicted = {
        "throughput": together.counts["new_tokens"] / seconds,
        **{figure: together.figure(figure) for figure in FIGURES[1:-1]},
        "hit_rate": together.hit_rate,
    }
    spread = {
        figure: (max(one[figure] for one in each) - min(one[figure] for one in each)) / 2 / value if value else 0.0
        for figure, value in real.items()
    }
    share = sum(one.run.cpu_seconds for one in replays) / max(1e-9, sum(one.run.seconds for one in replays))
    speeds = [speed for one in replays for speed in one.speeds]
    return Compared(count, name, load, len(rows) * len(replays), real, predicted, spread, speeds, share)


def _mean(speeds: Sequence[Speed]) -> Speed:
    return Speed(*map(fmean, zip(*speeds, strict=True)))


def at_speed(device: DeviceFile, model: ModelCost, count: int, speed: Speed) -> DeviceFile:
    """The device, if so many replicas read and compute on it as fast as that."""
    wanted = [says / share for says, share in zip(_probes(model, device, count), speed, strict=True)]
    scales = [1.0, 1.0, 1.0]  # of what reading and computing take, and of reading besides where all do at once
    found = device
    for _ in range(40):
        took = _probes(model, found, count)
        ratios = [scale * a / b for scale, a, b in zip(scales, wanted, took, strict=True)]
        scales = [_within(ratios[0], *SCALES), _within(ratios[1], *SCALES), _within(ratios[2], 1.0, CROWDED)]
        read = {name: getattr(device.step, name) * scales[0] for name in ("weight_byte", "cache_byte")}
        rest = ("step", "sequence", "token", "drawn", "linear_flop", "attention_flop")
        step = replace(device.step, **read, **{name: getattr(device.step, name) * scales[1] for name in rest})
        found = replace(device, step=step, host_bytes_per_second=count * device.bytes_per_second / scales[2])
    return found


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def within_goals(found: Sequence[Compared], figure: str) -> tuple[int, int, float, float]:
    """How many loads of those that have a goal meet it, of how many; their median error and the largest, unsigned."""
    errors = sorted(abs(one.error(figure)) for one in found if one.load <= MOST_LOAD)
    if not errors:
        return 0, 0, 0.0, 0.0
    return sum(error <= GOALS[figure] for error in errors), len(errors), percentile(errors, 50), errors[-1]


def simulated(count: int, rows: Sequence[TraceRow], device: DeviceFile, model: str | None) -> Outcome:
    """What the simulator says of so many replicas on this machine and these requests."""
    with TemporaryDirectory() as directory:
        write_device(Path(directory, "device.json"), device)
        write_trace(Path(directory, "trace.csv"), rows)
        kind = {"kind": "replica", "device": "device.json", "count": count, "per_host": count, "blocks": BLOCKS,
                "options": {"max_num_seqs": SEATS, "block_size": BLOCK}}  # fmt: skip
        fleet_of = {
            "replicas": [kind],
            "load": {"arrivals": "trace", "trace": "trace.csv"},
            "gateways": {"count": 0 if count == 1 else 1, "seconds": device.server.gateway},
            "network": {"to_gateway": 0.0, "to_replica": 0.0},
            "model": "" if model is None else str(Path(model).resolve()),
        }
        return FleetSimulation(make_spec(fleet_of, Path(directory))).run()
