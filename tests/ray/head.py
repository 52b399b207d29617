"""Ray's head is killed under load, and no client notices.

A head without replicas, and a node with two of them and the gateway, all on this machine. Clients ask without a pause
while all processes of the head are killed at once, and then a replica. Each answer is compared with that of a plain
server. `python -m tests.ray.head` also starts a new head from what the old one had stored, and waits until that has
replaced the replica.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType

import aiohttp

from quire_bench.server.process import running
from tests.fleet.asks import Answer, Ask, draw_ask, receive, receive_plain, verdict

NUM_CLIENTS = 4
PLAIN_CLIENTS = 16  # that ask the plain server at once
FEWEST = 10  # answers of a phase
START_LIMIT = 200.0  # s until the fleet is there, or a new head has made it whole
ANSWER_LIMIT = 60.0  # s after which a client counts as forgotten
RECONNECT = 600  # s for which the node waits for a head, as in the manifests
OPTIONS = {"replicas": "2", "num_cpus": "0.5", "num-blocks": "512", "max-num-seqs": "8"}
GIVEN: set[int] = set()  # ports
DEPLOY = """
import json, sys
import ray
from ray import serve
from quire.ray.app import build
ray.init(log_to_driver=False)
serve.start(proxy_location="Disabled")
serve.run(build(json.loads(sys.argv[1])), name="quire", route_prefix=None)
"""


@dataclass
class Report:
    """What clients received."""

    answers: Counter[str] = field(default_factory=Counter)  # by phase
    failures: list[str] = field(default_factory=list)  # a description each
    recovery: float = math.nan  # s from the start of a new head to a whole fleet

    def __str__(self) -> str:
        lines = [f"{phase}: {count} answers" for phase, count in self.answers.items()]
        if not math.isnan(self.recovery):
            lines.append(f"whole again {self.recovery:.1f} s after the start of a new head")
        return "\n".join([*lines, f"failures: {len(self.failures)}", *self.failures])


class Nodes:
    """A head and a node of Ray, each with processes of its own. All of them end with this object."""

    def __init__(self, directory: Path) -> None:
        """directory: for what they store and their logs. A short path, as Ray has sockets there."""
        self.port = free_port()  # the gateway's
        self._head_port = free_port()
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = os.environ | {
            "RAY_ADDRESS": f"127.0.0.1:{self._head_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT),
            "RAY_worker_niceness": "0",  # else Ray's workers, and so replicas, have a niceness of 15
            "RAY_gcs_storage": "rocksdb",  # from which a new head can begin
            "RAY_gcs_storage_path": str(directory / "gcs"),
        }

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in list(self._processes):
            self._kill(name)

    def deploy(self) -> None:
        """Start them, and the application there."""
        (self._directory / "secret").write_text(secrets.token_hex(16))
        args = {
            "gateway_port": str(self.port),
            "gateway_resource": "gateway",  # which the head has not
            "secret_file": str(self._directory / "secret"),
            **OPTIONS,
        }
        self.start_head()
        self._wait_for_head()
        self._start("node", "--num-cpus", "2", "--resources", '{"gateway": 1}')
        path = self._directory / "deploy.log"
        with path.open("wb") as log:
            command, environment = [sys.executable, "-c", DEPLOY, json.dumps(args)], self._environment
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=START_LIMIT, check=False)
        assert done.returncode == 0, path.read_text()

    def start_head(self) -> None:
        """Start the first head, or after its death another one with what it had stored."""
        (self._directory / "ray_current_cluster").unlink(missing_ok=True)  # which another machine would not have
        ports = ("--dashboard-port", str(free_port()), "--ray-client-server-port", str(free_port()))
        place = ("--port", str(self._head_port), "--temp-dir", str(self._directory))
        self._start("head", "--head", "--num-cpus", "0", *place, *ports)

    def kill_head(self) -> None:
        self._kill("head")

    def servers(self) -> set[int]:
        """The processes of the node that are `quire serve`."""
        return serving(self._processes["node"].pid)

    def _start(self, name: str, *options: str) -> None:
        where = () if name == "head" else ("--address", self._environment["RAY_ADDRESS"])
        common = ("--block", "--node-ip-address", "127.0.0.1", "--dashboard-agent-listen-port", str(free_port()))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *common, *where, *options]
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _wait_for_head(self) -> None:
        limit = time.monotonic() + START_LIMIT
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._head_port), 1):
                return
            assert time.monotonic() < limit, (self._directory / "head.log").read_text()
            time.sleep(0.1)

    def _kill(self, name: str) -> None:
        """End all processes of a node at once, as the loss of its machine does."""
        process = self._processes.pop(name)
        for pid in family(process.pid):
            kill(pid)
        process.wait()


def family(pid: int) -> list[int]:
    """A process and all that come from it."""
    children: dict[int, list[int]] = {}
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(process.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def serving(pid: int) -> set[int]:
    """Of a process and all that come from it, those that are `quire serve`."""
    found = set()
    for one in family(pid):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if b"\0serve\0--config\0" in Path(f"/proc/{one}/cmdline").read_bytes():
                found.add(one)
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """A port that nothing listens at, and that was not given before: the system may offer the same again."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        if port not in GIVEN:
            GIVEN.add(port)
            return port


class Load:
    """Clients that ask without a pause."""

    def __init__(self, http: aiohttp.ClientSession, url: str, seed: int) -> None:
        self.received: list[tuple[str, Ask, Answer]] = []  # with the phase in which it was asked for
        self._http = http
        self._url = url
        self._seed = seed
        self._phase = ""  # clients ask while it has a name
        self._clients: list[asyncio.Task[None]] = []

    async def during(self, phase: str, seconds: float) -> None:
        """Let clients ask for so long, and until they have received something."""
        self._phase, start = phase, time.monotonic()
        if not self._clients:
            self._clients = [asyncio.create_task(self._client(number)) for number in range(NUM_CLIENTS)]
        while time.monotonic() < start + seconds or sum(one == phase for one, _, _ in self.received) < FEWEST:
            await asyncio.sleep(0.1)

    async def end(self) -> None:
        """Let the clients receive what they have asked for."""
        self._phase = ""
        await asyncio.gather(*self._clients)

    async def _client(self, number: int) -> None:
        rng, count = random.Random(f"{self._seed} {number}"), 0
        while phase := self._phase:
            ask, answer = draw_ask(rng, f"{self._seed} {number} {count}"), Answer()
            count += 1
            try:
                await asyncio.wait_for(receive(self._http, self._url, ask, answer), ANSWER_LIMIT)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                answer.errors.append(f"{type(error).__name__}: {error}")
            self.received.append((phase, ask, answer))


async def until_it_answers(http: aiohttp.ClientSession, url: str) -> None:
    limit = time.monotonic() + START_LIMIT
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(f"{url}/health") as answer:
                if answer.status == 200:
                    return
        assert time.monotonic() < limit, "the gateway does not answer"
        await asyncio.sleep(0.1)


async def lose_the_head(nodes: Nodes, load: Load, seconds: float) -> int:
    """Kill the head and then a replica. seconds: of each phase. Returns the replica that is left."""
    await load.during("with the head", seconds)
    killed, left = sorted(nodes.servers())
    nodes.kill_head()
    await load.during("without a head", seconds)
    kill(killed)
    await load.during("without a head and a replica", seconds)
    assert nodes.servers() == {left}  # there is nothing that would replace the other one
    return left


async def get_a_new_head(nodes: Nodes, load: Load, seconds: float, left: int) -> float:
    """Start another head. Returns the seconds until it has replaced the lost replica."""
    start = time.monotonic()
    nodes.start_head()
    while len(nodes.servers()) < 2:
        assert time.monotonic() < start + START_LIMIT, "the new head does not replace the replica"
        await load.during("while a new head starts", 0.2)
    recovery = time.monotonic() - start
    await load.during("with the new head", seconds)
    assert left in nodes.servers()  # it has taken over what was there
    return recovery


async def play(directory: Path, seconds: float, *, new_head: bool, seed: int = 1) -> Report:
    """All of it. directory: an empty one with a short path. seconds: of each phase."""
    report = Report()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        with Nodes(directory) as nodes:
            await asyncio.to_thread(nodes.deploy)
            url = f"http://127.0.0.1:{nodes.port}"
            await until_it_answers(http, url)
            load = Load(http, url, seed)
            left = await lose_the_head(nodes, load, seconds)
            if new_head:
                report.recovery = await get_a_new_head(nodes, load, seconds, left)
            await load.end()
        with running("serve", "--port", "0", "--num-blocks", "512") as plain:
            for i in range(0, len(load.received), PLAIN_CLIENTS):
                rows = load.received[i : i + PLAIN_CLIENTS]
                rights = [receive_plain(http, plain.url, ask, found.name) for _, ask, found in rows]
                for (phase, ask, found), right in zip(rows, await asyncio.gather(*rights), strict=True):
                    report.answers[phase] += 1
                    if how := verdict(right, found):
                        report.failures.append(f"\n{phase}, {ask}: {how}\n  {found}\nbut  {right}")
    return report


def main() -> None:
    """Play it once, with a new head."""
    parser = argparse.ArgumentParser(description="Kill Ray's head under load, and compare what clients receive.")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="keep Ray's logs there; a short path")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="ray-") as directory:
        logs = given.logs or Path(directory)
        logs.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(play(logs, given.seconds, new_head=True, seed=given.seed))
    print(report)
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
