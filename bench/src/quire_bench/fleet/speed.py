"""How fast a machine serves right now, by a stream, prompts, and streams at all replicas at once.

A machine that is shared with others reads and computes at rates that drift apart within minutes, and what two replicas
take from each other drifts, too.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

from quire.engine.cost import ModelCost
from quire.engine.plan import Plan, PlanItem
from quire.engine.trace import TraceRow
from quire.errors import QuireError
from quire.request import Request, SamplingParams
from quire.simulate.device import DeviceFile, ReplicaCost, StepFit
from quire.simulate.replica import host_of
from quire_bench.fleet.replaying import sent
from quire_bench.fleet.running import Replica
from quire_bench.server.report import Latencies, latencies

STREAM = (32, 64)  # tokens of a stream's prompt and of its answer
PROMPT, PROMPTS = 512, 6  # tokens of a prompt, and how many there are at each replica
SCALES = (0.5, 2.0)  # of what reading and computing take, at most
LEAST_READING = 0.2  # of a stream's step: if reading is less of it, a stream does not show how fast the machine reads
SHORTEST = 1e-6  # seconds: tokens that a busy client reads together have none between them
TURNS = 40  # in which scales are found, each with the others


class Probes(NamedTuple):
    """Seconds, as they were measured or as a device file says; or by how many times the former are shorter."""

    stream: float  # between two tokens of a stream at one replica: shows how fast the machine reads
    prompt: float  # to the first token of a prompt at one replica: how fast it computes
    streams: float  # between two tokens where each replica has a stream


def probed(replicas: Sequence[Replica]) -> Probes:
    """Ask the replicas, one after the other, then all at once. Medians. Raises QuireError where a request fails."""
    gaps = [gap for one in replicas for gap in _stream(one)]
    firsts = [_asked(one, PROMPT, 1).ttft for one in replicas for _ in range(PROMPTS)]
    with ThreadPoolExecutor(len(replicas)) as pool:
        at_once = [gap for those in pool.map(_stream, replicas) for gap in those]
    return Probes(*(max(SHORTEST, median(those)) for those in (gaps, firsts, at_once)))


def _stream(replica: Replica) -> Sequence[float]:
    return _asked(replica, *STREAM).gaps


def _asked(replica: Replica, prompt: int, new: int) -> Latencies:
    """One request, whose tokens no other one has, or it would be found in the cache."""
    found = latencies(sent(replica.url, [TraceRow(0.0, prompt, new)], -3, random.randrange(2**30)).records[0])
    if found is None:
        raise QuireError(f"{replica.url} sent no token")
    return found


def expected(model: ModelCost, device: DeviceFile, count: int) -> Probes:
    """What so many replicas take by the file: they have nothing else to do."""
    server, (asked, new) = device.server, STREAM
    cost = ReplicaCost(model, device.step, device.block_size, server)
    request = Request("probe", array("i", bytes(4 * PROMPT)), PROMPT, SamplingParams())
    token = Plan([PlanItem(request, asked + new // 2, 1)], num_tokens=1)
    prompt = Plan([PlanItem(request, 0, PROMPT)], num_tokens=PROMPT)
    host = host_of("any", device)
    host.computing = set(range(count))
    stream = cost.seconds(token, 1)
    first = cost.seconds(prompt, 1) + server.request + server.prompt_token * PROMPT
    cost.rates = host.rates()
    return Probes(stream, first, cost.seconds(token, 1))


def at_speed(device: DeviceFile, model: ModelCost, count: int, took: Probes) -> DeviceFile:
    """The device, if it reads and computes as fast as so many replicas of it were measured to."""
    shows_reading = _reading_share(device, model) >= LEAST_READING
    reading = computing = crowding = 1.0  # so many times as long do they take, and reading besides where all compute
    found = device
    for _ in range(TURNS):
        says = expected(model, found, count)
        computing = _within(computing * took.prompt / says.prompt, *SCALES)
        reading = _within(reading * took.stream / says.stream, *SCALES) if shows_reading else computing
        crowding = _within(crowding * took.streams / says.streams, 1.0, count) if shows_reading else 1.0
        found = replace(
            device,
            step=_scaled(device.step, reading, computing),
            host_bytes_per_second=count * device.bytes_per_second / crowding,
        )
    return found


def _reading_share(device: DeviceFile, model: ModelCost) -> float:
    """Of a stream's step."""
    step = replace(device.step, weight_byte=0.0, cache_byte=0.0)
    return 1 - expected(model, replace(device, step=step), 1).stream / expected(model, device, 1).stream


def _scaled(step: StepFit, reading: float, computing: float) -> StepFit:
    read = {name: getattr(step, name) * reading for name in ("weight_byte", "cache_byte")}
    rest = ("step", "sequence", "token", "drawn", "linear_flop", "attention_flop")
    return replace(step, **read, **{name: getattr(step, name) * computing for name in rest})


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def mean(those: Sequence[Probes]) -> Probes:
    """Of each of the three."""
    return Probes(*map(fmean, zip(*those, strict=True)))
