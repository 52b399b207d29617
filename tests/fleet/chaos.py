"""Rounds in which what serves a fleet dies, hangs or is cut off, and no client may notice.

Three replicas, two gateways and a plain server, which says what is right, all of them processes. In each round a few
clients ask, and the fault strikes when what passes between gateways and replicas has come to a chosen phase.
`python -m tests.fleet.chaos 1000` does it for long.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from tests.fleet.asks import Answer, Ask, draw_ask, receive, receive_plain, verdict
from tests.fleet.gates import Connection, Gate
from tests.forks import QUIRE, Process, Spawner

SECRET = "of the fleet"
NUM_REPLICAS, NUM_GATEWAYS = 3, 2
MODEL = ("--num-blocks", "512", "--port", "0")
# Small steps, and few at a time: so that prompts take several, and requests wait.
REPLICA = (*MODEL, "--fleet-secret", SECRET, "--max-num-seqs", "8", "--max-num-batched-tokens", "64")
PHASES = ("admission", "queued", "prefill", "decode", "decode", "decode", "end", "end")
FAULTS = ("kill", "kill", "kill", "two kills", "two kills", "hang", "partition", "gateway", "gateway", "drain", "end")
ENDING = re.compile(rb'\["(?:stop|length)",')  # in a frame: the end of a sample
NAME = re.compile(rb'"name":"([a-z]+-[0-9a-f]{32})')
ROUND_LIMIT = 60.0  # s after which a client counts as forgotten
END_LIMIT = 20.0  # s from SIGTERM to the end of a process
PREFILL = 0.004  # s after a call was taken
SILENCE = 0.9  # s after which a gateway counts a replica as hung here; rounds would wait for the usual ones
SHORT, LONG = 0.4, 1.6  # s of a hang or a partition: the gateway notices the long one only
GATEWAY = f"from quire.fleet import link; link.SILENCE = {SILENCE}; {QUIRE}"
COUNTERS = ("resumed", "resume_mismatch", "late_frames", "contradictions", "left_out")
MAY_NOT_BE = ("resume_mismatch", "contradictions", "left_out")


class Aim:
    """Strikes when what passes through the gates has come to a phase."""

    def __init__(self, rng: random.Random, shots: int, strike: Callable[[Gate], None]) -> None:
        self.hits: list[str] = []
        self._rng = rng
        self._shots = shots
        self._strike = strike
        self._struck: set[int] = set()  # replicas
        self._load()

    def _load(self) -> None:
        self.phase = self._rng.choice(PHASES)
        self._left = self._rng.choice((1, 1, 2, 5, 20, 40)) if self.phase == "decode" else self._rng.choice((1, 1, 2))
        self._is_lost = self._rng.random() < 0.5  # what shows the phase does not reach the gateway

    def see(self, gate: Gate, connection: Connection, way: str, data: bytes) -> bool:
        """Whether it may pass."""
        if self._shots == 0 or gate.replica in self._struck:
            return True
        if way == "up" and (b"/fleet/generate" in data or b"/fleet/search" in data):
            connection.is_called = True
            self._at("admission", gate)
        elif way == "down" and connection.is_called:
            connection.is_called = False
            self._at("queued", gate)
            asyncio.get_running_loop().call_later(PREFILL, self._at, "prefill", gate)
        elif connection.is_session and b'"frames":[' in data:
            self._at("decode", gate)
            if ENDING.search(data) and self._at("end", gate):
                return not self._is_lost
        return True

    def _at(self, phase: str, gate: Gate) -> bool:
        if phase != self.phase or self._shots == 0 or gate.replica in self._struck:
            return False
        self._left -= 1
        if self._left > 0:
            return False
        self.hits.append(phase)
        self._shots -= 1
        self._struck.add(gate.replica)
        self._strike(gate)
        self._load()
        return True


@dataclass
class Row:
    """What came of the rounds with one fault."""

    rounds: int = 0
    clients: int = 0
    hits: Counter[str] = field(default_factory=Counter)  # phases
    verdicts: Counter[str] = field(default_factory=Counter)


@dataclass
class Report:
    """What came of all rounds."""

    rows: dict[str, Row] = field(default_factory=dict)  # by fault
    failures: list[str] = field(default_factory=list)  # a description each
    stalls: list[tuple[float, str]] = field(default_factory=list)  # s at a kill, and the round
    ends: list[float] = field(default_factory=list)  # s from SIGTERM to the replica's end
    counters: dict[int, Counter[str]] = field(default_factory=dict)  # by process of a gateway
    kinds: Counter[str] = field(default_factory=Counter)

    def total(self, name: str) -> int:
        return sum(one[name] for one in self.counters.values())

    def __str__(self) -> str:
        return "\n".join([self.table(), *self.failures])

    def table(self) -> str:
        """What came of each fault, what the gateways counted, and how long streams stood still."""
        wrong = ("different", "doubled", "lost", "error")
        lines = [f"{'fault':10s} rounds clients {' '.join(f'{name:>9s}' for name in wrong)}  phases hit"]
        for fault, row in sorted(self.rows.items()):
            counts = " ".join(f"{row.verdicts[name]:9d}" for name in wrong)
            phases = ", ".join(f"{phase} {count}" for phase, count in sorted(row.hits.items()))
            lines.append(f"{fault:10s} {row.rounds:6d} {row.clients:7d} {counts}  {phases}")
        lines.append("gateways:  " + ", ".join(f"{name} {self.total(name)}" for name in COUNTERS))
        lines.append("requests:  " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items())))
        for what, found in (("stall at a kill", [one for one, _ in self.stalls]), ("end after SIGTERM", self.ends)):
            if len(found) > 1:
                cuts = quantiles(found, n=100, method="inclusive")
                lines.append(f"{what}: p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s, of {len(found)}")
        longest = sorted(self.stalls, reverse=True)[:5]
        lines.append("longest stalls: " + ", ".join(f"{seconds:.3f} s in round {where}" for seconds, where in longest))
        return "\n".join(lines)


class Cluster:
    """The processes, and the gates between them."""

    def __init__(self, spawner: Spawner, report: Report) -> None:
        self.replicas: list[Process] = []
        self.gateways: list[Process] = []
        self.aim: Aim | None = None
        self.places: dict[str, int] = {}  # the replica that had the latest call of each request
        self._spawner = spawner
        self._report = report
        self._gates = [[Gate(g, r, self._watch) for r in range(NUM_REPLICAS)] for g in range(NUM_GATEWAYS)]
        self._repairs: dict[int, asyncio.Task[None]] = {}
        self._timers: list[asyncio.TimerHandle] = []
        self._healed = 0.0  # when the last timer is over
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.plain = self._spawner.start("serve", *MODEL)
        self.replicas = [self._spawner.start("serve", *REPLICA) for _ in range(NUM_REPLICAS)]
        for g, gates in enumerate(self._gates):
            for gate in gates:
                await gate.start()
            self.gateways.append(self._start_gateway(g))
        for r in range(NUM_REPLICAS):
            await self._admit(r)
        for process in (self.plain, *self.gateways):
            await process.listening()

    async def stop(self) -> None:
        await asyncio.gather(*self._repairs.values())
        for gate in self.all_gates:
            await gate.stop()
        for process in (self.plain, *self.replicas, *self.gateways):
            process.kill()

    @property
    def all_gates(self) -> list[Gate]:
        return [gate for gates in self._gates for gate in gates]

    def _start_gateway(self, number: int) -> Process:
        urls = ",".join(f"http://127.0.0.1:{gate.port}" for gate in self._gates[number])
        arguments = ("--replicas", urls, "--fleet-secret", SECRET, "--port", "0")
        return self._spawner.start("fleet", *arguments, program=GATEWAY)

    async def _admit(self, number: int) -> None:
        process = await self.replicas[number].listening()
        for gates in self._gates:
            gates[number].target = process.port

    def _watch(self, gate: Gate, connection: Connection, way: str, data: bytes) -> bool:
        if way == "up" and (found := NAME.search(data)) is not None:
            self.places[found[1].decode()] = gate.replica
        return self.aim is None or self.aim.see(gate, connection, way, data)

    # --------------------------------------------------------------------------------------------------- faults

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(seconds, function))
        self._healed = max(self._healed, loop.time() + seconds)

    def hang(self, number: int, seconds: float) -> None:
        process = self.replicas[number]
        process.send(signal.SIGSTOP)
        self.later(seconds, lambda: process.send(signal.SIGCONT))

    def cut_off(self, gates: list[Gate], seconds: float) -> None:
        for gate in gates:
            gate.hold()
            self.later(seconds, gate.release)

    def drain(self, number: int) -> None:
        self._spawn(self._drain(self.replicas[number].url))

    def end(self, number: int) -> None:
        self._spawn(self._end(self.replicas[number]))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end(self, process: Process) -> None:
        start = time.monotonic()
        process.send(signal.SIGTERM)
        if await process.ended(END_LIMIT):
            self._report.ends.append(time.monotonic() - start)
        else:
            self._report.failures.append(f"a replica does not end after SIGTERM: {process.log.read_text()}")
            process.kill()

    async def _drain(self, url: str) -> None:
        headers = {"Authorization": f"Bearer {SECRET}"}
        async with self.http.post(f"{url}/fleet/drain", headers=headers) as answer:
            assert answer.status == 200, await answer.text()

    # --------------------------------------------------------------------------------------------------- repairs

    async def repair(self, struck: list[int], fault: str) -> None:
        """Heal what heals by itself, and start again what was ended; replicas meanwhile."""
        await asyncio.sleep(max(0.0, self._healed - asyncio.get_running_loop().time()))
        for g, process in enumerate(self.gateways):
            if not process.is_alive:
                self.gateways[g] = await self._start_gateway(g).listening()
        for r in struck:
            if fault in ("kill", "two kills", "drain", "end"):
                self._repairs[r] = asyncio.create_task(self._replace(r, fault))

    async def _replace(self, number: int, fault: str) -> None:
        process = self.replicas[number]
        if fault == "drain":
            await self._end(process)
        await process.ended(END_LIMIT + 1)
        self.replicas[number] = self._spawner.start("serve", *REPLICA)
        await self._admit(number)

    async def ready(self, num_replicas: int) -> None:
        """Wait until each gateway has sessions with that many replicas."""
        end = time.monotonic() + 120
        while any(sum(gate.num_sessions > 0 for gate in gates) < num_replicas for gates in self._gates):
            assert time.monotonic() < end, "the gateways do not find the replicas again"
            await asyncio.sleep(0.02)
        for r in [r for r, task in self._repairs.items() if task.done()]:
            await self._repairs.pop(r)

    async def scrape(self) -> None:
        """Note what the gateways count."""
        for process in [one for one in self.gateways if one.is_alive]:
            found = self._report.counters[process.pid] = Counter[str]()
            async with self.http.get(f"{process.url}/metrics") as answer:
                for line in (await answer.text()).split("\n"):
                    for name in COUNTERS:
                        if re.match(rf"quire:fleet_{name}_total\b", line):
                            found[name] += int(float(line.rpartition(" ")[2]))

    async def busy_replicas(self) -> list[str]:
        """Those that still compute something, after a while in which they should have ended."""
        end, found = time.monotonic() + 60, ["?"]
        while found and time.monotonic() < end:
            found = []
            for process in self.replicas:
                async with self.http.get(f"{process.url}/metrics") as answer:
                    found += re.findall(r"quire:num_requests_(?:running|waiting)\S* [1-9].*", await answer.text())
            await asyncio.sleep(0.05)
        return found


class Round:
    """A fault, and clients that must not notice it."""

    def __init__(self, cluster: Cluster, report: Report, seed: str) -> None:
        self._cluster = cluster
        self._report = report
        self._seed = seed
        self._rng = random.Random(seed)
        self._struck: list[int] = []  # replicas
        self._killed: set[int] = set()  # gateways
        self._stalled: list[tuple[float, set[str]]] = []  # when a replica was killed, and whose requests it had
        self.fault = self._rng.choice(FAULTS)
        self._seconds = self._rng.choice((SHORT, LONG, LONG))
        self._is_wide = self._rng.random() < 0.5  # a partition from all gateways

    async def run(self) -> None:
        rng, cluster, report = self._rng, self._cluster, self._report
        asks = [draw_ask(rng, f"{self._seed} {i}") for i in range(rng.choice((1, 1, 2, 3, 4, 6)))]
        shots = 2 if self.fault == "two kills" else 1
        aim = Aim(rng, shots, self._strike)
        delays = [rng.choice((0.0, 0.0, 0.02, 0.1)) for _ in asks]
        await cluster.ready(shots + 1)
        cluster.places.clear()
        cluster.aim = aim
        found = await asyncio.gather(*map(self._client, asks, delays))
        cluster.aim = None
        plain = cluster.plain.url
        rights = [receive_plain(cluster.http, plain, ask, own.name) for ask, own in zip(asks, found, strict=True)]
        expected = await asyncio.gather(*rights)
        row = report.rows.setdefault(self.fault, Row())
        row.rounds += 1
        row.clients += len(asks)
        row.hits.update(aim.hits + ["missed"] * (shots - len(aim.hits)))
        for ask, right, own in zip(asks, expected, found, strict=True):
            report.kinds[ask.kind] += 1
            how = verdict(right, own)
            row.verdicts[how] += 1
            if how:
                said = replace(own, times=[]) if ask.is_stream else own
                right = replace(right, times=[])
                report.failures.append(
                    f"\nround {self._seed}, {self.fault} at {aim.hits}, {ask}: {how}\n  {said}\nbut  {right}"
                )
            elif ask.is_stream:
                self._measure(own)
        await cluster.scrape()
        await cluster.repair(self._struck, self.fault)

    def _strike(self, gate: Gate) -> None:
        cluster, r = self._cluster, gate.replica
        if self.fault == "gateway":
            self._killed.add(gate.gateway)
            cluster.gateways[gate.gateway].kill()
            return
        self._struck.append(r)
        if self.fault in ("kill", "two kills"):
            cluster.replicas[r].kill()
            self._stalled.append((time.monotonic(), {name for name, at in cluster.places.items() if at == r}))
        elif self.fault == "hang":
            cluster.hang(r, self._seconds)
        elif self.fault == "partition":
            gates = [one for one in cluster.all_gates if one.replica == r]
            cluster.cut_off(gates if self._is_wide else [gate], self._seconds)
        elif self.fault == "drain":
            cluster.drain(r)
        else:
            cluster.end(r)

    async def _client(self, ask: Ask, delay: float) -> Answer:
        answer, gateway = Answer(), self._rng.randrange(NUM_GATEWAYS)
        await asyncio.sleep(delay)
        try:
            while not answer.is_done and not answer.errors:
                gateway = next(g for g in (gateway, *range(NUM_GATEWAYS)) if g not in self._killed)
                url = self._cluster.gateways[gateway].url
                try:
                    await asyncio.wait_for(receive(self._cluster.http, url, ask, answer), ROUND_LIMIT)
                except (aiohttp.ClientError, OSError) as error:
                    if gateway not in self._killed:  # only a gateway's own death may be noticed
                        answer.errors.append(f"{type(error).__name__}: {error}")
        except asyncio.TimeoutError:
            answer.errors.append(f"no end in {ROUND_LIMIT:g} s")
        return answer

    def _measure(self, answer: Answer) -> None:
        """How long a stream stood still when the replica was killed that computed it."""
        for at, names in self._stalled:
            before = [one for one in answer.times if one <= at]
            after = [one for one in answer.times if one > at]
            if answer.name in names and before and after:
                self._report.stalls.append((after[0] - before[-1], f"{self._seed} ({self.fault})"))


async def play(rounds: range, seed: int, spawner: Spawner, show: Callable[[str], None] = lambda line: None) -> Report:
    """Play these rounds."""
    report = Report()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        cluster = Cluster(spawner, report)
        try:
            await cluster.start(http)
            shown = 0
            for number in rounds:
                await Round(cluster, report, f"{seed}-{number}").run()
                if (number + 1) % 50 == 0 or report.failures[shown:]:
                    show("\n".join([f"{number + 1} rounds, {len(report.failures)} failures", *report.failures[shown:]]))
                    shown = len(report.failures)
            await cluster.ready(NUM_REPLICAS)
            report.failures += [
                f"a replica still has work at the end: {line}" for line in await cluster.busy_replicas()
            ]
        finally:
            await cluster.stop()
    for name in MAY_NOT_BE:
        if report.total(name):
            report.failures.append(f"the gateways count {report.total(name)} of {name}")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill what serves a fleet, and compare what clients receive.")
    parser.add_argument("rounds", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs there")
    given = parser.parse_args()
    with TemporaryDirectory() as directory:
        logs = given.logs or Path(directory)
        logs.mkdir(parents=True, exist_ok=True)
        rounds = range(given.first, given.first + given.rounds)
        with Spawner(logs) as spawner:
            report = asyncio.run(play(rounds, given.seed, spawner, lambda line: print(line, flush=True)))
    print(report.table())
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
