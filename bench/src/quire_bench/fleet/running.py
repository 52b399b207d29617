"""A fleet on this machine: replicas of one thread each and a gateway, which can be asked, killed and read."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any, TypeVar

from quire.errors import QuireError
from quire_bench.server.process import Process, running, server

ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # several processes share the cores
PATIENCE = 30.0  # seconds within which everything that is waited for has to come
POLL_SECONDS = 0.005
GONE = "is lost|is not there"  # as a gateway logs it: the second of one that it had lost before, on a busy machine
TIME = "%Y-%m-%d %H:%M:%S,%f"  # at the beginning of a line of a log
T = TypeVar("T")
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Replica:
    """One of a fleet, at a port of its own, which its successors take over."""

    def __init__(self, options: Sequence[str], threads: int = 1) -> None:
        self._options = options
        self._environment = {"OMP_NUM_THREADS": str(threads)}
        self._stack = ExitStack()
        self.url = ""
        self.pid = 0

    def start(self) -> None:
        """Begin to serve. Raises QuireError where it does not get ready."""
        port = self.url.rpartition(":")[2] or "0"
        process = self._stack.enter_context(server(*self._options, port=port, environment=self._environment))
        self.url, self.pid = process.url, process.pid

    def kill(self) -> None:
        """End it at once, as a failing machine would."""
        os.kill(self.pid, signal.SIGKILL)

    def restart(self) -> None:
        """Start a successor in its place, when it is gone or idle."""
        self._stack.close()
        self.start()

    def close(self) -> None:
        """End it."""
        self._stack.close()

    def metric(self, name: str) -> float:
        """The sum of its numbers of that name. Raises QuireError where it does not answer, or has none."""
        text = fetch(f"{self.url}/metrics").decode()
        found = re.findall(rf"^quire:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        if not found:
            raise QuireError(f"{self.url}/metrics has no quire:{name}")
        return sum(map(float, found))

    @property
    def num_requests(self) -> int:
        """Requests that run or wait there."""
        return round(self.metric("num_requests_running") + self.metric("num_requests_waiting"))


class Fleet:
    """Replicas and a gateway."""

    def __init__(self, replicas: Sequence[Replica], gateway: Process, secret: str) -> None:
        self.replicas = replicas
        self.gateway = gateway
        self.secret = secret

    @property
    def url(self) -> str:
        """The gateway's."""
        return self.gateway.url

    def busiest(self) -> Replica:
        """The replica with the most requests, when one has any. Raises QuireError if that takes too long."""

        def look() -> Replica | None:
            counts = [one.num_requests for one in self.replicas]
            return self.replicas[counts.index(max(counts))] if any(counts) else None

        return waited_for(look, "no replica has got a request")

    def drain(self, replica: Replica) -> None:
        """Move the requests of a replica to others."""
        fetch(f"{replica.url}/fleet/drain", b"", {"Authorization": f"Bearer {self.secret}"})

    def seen(self, replica: Replica, what: str, since: float = 0.0) -> float:
        """When the gateway first logged, after a time, that a replica "is connected" or is `GONE`; waits for it.

        Times are those of time.time(), in seconds. Raises QuireError if it does not come.
        """
        line = re.compile(rf"^(\S+ \S+) \w+ replica {re.escape(replica.url)} (?:{what})", re.MULTILINE)

        def look() -> float | None:
            times = [datetime.strptime(one, TIME).timestamp() for one in line.findall(self.gateway.log.read_text())]
            return next((moment for moment in times if moment >= since - 1e-3), None)  # a log counts milliseconds

        return waited_for(look, f"the gateway does not say that {replica.url} {what}")

    def restart(self, replica: Replica) -> None:
        """Start a successor in a replica's place, and wait until the gateway has connected to it."""
        before = time.time()
        replica.restart()
        self.seen(replica, "is connected", before)


@contextmanager
def fleet(num_replicas: int, *options: str, threads: int = 1) -> Iterator[Fleet]:
    """A fleet whose gateway is connected to all replicas. Everything is stopped at the end.

    options, threads: of each replica. Raises QuireError where one does not get ready.
    """
    secret = secrets.token_hex(16)
    with ExitStack() as stack:
        replicas = [Replica(("--fleet-secret", secret, *options), threads) for _ in range(num_replicas)]
        for one in replicas:
            stack.callback(one.close)
        with ThreadPoolExecutor(num_replicas) as pool:
            list(pool.map(Replica.start, replicas))
        urls = ",".join(one.url for one in replicas)
        arguments = ("fleet", "--port", "0", "--fleet-secret", secret, "--replicas", urls)
        found = Fleet(replicas, stack.enter_context(running(*arguments)), secret)
        for one in replicas:
            found.seen(one, "is connected")
        yield found


def prefix_hits(replicas: Sequence[Replica]) -> tuple[float, float]:
    """Return the prompt tokens that were looked for in the replicas' caches, and those that were found."""
    looked_for, found = (
        sum(one.metric(f"prefix_cache_{name}_total") for one in replicas) for name in ("queries", "hits")
    )
    return looked_for, found


def waited_for(look: Callable[[], T | None], problem: str) -> T:
    """Return a function's result once it is not None. Raises QuireError, with the problem, if that takes too long."""
    deadline = time.monotonic() + PATIENCE
    while (found := look()) is None:
        if time.monotonic() > deadline:
            raise QuireError(f"{problem} within {PATIENCE:g} s")
        time.sleep(POLL_SECONDS)
    return found


def fetch(url: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    """Return a server's answer, without a proxy in between. Raises QuireError if there is none."""
    try:
        with OPENER.open(urllib.request.Request(url, body, headers or {}), timeout=PATIENCE) as answer:
            return bytes(answer.read())
    except OSError as error:
        raise QuireError(f"{url} does not answer: {error}") from error


def pieces(url: str, body: dict[str, Any]) -> Iterator[str]:
    """The texts of a streamed completion as they come.

    Raises QuireError where it is refused, has an error in it, or is cut off.
    """
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body | {"stream": True}).encode(), headers)
    is_whole = False
    try:
        with OPENER.open(asked, timeout=PATIENCE) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise QuireError(f"{url} answers with an error: {event['error']['message']}")
                    yield event["choices"][0]["text"]
                is_whole = is_whole or line.startswith(b"data: [DONE]")
    except OSError as error:
        raise QuireError(f"{url} does not answer: {error}") from error
    if not is_whole:
        raise QuireError(f"the answer of {url} was cut off")
