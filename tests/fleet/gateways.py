"""A gateway and replicas in this process, which are slow, lost or drained when a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from quire.engine.plan import StepOutput
from quire.fleet.replica import Replica
from quire.models.batch import Batch
from quire.server.api.service import Service
from tests.fleet.serving import SECRET, Front, gateway, on_loop
from tests.server.serving import Serving, serving


@contextmanager
def fronting(*urls: str, **config: Any) -> Iterator[Front]:
    """A gateway that is connected to replicas at these URLs."""
    with gateway(*urls, **config) as front:
        links = front.gateway.fleet.roster.links
        until(lambda: links and all(link.is_up for link in links.values()))
        yield front


class Slowed:
    """An engine's runner whose steps take a while."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.seconds = 0.0

    def run(self, batch: Batch) -> StepOutput:
        time.sleep(self.seconds)
        return self.inner.run(batch)

    def use(self, model: Any) -> None:
        self.inner.use(model)

    def is_lost(self) -> bool:
        return False


def slowed(service: Service) -> None:
    service.engine_client.engine.runner = Slowed(service.engine_client.engine.runner)


@contextmanager
def replicas(count: int, **config: Any) -> Iterator[list[Serving]]:
    """Replicas of the embedded model, in this process."""
    options = {"num_blocks": 128, "max_num_seqs": 8, "async_scheduling": False}
    with ExitStack() as stack:
        yield [stack.enter_context(serving(options, slowed, fleet_secret=SECRET, **config)) for _ in range(count)]


def replica_of(server: Serving) -> Replica:
    found = server.server._parts.member
    assert isinstance(found, Replica)
    return found


def slow(server: Serving, seconds: float) -> None:
    """Let each step of a replica take so long at least."""
    server.service.engine_client.engine.runner.seconds = seconds


def slow_all(servers: list[Serving], seconds: float) -> None:
    """The same of each of them. A test that waits for something in the middle of an answer lets go of it afterwards."""
    for server in servers:
        slow(server, seconds)


class Rates:
    """What a replica says of its speed, whatever this machine does besides."""

    seconds_a_sequence = 1e-9

    def __init__(self, seconds_a_prompt_token: float, seconds_a_step: float) -> None:
        self.seconds_a_prompt_token, self.seconds_a_step = seconds_a_prompt_token, seconds_a_step

    def observe(self, num_prompt: int, num_sequences: int, seconds: float) -> None:
        pass


def say_rates(server: Serving, seconds_a_prompt_token: float, seconds_a_step: float = 1e-9) -> None:
    """Let a replica say that it takes so long."""
    replica_of(server)._reporter.rates = Rates(seconds_a_prompt_token, seconds_a_step)  # type: ignore[assignment]


def get_the_request(first: Serving, other: Serving) -> None:
    """Let the first one say that it computes prompts faster than the other."""
    say_rates(first, 1e-9)
    say_rates(other, 1e-2)


def lose(server: Serving) -> None:
    """End the sessions of a replica, as if it were gone; it takes new ones."""
    replica = replica_of(server)
    on_loop(server, lambda: [session.close() for session in replica._sessions.values()])


def drain(server: Serving) -> None:
    on_loop(server, replica_of(server).drain)


def undrain(server: Serving) -> None:
    """Let a drained replica take requests again, in new sessions."""
    if replica_of(server).draining:
        replica_of(server)._service.draining = False
        lose(server)


def at(servers: list[Serving], url: str) -> Serving:
    """The server at an URL."""
    [found] = [server for server in servers if server.url == url]
    return found


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def samples(server: Serving, name: str = "") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """One scrape: the value of each sample, by its name and labels. name: parse those alone, which is faster."""
    lines = server.get("/metrics").body.decode().splitlines(keepends=True)
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families("".join(line for line in lines if line.startswith(name)))
        for sample in family.samples
    }


def value(server: Serving, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels; 0.0 where there is none yet."""
    found, wanted = samples(server, name), set(labels.items())
    return sum(number for (other, has), number in found.items() if other == name and wanted <= has)
