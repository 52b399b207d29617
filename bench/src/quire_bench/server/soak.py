"""A soak: `quire serve` under a mixed load for long, watched for what does not come back.

The server is a process of its own with a small pool, so that requests give way to others, are swapped and evict what
could have been used again. Its clients are tasks of this process. Their load stops twice, after a warm-up and at the
end, so that the server can be compared with itself at rest.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from quire.errors import ConfigError, check_integer, check_number
from quire_bench.proc import sizes
from quire_bench.server.client import check_installed
from quire_bench.server.mix import Ask, Asker, Wrong, read_answer
from quire_bench.server.process import Process, server
from quire_bench.server.verdict import Findings, Sample

if TYPE_CHECKING:
    from aiohttp import ClientSession

# A pool that a few long requests fill, and a place for the blocks of some that have to give way.
SERVER = ("--num-blocks", "600", "--preemption", "swap", "--swap-space", "8MiB", "--max-num-seqs", "48")
SHARE_OF_ABORTS = 0.2
LONGEST_PATIENCE = 1.5  # seconds after which the last ones of those hang up
TIMEOUT = 120.0  # seconds that a request may take
PROBE_TIMEOUT = 10.0  # seconds within which a server has to say how it is
CANARY_INTERVAL = 0.5  # seconds
REST = 30.0  # seconds within which everything has to come back
ERROR = re.compile(r"^(?:\S+ \S+ (?:ERROR|CRITICAL) |Exception ).*", re.MULTILINE)  # in a log


@dataclass(frozen=True)
class Soak:
    """The duration and the load of a soak."""

    seconds: float
    warm_up: float  # seconds of load before those
    clients: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        check_number(ConfigError, "seconds", self.seconds, 1.0)
        check_number(ConfigError, "warm_up", self.warm_up, 0.0)
        check_integer(ConfigError, "clients", self.clients, 1, 1000)
        if not Path("/proc/self/smaps_rollup").exists():
            raise ConfigError("a soak needs /proc, where Linux tells how much memory a process has; there is none here")

    @property
    def interval(self) -> float:
        """Seconds from one sample to the next."""
        return min(5.0, max(0.2, self.seconds / 200))


def soak(plan: Soak, advance: Callable[[], None] = lambda: None) -> Findings:
    """Do it. `advance` is called once for each second of load that has passed, those of the warm-up included.

    Raises ConfigError where aiohttp is missing, QuireError where the server does not get ready.
    """
    found = Findings()
    with server(*SERVER) as process:
        asyncio.run(_Soaking(plan, process, found, advance).run())
    found.status, found.logged = process.status, ERROR.findall(process.said)
    return found


class _Soaking:
    """One soak."""

    def __init__(self, plan: Soak, process: Process, found: Findings, advance: Callable[[], None]) -> None:
        check_installed()
        import aiohttp

        self._http = aiohttp
        self._plan, self._process, self._found, self._advance = plan, process, found, advance
        self._asker = Asker(plan.seed)
        self._rng = random.Random(plan.seed)
        self._start = 0.0
        self._passed = 0  # seconds of load that were reported

    async def run(self) -> None:
        """All of it."""
        found = self._found
        try:
            await self._load(self._plan.warm_up, is_counted=False)
            found.before = await self._rest()
            await self._load(self._plan.seconds, is_counted=True)
            found.after = await self._rest()
        except (OSError, asyncio.TimeoutError, self._http.ClientError) as error:  # of the watcher's own requests
            found.ended_early = f"the server does not answer: {type(error).__name__}: {error}"

    def _session(self, timeout: float | None = None) -> ClientSession:
        return self._http.ClientSession(
            connector=self._http.TCPConnector(limit=0),
            timeout=self._http.ClientTimeout(total=timeout),
            headers={"Content-Type": "application/json"},
            read_bufsize=2**20,  # a snapshot is one line
        )

    # ---------------------------------------------------------------------------------------------- the watcher

    async def _load(self, seconds: float, is_counted: bool) -> None:
        """Load for so long, and samples of what it does if it counts. At its end all clients hang up."""
        self._start, self._passed = time.monotonic(), 0
        end = self._start + seconds
        async with self._session() as session:
            jobs = [self._client(session, random.Random(self._rng.random())) for _ in range(self._plan.clients)]
            jobs += [self._canary(session), self._inspect(session)]
            tasks = [asyncio.create_task(job) for job in jobs]
            try:
                while time.monotonic() < end:
                    sample = await self._sample()
                    if is_counted:
                        self._found.samples.append(sample)
                    await self._wait(min(end, time.monotonic() + self._plan.interval))
            finally:
                pending = set(tasks)
                while pending:  # again: wait_for may lose a cancellation that comes together with its result
                    for task in pending:
                        task.cancel()
                    _, pending = await asyncio.wait(pending, timeout=1.0)
            for task in tasks:
                if not task.cancelled():
                    task.result()  # raises: a client ends only by a fault of its own

    async def _wait(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 1.0))
            while self._passed < time.monotonic() - self._start:
                self._passed += 1
                self._advance()

    async def _rest(self) -> Sample:
        """The server once it has nothing to do: of some moments in a row the one with the fewest descriptors."""
        end = time.monotonic() + REST
        while (await self._sample()).left and time.monotonic() < end:
            await asyncio.sleep(0.2)
        moments = []
        for _ in range(5):
            await asyncio.sleep(0.1)
            moments.append(await self._sample())
        return min(moments, key=lambda sample: sample.descriptors)

    async def _sample(self) -> Sample:
        """The server now; on connections of its own, which are closed before descriptors are counted."""
        async with self._session(PROBE_TIMEOUT) as session:
            async with session.get(f"{self._process.url}/health") as response:
                shown = await response.text()
            if response.status == 200:
                self._found.num_healthy += 1
            else:
                self._found.unhealthy.append(f"status {response.status} after {self._seconds():.0f} s: {shown[:200]}")
            async with session.get(f"{self._process.url}/metrics") as response:
                counts = _numbers(await response.text())
        self._found.counts = counts
        directory = Path("/proc", str(self._process.pid))
        return Sample(
            seconds=self._seconds(),
            resident=sizes(directory / "status")["VmRSS"],
            anonymous=sizes(directory / "smaps_rollup")["Anonymous"],
            threads=len(list((directory / "task").iterdir())),
            descriptors=len(list((directory / "fd").iterdir())),
            running=int(counts["num_requests_running"]),
            waiting=int(counts["num_requests_waiting"]),
            swapped=int(counts["num_requests_swapped"]),
            blocks=int(counts["kv_blocks/used"]),
            host_blocks=int(counts["kv_host_blocks/used"]),
        )

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    # ---------------------------------------------------------------------------------------------- its clients

    async def _client(self, session: ClientSession, rng: random.Random) -> None:
        """One client: asks, waits for the answer or hangs up, and asks again."""
        while True:
            ask = self._asker.draw(rng)
            patience = TIMEOUT
            if ask.may_abort and rng.random() < SHARE_OF_ABORTS:
                patience = rng.random() ** 2 * LONGEST_PATIENCE
            await self._ask(session, ask, patience)

    async def _ask(self, session: ClientSession, ask: Ask, patience: float = TIMEOUT) -> bytes | None:
        """Send a request, and check and note what comes. Returns the body of an answer that is right."""
        try:
            status, answer = await asyncio.wait_for(_send(session, self._process.url, ask), patience)
            ask.check(status, answer)
        except asyncio.TimeoutError:
            if patience < TIMEOUT:
                self._found.note(ask.kind, "aborted")
            else:
                self._found.note_wrong(ask.kind, f"no answer within {TIMEOUT:g} s to {ask.body!r:.200}")
            return None
        except Exception as error:  # whatever a server can send
            self._found.note_wrong(ask.kind, f"{type(error).__name__}: {error}, for {ask.body!r:.300}")
            await asyncio.sleep(0.1)
            return None
        self._found.note(ask.kind, ask.expected)
        return answer

    async def _canary(self, session: ClientSession) -> None:
        """Asks the same thing over and over."""
        while True:
            answer = await self._ask(session, self._asker.canary())
            if answer is not None:
                self._found.canaries[repr(read_answer(answer, False).texts)] += 1
            await asyncio.sleep(CANARY_INTERVAL)

    async def _inspect(self, session: ClientSession) -> None:
        """Watches the blocks for a while, goes, and comes back; now and then it reads nothing of what it gets."""
        rng = random.Random(self._plan.seed)
        while True:
            until = time.monotonic() + rng.choice((0.0, 0.5, 5.0, 20.0))
            try:
                async with session.get(f"{self._process.url}/inspector/events") as response:
                    first = await response.content.readuntil(b"\n\n")
                    if response.status != 200 or b'"kind":"snapshot"' not in first:
                        raise Wrong(f"status {response.status}, and first {first[:100]!r}")
                    if rng.random() < 0.3:
                        await asyncio.sleep(until - time.monotonic())
                    while time.monotonic() < until:
                        await asyncio.wait_for(response.content.readany(), PROBE_TIMEOUT)
            except Exception as error:  # whatever a server can send
                self._found.note_wrong("inspector", f"{type(error).__name__}: {error}")
            else:
                self._found.note("inspector", "watched")
            await asyncio.sleep(rng.choice((0.0, 0.5, 2.0)))


async def _send(session: ClientSession, url: str, ask: Ask) -> tuple[int, bytes]:
    method = "GET" if ask.body is None else "POST"
    async with session.request(method, url + ask.path, data=ask.body) as response:
        return response.status, await response.read()


def _numbers(text: str) -> dict[str, float]:
    """A scrape by name, without the prefix, and by the label that tells values of a name apart."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.partition(":")[2].removesuffix("_total")
            labels = [value for key, value in sample.labels.items() if key not in ("model_name", "engine")]
            found["/".join([name, *labels])] = sample.value
    return found
