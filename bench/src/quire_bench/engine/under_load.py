"""The time that servers add to steps while requests come and go, and that replicas cost one another.

Under load steps wait for event loops, which read requests and write tokens, and for clients and gateways, which have
cores as well. That is less than what processes with the same model differ by: their memory lies elsewhere. So it is
found from the steps of servers next to what probes of the same servers say of them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire.engine.cost import ModelCost, cost_of
from quire.engine.trace import TraceRow
from quire.frontend.llm import LLM
from quire.simulate.device import DeviceFile
from quire.simulate.fitting import nonnegative_least_squares
from quire.simulate.loads import drawn
from quire.simulate.spec import Lengths
from quire_bench.engine.step_kinds import cost_block
from quire_bench.fleet.giving import GivenBlocks
from quire_bench.fleet.replaying import BLOCK, OPTIONS, Serving, Sizes, alone, behind_gateway, sent, simulated
from quire_bench.fleet.speed import SHORTEST, Probes, at_speed, cost_at, mean, probed, server_token
from quire_bench.fleet.steps_seen import step_seconds, steps_seen
from quire_bench.server.client import Record, Run, Server, completed
from quire_bench.server.prompts import random_prompts, request_body
from quire_bench.server.report import latencies

FIRST_GAPS = 4  # of a stream, in which prompts of others are computed
LOADED = 64  # requests for each replica, to find how long steps take where others come and end
TOGETHER = 0.2  # of a stream's step, within which a client has all tokens of a step
OTHERS = 0.02  # of the steps, those that are farthest from what is found of all of them: they are of other programs
LEAST_SEEN = 16  # steps of which it is found what they take longer, and of these, those that compute a prompt
HURRY = 0.8  # of the time that they take all at once, in which they come
FEWEST = 8  # of these, where LOADED would take longer than
LONGEST_LOAD = 20.0  # seconds
# Times that they are sent to one replica, and to each of two others, whose memory lies elsewhere.
AGAIN_ALONE, AGAIN_APART = 1, 2
AGAIN_GATEWAY = 3  # times that a gateway is measured
LOADED_PROMPT = Lengths(median=128, spread=0.7, least=16, most=448)
LOADED_ANSWER = Lengths(median=32, spread=0.7, least=4, most=96)
BUSY_STREAMS, BUSY_TOKENS, BUSY_TIMES = 4, 160, 32  # at each replica that is busy, and short prompts meanwhile
SHORT = 8  # tokens of these
AGAIN_READ = 12  # times that one replica reads another one's blocks
LOOPS_STREAMS, LOOPS_TOKENS = (4, 16), 96  # at each replica, to find what event loops take for a step and a token
STEPS_TO_FIRST = 1.5  # that a short prompt takes: half of the one under way, and its own
LONGEST = 640  # tokens that a model must be able to have in a sequence for that
TURNS, SETTLED = 20, 1e-3  # in which what neighbours cost is found, and the share by which it may be wrong


class _Work(NamedTuple):
    """The tokens requested and computed, and the work of event loops, gateway and client for them."""

    requests: int
    steps: int  # of all replicas
    tokens: int  # of answers
    seconds: float  # of CPU time


class _Loaded(NamedTuple):
    """Requests that were sent to one replica or, at the same time, to several."""

    probes: Probes  # around them
    records: Sequence[Sequence[Record]]  # of each replica
    work: _Work


class _Load(NamedTuple):
    """Requests for one replica."""

    sizes: Sizes
    rows: Sequence[TraceRow]
    model: ModelCost

    def under_load(self, device: DeviceFile, runs: Sequence[_Loaded]) -> DeviceFile:
        """The device, with what a server adds to a step: for each token, row of a prompt and request that comes.

        What only a load shows is 0 where the client knows all of fewer than LEAST_SEEN steps with prompts.
        """
        token = statistics.median(server_token(device, self.model, run.probes) for run in runs)
        # What is added to a step was timed with a stream, which has a token in each.
        server = replace(device.server, drawn=token, step=max(0.0, device.server.step - token))
        found: list[tuple[float, ...]] = []
        device = replace(device, server=server)
        for run in runs:
            cost = cost_at(at_speed(device, self.model, 1, run.probes), self.model, 1)
            for step in steps_seen(run.records[0], TOGETHER * run.probes.stream):
                says = step_seconds(cost, step.keys, step.prompts)
                prompts, rows = len(step.prompts), sum(step.prompts)
                counts = len(step.keys) + prompts, rows, step.came, prompts
                found.append((step.seconds / says - 1, *(count / says for count in counts)))
        seen = sum(one[-1] > 0 for one in found)  # with a prompt
        device = replace(device, machine={**device.machine, "prompts_seen": seen})
        if seen < LEAST_SEEN:
            return device
        loaded, mixed_row, came, begun = _without_others(np.array(found))
        return replace(device, server=replace(server, loaded=loaded, mixed_row=mixed_row, arrival=came + begun))

    def next_to_another(self, device: DeviceFile, run: _Loaded, works: Sequence[_Work]) -> DeviceFile:
        """The device, with what replicas that compute cost one another.

        run: was sent to two. Where these have all cores, they wait while event loops, gateway and client compute. What
        steps take longer than that is `per_neighbour`. The larger it is, the less of what streams at both took is for
        reading, so it is found in turns. It is 0 where the client knows all of fewer than LEAST_SEEN steps.
        """
        count, is_full = len(run.records), 0 < device.per_machine <= len(run.records)
        seen = [step for records in run.records for step in steps_seen(records, TOGETHER * run.probes.stream)]
        took = sum(step.seconds for step in seen)
        waited = len(seen) * run.work.seconds / max(1, run.work.steps) if is_full else 0.0
        for _ in range(TURNS if len(seen) >= LEAST_SEEN else 0):
            before = device.per_neighbour
            cost = cost_at(at_speed(device, self.model, count, run.probes), self.model, count)
            says = sum(step_seconds(cost, step.keys, step.prompts) for step in seen)
            device = replace(device, per_neighbour=max(0.0, took / (says / (1 + before) + waited) - 1))
            if abs(device.per_neighbour - before) < SETTLED:
                break
        request, step, token = _other_work(works)
        server = replace(device.server, host_request=request, host_step=step, host_token=token)
        together = at_speed(device, self.model, count, run.probes)
        return replace(device, server=server, host_bytes_per_second=together.host_bytes_per_second)


def _without_others(found: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the share of each other column in the first: least squares, without the rows that fit least."""
    parts = nonnegative_least_squares(found[:, 1:], found[:, 0])
    off = np.abs(found[:, 0] - found[:, 1:] @ parts)
    kept = found[off <= np.quantile(off, 1 - OTHERS)]
    return tuple(map(float, nonnegative_least_squares(kept[:, 1:], kept[:, 0])))


def _load(device: DeviceFile, llm: LLM) -> _Load:
    """LOADED requests, or as many of them as take no longer than LONGEST_LOAD."""
    rng, count = random.Random(1), LOADED
    rows = [TraceRow(0.0, drawn(rng, LOADED_PROMPT), drawn(rng, LOADED_ANSWER)) for _ in range(LOADED)]
    path = str(llm.files.path.absolute())
    while (seconds := simulated(1, 0, _sizes(llm, rows), rows, device, path).seconds) > LONGEST_LOAD and count > FEWEST:
        count //= 2
        rows = rows[:count]
    between = HURRY * seconds / count
    rows = [replace(row, arrival=between * number) for number, row in enumerate(rows)]
    return _Load(_sizes(llm, rows), rows, cost_of(llm.decoder))


def _sizes(llm: LLM, rows: Sequence[TraceRow]) -> Sizes:
    """Room for two of each at one replica, or as much as the engine has; and seats for the streams of probes."""
    blocks = 2 * sum(-(-(row.prompt_tokens + row.new_tokens) // BLOCK) for row in rows)
    most = llm.engine.scheduler.manager.num_blocks * cost_block(llm) // BLOCK
    return Sizes(blocks=min(Sizes.blocks, blocks, most))


def measured_under_load(device: DeviceFile, options: Sequence[str], llm: LLM) -> DeviceFile:
    """The device, with how much longer steps take where requests come, and where another replica computes."""
    load, threads = _load(device, llm), torch.get_num_threads()
    with alone(threads, load.sizes, options) as running:
        runs = [_loaded(load, [running], turn) for turn in range(AGAIN_ALONE)]
    with behind_gateway(2, threads, load.sizes, options) as running:
        each = [Serving(replica.url, [replica]) for replica in running.replicas]
        turns = range(AGAIN_ALONE, AGAIN_ALONE + AGAIN_APART)
        runs += [_loaded(load, [one], turn) for one in each for turn in turns]
        together = _loaded(load, each, turns.stop)
        target, rows = Server(running.url), [row for row in load.rows for _ in each]
        works = [_work(running, lambda: [sent(running.url, rows, 0, turns.stop + len(each))])[1]]
        works += [_work(running, partial(_streams, target, len(each) * count))[1] for count in LOOPS_STREAMS]
        gateway = statistics.median(_gateway(running) for _ in range(AGAIN_GATEWAY))
        peer_byte = _peer_byte(running, llm)
    device = load.next_to_another(load.under_load(device, runs), together, works)
    return replace(device, server=replace(device.server, gateway=max(0.0, gateway), peer_byte=peer_byte))


def _loaded(load: _Load, each: Sequence[Serving], turn: int) -> _Loaded:
    """The load, sent to each of these at the same time, and how fast they are before and after it."""
    replicas = [one for serving in each for one in serving.replicas]
    before = probed(replicas)
    sends = [partial(sent, one.url, load.rows, 0, turn + i) for i, one in enumerate(each)]
    with ThreadPoolExecutor(len(each)) as pool:
        runs, work = _work(Serving("", replicas), lambda: list(pool.map(lambda send: send(), sends)))
    return _Loaded(mean([before, probed(replicas)]), [run.records for run in runs], work)


def _work(running: Serving, send: Callable[[], Sequence[Run]]) -> tuple[Sequence[Run], _Work]:
    """Runs of requests, which go on at the same time, and what else was done for them than steps."""
    steps, before = _num_steps(running), running.loop_seconds()
    runs = send()
    seconds = running.loop_seconds() - before + statistics.fmean(run.cpu_seconds for run in runs)
    answers = [record.answer for run in runs for record in run.records]
    return runs, _Work(len(answers), _num_steps(running) - steps, sum(one.num_tokens for one in answers), seconds)


def _streams(server: Server, count: int) -> Sequence[Run]:
    return [asked(server, count, 32, LOOPS_TOKENS, count)]


def _num_steps(running: Serving) -> int:
    return round(sum(one.metric("iteration_tokens_total_count") for one in running.replicas))


def _other_work(works: Sequence[_Work]) -> tuple[float, float, float]:
    """Seconds of CPU time that all but steps take: for a request, a step and a token. Of relative errors."""
    took = np.array([max(SHORTEST, work.seconds) for work in works])
    parts = np.array([work[:3] for work in works], float) / took[:, None]
    request, step, token = map(float, nonnegative_least_squares(parts, np.ones(len(works))))
    return request, step, token


def _gateway(running: Serving) -> float:
    """Seconds that a gateway adds to a request.

    It has cores of the same machine, on which replicas compute. So it is measured while both do, against a replica
    that computes alone. What their steps take longer is not the gateway's.
    """
    through, longer = _while_busy(Server(running.url), len(running.replicas) * BUSY_STREAMS)
    direct, gap = _while_busy(Server(running.replicas[0].url), BUSY_STREAMS)
    return through - direct - STEPS_TO_FIRST * (longer - gap)


def _while_busy(server: Server, streams: int) -> tuple[float, float]:
    """Mean seconds to the first token of short prompts next to streams, and between the tokens of these."""
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(asked, server, streams, 64, BUSY_TOKENS, streams)
        firsts = [ttft(server, SHORT) for _ in range(BUSY_TIMES)][FIRST_GAPS:]
        run = sending.result()
    gaps = [gap for found in map(latencies, run.records) if found is not None for gap in found.gaps]
    return statistics.fmean(firsts), mean_gap(gaps)


def _peer_byte(running: Serving, llm: LLM) -> float:
    """Seconds that a byte of a replica's blocks takes to another one while both compute; 0: they send none."""
    streams, (one, *_) = len(running.replicas) * BUSY_STREAMS, running.replicas
    blocks = GivenBlocks(one, running.secret, llm)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(asked, Server(running.url), streams, 64, BUSY_TOKENS, streams)
        took = [seconds for _ in range(FIRST_GAPS + AGAIN_READ) if (seconds := blocks.read())][FIRST_GAPS:]
        sending.result()
    return statistics.median(took) if took else 0.0


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
