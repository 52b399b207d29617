"""How fast a machine serves right now, by a stream, prompts, many streams, and streams at all replicas at once.

A machine that is shared with others reads and computes at rates that drift apart within minutes, and what two replicas
take from each other drifts, too. Processes with the same model differ as well: by where their weights and caches lie.
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
MANY, EACH = 16, (128, 24)  # streams that decode together at a replica, and tokens of each one's prompt and answer
LAST = 16  # gaps of these, in which all of them decode
SCALES = (0.5, 2.0)  # of what reading and computing take, at most
LEAST_READING = 0.2  # of a stream's step: if reading is less of it, a stream does not show how fast the machine reads
SHORTEST = 1e-6  # seconds: tokens that a busy client reads together have none between them
TURNS = 40  # in which scales are found, each with the others
COMPUTING = ("step", "token", "linear_flop", "attention_flop")  # parts of a step that prompts show
SEQUENCES = ("sequence", "drawn", "cache_byte")  # those that many streams show


class Probes(NamedTuple):
    """Seconds, as they were measured or as a device file says; or by how many times the former are shorter."""

    stream: float  # between two tokens of a stream at one replica: shows how fast weights are read
    prompt: float  # to the first token of a prompt at one replica: how fast it computes
    many: float  # between two tokens of MANY streams at one replica: what each sequence takes besides
    streams: float  # between two tokens where each replica has a stream


def probed(replicas: Sequence[Replica]) -> Probes:
    """Ask the replicas, one after the other, then all at once. Medians. Raises QuireError where a request fails.

    Each of them must have MANY seats.
    """
    gaps = [gap for one in replicas for gap in _stream(one)]
    firsts = [found.ttft for one in replicas for _ in range(PROMPTS) for found in _asked(one, 1, PROMPT, 1)]
    many = [gap for one in replicas for found in _asked(one, MANY, *EACH) for gap in found.gaps[-LAST:]]
    with ThreadPoolExecutor(len(replicas)) as pool:
        at_once = [gap for those in pool.map(_stream, replicas) for gap in those]
    return Probes(*(max(SHORTEST, median(those)) for those in (gaps, firsts, many, at_once)))


def _stream(replica: Replica) -> Sequence[float]:
    [found] = _asked(replica, 1, *STREAM)
    return found.gaps


def _asked(replica: Replica, count: int, prompt: int, new: int) -> list[Latencies]:
    """So many requests at once, whose tokens no other ones have, or they would be found in the cache."""
    run = sent(replica.url, [TraceRow(0.0, prompt, new)] * count, -3, random.randrange(2**30))
    found = [one for one in map(latencies, run.records) if one is not None]
    if len(found) < count:
        raise QuireError(f"{replica.url} sent no token")
    return found


def expected(model: ModelCost, device: DeviceFile, count: int) -> Probes:
    """What so many replicas take by the file: they have nothing else to do."""
    server, (asked, new), (each, more) = device.server, STREAM, EACH
    cost = ReplicaCost(model, device.step, device.block_size, server)
    request = Request("probe", array("i", bytes(4 * PROMPT)), PROMPT, SamplingParams())
    token = Plan([PlanItem(request, asked + new // 2, 1)], num_tokens=1)
    prompt = Plan([PlanItem(request, 0, PROMPT)], num_tokens=PROMPT)
    tokens = Plan([PlanItem(request, each + more - LAST // 2, 1)] * MANY, num_tokens=MANY)
    host = host_of("any", device)
    host.computing = set(range(count))
    stream = cost.seconds(token, 1)
    first = cost.seconds(prompt, 1) + server.request + server.prompt_token * PROMPT
    many = cost.seconds(tokens, MANY)
    cost.rates = host.rates()
    return Probes(stream, first, many, cost.seconds(token, 1))


def at_speed(device: DeviceFile, model: ModelCost, count: int, took: Probes) -> DeviceFile:
    """The device, if it reads and computes as fast as so many replicas of it were measured to."""
    shows_reading = _reading_share(device, model) >= LEAST_READING
    reading = computing = each = crowding = 1.0  # so many times as long; the last one where all compute, besides
    found = device
    for _ in range(TURNS):
        says = expected(model, found, count)
        computing = _within(computing * took.prompt / says.prompt, *SCALES)
        reading = _within(reading * took.stream / says.stream, *SCALES) if shows_reading else computing
        each = _within(each * took.many / says.many, *SCALES)
        crowding = _within(crowding * took.streams / says.streams, 1.0, count) if shows_reading else 1.0
        scaled = _scaled(_scaled(device.step, computing, COMPUTING), each, SEQUENCES)
        found = replace(
            device,
            step=replace(scaled, weight_byte=device.step.weight_byte * reading),
            server=replace(device.server, drawn=device.server.drawn * each),
            host_bytes_per_second=count * device.bytes_per_second / crowding,
        )
    return found


def a_token(device: DeviceFile, model: ModelCost, took: Probes) -> float:
    """Seconds that a server adds to a step for each token that it draws: what many streams take longer by."""
    quiet = replace(device, server=replace(device.server, drawn=0.0))
    found = at_speed(quiet, model, 1, took)
    parts = {name: getattr(device.step, name) for name in SEQUENCES}
    as_fitted = replace(found, step=replace(found.step, **parts))
    return max(0.0, (expected(model, found, 1).many - expected(model, as_fitted, 1).many) / MANY)


def _reading_share(device: DeviceFile, model: ModelCost) -> float:
    """Of a stream's step."""
    step = replace(device.step, weight_byte=0.0, cache_byte=0.0)
    return 1 - expected(model, replace(device, step=step), 1).stream / expected(model, device, 1).stream


def _scaled(step: StepFit, factor: float, names: Sequence[str]) -> StepFit:
    return replace(step, **{name: getattr(step, name) * factor for name in names})


def _within(value: float, least: float, most: float) -> float:
    return min(max(value, least), most)


def mean(those: Sequence[Probes]) -> Probes:
    """Of each of them."""
    return Probes(*map(fmean, zip(*those, strict=True)))
