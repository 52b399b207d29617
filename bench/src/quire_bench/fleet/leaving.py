"""The time until a gateway avoids a replica that is dead, hangs, or is drained, and the effect on clients."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from quire.errors import ConfigError, QuireError, check_integer
from quire_bench.fleet.running import GONE, Fleet, Replica, fleet, pieces, waited_for
from quire_bench.server.prompts import random_prompts

PROMPT, NEW_TOKENS = 64, 128
BEFORE, AFTER = 1.0, 1.0  # seconds of load around what happens


def measure(
    options: Sequence[str], streams: int, runs: int, advance: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """Make one of two replicas hang, die, and drain, each `runs` times, while clients stream answers.

    seconds: until the gateway gave the replica no request any more; when drained, and all that it computed was moved.
    longest_wait: of a client for a piece of its answer, in seconds.

    advance: is called each time. Raises QuireError where the gateway does not notice.
    """
    for name, value in (("streams", streams), ("runs", runs)):
        check_integer(ConfigError, name, value, 1)
    found = []
    with fleet(2, *options) as running:
        for _ in range(runs):
            for what, happen in (("hung", _hang), ("killed", _kill), ("drained", _drain)):
                with _loaded(running.url, streams) as clients:
                    time.sleep(BEFORE)
                    replica = running.busiest()
                    clients.longest_wait = 0.0
                    seconds = happen(running, replica)
                    time.sleep(AFTER)
                if what == "hung":
                    os.kill(replica.pid, signal.SIGCONT)
                running.restart(replica)
                of_clients = {name: getattr(clients, name) for name in ("longest_wait", "answers", "errors")}
                found.append({"what": what, "seconds": seconds} | of_clients)
                advance()
    return found


def _hang(running: Fleet, replica: Replica) -> float:
    moment = time.time()
    os.kill(replica.pid, signal.SIGSTOP)
    return running.seen(replica, GONE, moment) - moment


def _kill(running: Fleet, replica: Replica) -> float:
    moment = time.time()
    replica.kill()
    return running.seen(replica, GONE, moment) - moment


def _drain(running: Fleet, replica: Replica) -> float:
    moment = time.time()
    running.drain(replica)
    return waited_for(lambda: None if replica.num_requests else time.time(), f"{replica.url} computes on") - moment


@dataclass
class _Clients:
    """The effect on clients."""

    longest_wait: float = 0.0
    answers: int = 0
    errors: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    seeds: Iterator[int] = field(default_factory=count)

    def ask(self, url: str) -> None:
        """Stream one answer after the other."""
        while not self.ended.is_set():
            seed = next(self.seeds)
            [prompt] = random_prompts(1, PROMPT, NEW_TOKENS, seed)
            body = {"prompt": prompt.content, "max_tokens": NEW_TOKENS, "seed": seed, "ignore_eos": True}
            last = time.perf_counter()
            try:
                for _ in pieces(url, body):
                    now = time.perf_counter()
                    self.longest_wait, last = max(self.longest_wait, now - last), now
                self.answers += 1
            except QuireError as error:
                self.errors.append(str(error))


@contextmanager
def _loaded(url: str, streams: int) -> Iterator[_Clients]:
    """Clients that ask until the end of it."""
    clients = _Clients()
    threads = [threading.Thread(target=clients.ask, args=(url,)) for _ in range(streams)]
    for thread in threads:
        thread.start()
    try:
        yield clients
    finally:
        clients.ended.set()
        for thread in threads:
            thread.join()
