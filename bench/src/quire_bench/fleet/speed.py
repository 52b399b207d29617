"""The current speed of a machine, by a stream, prompts, many streams, and streams at all replicas at once.

A machine that is shared with others reads and computes at rates that drift apart within minutes, and what two replicas
take from each other drifts, too. Processes with the same model differ as well: by where their weights and caches lie.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import NamedTuple

from quire.engine.cost import ModelCost
from quire.engine.trace import TraceRow
from quire.errors import QuireError
from quire.simulate.device import DeviceFile, ReplicaCost, StepFit
from quire.simulate.replica import host_of
from quire_bench.fleet.replaying import sent
from quire_bench.fleet.running import Replica
from quire_bench.fleet.steps_seen import step_seconds
from quire_bench.server.report import Latencies, latencies

STREAM = (32, 64)  # tokens of a stream's prompt and of its answer
PROMPT, PROMPTS = 512, 6  # tokens of a prompt, and how many there are at each replica
STREAMS, LONG_STREAM = 16, (128, 32)  # that decode together at a replica, and tokens of each one's prompt and answer
SCALES = (0.5, 2.0)  # of what reading and computing take, at most
LEAST_SHARE = 0.2  # of a step, which a part of it must be for the step to show how fast that is
SHORTEST = 1e-6  # seconds: tokens that a busy client reads together have none between them
TURNS = 40  # in which scales are found, each with the others
OF_PROMPTS = ("step", "token", "linear_flop", "attention_flop", "context_flop")  # parts of a step that prompts show
OF_READING = ("weight_byte", "cache_byte")  # those that a stream shows
OF_SEQUENCES = ("sequence", "drawn")  # those that many streams show


class Probes(NamedTuple):
    """Seconds, as they were measured or as a device file says; or by how many times the former are shorter."""

    stream: float  # between two tokens of a stream at one replica: shows how fast weights and caches are read
    prompt: float  # to the first token of a prompt at one replica: how fast it computes
    many: float  # between two tokens of STREAMS streams at one replica: what sequences take besides
    streams: float  # between two tokens where each replica has a stream


def probed(replicas: Sequence[Replica]) -> Probes:
    """Ask the replicas, one after the other, then all at once. Medians. Raises QuireError where a request fails.

    Each of them must have STREAMS seats.
    """
    gaps = [gap for one in replicas for gap in _stream(one)]
    firsts = [found.ttft for one in replicas for _ in range(PROMPTS) for found in _asked(one, 1, PROMPT, 1)]
    many = [gap for one in replicas for gap in _streams(one)]
    with ThreadPoolExecutor(len(replicas)) as pool:
        at_once = [gap for those in pool.map(_stream, replicas) for gap in those]
    return Probes(*(max(SHORTEST, median(those)) for those in (gaps, firsts, many, at_once)))


def _stream(replica: Replica) -> Sequence[float]:
    [found] = _asked(replica, 1, *STREAM)
    return found.gaps


def _streams(replica: Replica) -> list[float]:
    """Seconds between tokens of many streams, from when the last of them has begun until the first ends.

    Of a model so fast that the first ends before: between all tokens.
    """
    found = _asked(replica, STREAMS, *LONG_STREAM)
    each = [list(accumulate(one.gaps, initial=one.sent + one.ttft)) for one in found]
    begin, end = max(moments[0] for moments in each), min(moments[-1] for moments in each)
    gaps = [pair for moments in each for pair in pairwise(moments)]
    together = [(before, after) for before, after in gaps if begin <= before and after <= end]
    return [after - before for before, after in together or gaps]


def _asked(replica: Replica, count: int, prompt: int, new: int) -> list[Latencies]:
    """So many requests at once, whose tokens no other ones have, or they would be found in the cache."""
    run = sent(replica.url, [TraceRow(0.0, prompt, new)] * count, -3, random.randrange(2**30))
    found = [one for one in map(latencies, run.records) if one is not None]
    if len(found) < count:
        raise QuireError(f"{replica.url} sent no token")
    return found


def cost_at(device: DeviceFile, model: ModelCost, computing: int) -> ReplicaCost:
    """Return the cost of a replica, while `computing` replicas of its machine compute."""
    cost, host = ReplicaCost(model, device.step, device.block_size, device.server), host_of("any", device)
    host.computing = set(range(computing))
    cost.rates = host.rates()
    return cost


def expected(model: ModelCost, device: DeviceFile, count: int) -> Probes:
    """Return the times of `count` replicas by the file: they have nothing else to do.

    What event loops take from streams at all replicas counts as reading: these come without a gateway.
    """
    server, (asked, new), (long, more) = device.server, STREAM, LONG_STREAM
    device = replace(device, server=replace(server, loaded=0.0, host_step=0.0, host_token=0.0))
    alone, together = cost_at(device, model, 1), cost_at(device, model, count)
    return Probes(
        stream=step_seconds(alone, [asked + new // 2]),
        prompt=step_seconds(alone, [], [PROMPT]) + server.request + server.prompt_token * PROMPT,
        many=step_seconds(alone, [long + more // 2] * STREAMS),
        streams=step_seconds(together, [asked + new // 2]),
    )


def at_speed(device: DeviceFile, model: ModelCost, count: int, took: Probes) -> DeviceFile:
    """The device, if it reads and computes as fast as so many replicas of it were measured to."""
    shows_reading = _share(device, model, OF_READING).stream >= LEAST_SHARE
    shows_sequences = _share(device, model, OF_SEQUENCES).many >= LEAST_SHARE
    reading = computing = sequences = crowding = 1.0  # so many times as long; the last one where all compute, besides
    found = device
    for _ in range(TURNS):
        says = expected(model, found, count)
        computing = _within(computing * took.prompt / says.prompt, *SCALES)
        reading = _within(reading * took.stream / says.stream, *SCALES) if shows_reading else computing
        sequences = _within(sequences * took.many / says.many, *SCALES) if shows_sequences else reading
        crowding = _within(crowding * took.streams / says.streams, 1.0, count) if shows_reading else 1.0
        scaled = _scaled(_scaled(device.step, computing, OF_PROMPTS), sequences, OF_SEQUENCES)
        found = replace(
            device,
            step=_scaled(scaled, reading, OF_READING),
            server=replace(device.server, drawn=device.server.drawn * sequences),
            host_bytes_per_second=count * device.bytes_per_second / crowding,
        )
    return found


def server_token(device: DeviceFile, model: ModelCost, took: Probes) -> float:
    """Seconds that a server adds to a step for each token that it draws: what many streams take longer than the fit.

    device: of a server that adds none.
    """
    found = at_speed(device, model, 1, took)
    as_fitted = replace(found, step=replace(found.step, **{name: getattr(device.step, name) for name in OF_SEQUENCES}))
    return max(0.0, (took.many - expected(model, as_fitted, 1).many) / STREAMS)


def _share(device: DeviceFile, model: ModelCost, names: Sequence[str]) -> Probes:
    """Return the share of some parts of a step in the time of each probe."""
    without = expected(model, replace(device, step=_scaled(device.step, 0.0, names)), 1)
    return Probes(*(1 - less / whole for less, whole in zip(without, expected(model, device, 1), strict=True)))


def _scaled(step: StepFit, factor: float, names: Sequence[str]) -> StepFit:
    return replace(step, **{name: getattr(step, name) * factor for name in names})


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def mean(those: Sequence[Probes]) -> Probes:
    """Return the mean of each probe."""
    return Probes(*map(fmean, zip(*those, strict=True)))
