"""A gateway in this process, on a thread of its own, and replicas that are lost or drained when a test says so."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from quire.batch import Batch
from quire.engine.plan import StepOutput
from quire.fleet.config import GatewayConfig
from quire.fleet.gateway import Gateway, GatewayServer, build_gateway, find_model
from quire.fleet.membership import StaticMembers
from quire.fleet.replica import Replica
from quire.server.api.service import Service
from quire.server.run import settings
from tests.server.serving import Serving, serving

SECRET = "a secret of this test"


@dataclass
class Front(Serving):
    """A running gateway."""

    gateway: Gateway | None = None

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """What a function returns on the gateway's event loop."""
        return on_loop(self, function)


def on_loop(server: Serving, function: Callable[[], Any]) -> Any:
    async def call() -> Any:
        return function()

    assert server.loop is not None
    return asyncio.run_coroutine_threadsafe(call(), server.loop).result(30)


@contextmanager
def fronting(*urls: str, **config: Any) -> Iterator[Front]:
    """A gateway in front of replicas at these URLs."""
    own = GatewayConfig(port=0, fleet_secret=SECRET, **{"shutdown_timeout": 2.0} | config)
    members = StaticMembers(urls)
    with TemporaryDirectory() as directory:
        with ThreadPoolExecutor(1) as thread:  # a browser's driver has a loop on this one
            found = thread.submit(lambda: asyncio.run(find_model(members, own))).result()
        gateway = build_gateway(members, own, found, Path(directory))
        here = Front(gateway.service, gateway.metrics, gateway.watch, gateway=gateway)
        ready = threading.Event()
        listening = socket.create_server(("127.0.0.1", 0))
        here.port = listening.getsockname()[1]

        def told() -> None:
            here.loop = asyncio.get_running_loop()
            ready.set()

        server = here.server = GatewayServer(settings(gateway.app(), own), gateway, told)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            assert ready.wait(30)
            until(lambda: all(link.is_up for link in gateway.fleet.links.values()) and gateway.fleet.links)
            yield here
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


class Slowed:
    """An engine's runner whose steps take a while."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seconds = 0.0

    def run(self, batch: Batch) -> StepOutput:
        time.sleep(self.seconds)
        return self.inner.run(batch)

    def is_lost(self) -> bool:
        return False


def slowed(service: Service) -> None:
    service.worker.engine.runner = Slowed(service.worker.engine.runner)


@contextmanager
def replicas(count: int, **config: Any) -> Iterator[list[Serving]]:
    """Replicas of the embedded model, in this process."""
    options = {"num_blocks": 128, "max_num_seqs": 8, "async_scheduling": False}
    with ExitStack() as stack:
        yield [stack.enter_context(serving(options, slowed, fleet_secret=SECRET, **config)) for _ in range(count)]


def replica_of(server: Serving) -> Replica:
    found = server.server._parts.replica
    assert found is not None
    return found


def slow(server: Serving, seconds: float) -> None:
    """Let each step of a replica take so long at least."""
    server.service.worker.engine.runner.seconds = seconds


def lose(server: Serving) -> None:
    """End the sessions of a replica, as if it were gone; it takes new ones."""
    replica = replica_of(server)
    on_loop(server, lambda: [session.close() for session in replica._sessions.values()])


def drain(server: Serving) -> None:
    on_loop(server, replica_of(server).drain)


def at(servers: list[Serving], url: str) -> Serving:
    """The server at an URL."""
    [found] = [server for server in servers if server.url == url]
    return found


def until(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def samples(server: Serving) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """One scrape: the value of each sample, by its name and labels."""
    text = server.get("/metrics").body.decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(server: Serving, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels; 0.0 where there is none yet."""
    found = samples(server)
    wanted = set(labels.items())
    return sum(number for (other, has), number in found.items() if other == name and wanted <= has)
