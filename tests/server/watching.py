"""Watching an engine in tests: a watcher that rebuilds all books from what he hears, and a server to hear it from."""

from __future__ import annotations

import asyncio
import json
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from quire.engine.engine import Engine
from quire.request import Event
from quire.server.observability.inspector import Inspector, Watcher, router
from tests.engine.fakes import VOCAB, request, siblings


def expand(short: list[int]) -> list[int]:
    """The inverse of `shorten`, as its docstring tells it."""
    blocks: list[int] = []
    for value in short:
        if value >= 0:
            blocks.append(value)
        else:
            step = -1 if value % 2 else 1
            blocks += [blocks[-1] + step * (i + 1) for i in range(-value // 2)]
    return blocks


class Books:
    """What a watcher knows: he hears a stream and rebuilds all tables from it."""

    def __init__(self) -> None:
        self.heard = b""
        self.number: int | None = None
        self.kinds: list[str] = []
        self.seen: Counter[str] = Counter()
        self.drafts: Counter[str] = Counter()  # of the requests that ended
        self.stories: dict[str, list[str]] = {}
        self.history: list[list[Any]] = []
        self.requests: dict[int, dict[str, Any]] = {}
        self.steps: list[list[Any]] = []

    def hear(self, part: bytes) -> None:
        self.heard += part
        name, data, end = part.split(b"\n", 2)
        message = json.loads(data.removeprefix(b"data: "))
        assert end == b"\n"
        assert name == b"id: %d" % message["id"]
        self.kinds.append(message["kind"])
        if message["kind"] == "snapshot":
            self.start(message)
        else:
            assert self.number is not None
            assert message["id"] == self.number + 1
            for event in message["events"]:
                if event[0] == "step":
                    self.steps.append(event[1:])
                else:
                    self.take(*event)
            for key, generated, stored, *given, drafted, accepted in message["requests"]:
                drafts = [drafted, accepted]
                self.requests[key].update(generated=generated, stored=stored, given=given, drafts=drafts)
        self.number, self.gauges = message["id"], message["gauges"]

    def start(self, snapshot: dict[str, Any]) -> None:
        self.config, self.history = snapshot["config"], snapshot["history"]
        self.groups = range(len(self.config["windows"]))
        self.requests = {r["key"]: r for r in snapshot["requests"]}
        self.cached = [set(expand(blocks)) for blocks in snapshot["cached"]]
        self.before = [
            dict(zip(expand(blocks), expand(before), strict=True))
            for blocks, before in zip(snapshot["cached"], snapshot["before"], strict=True)
        ]
        for r in self.requests.values():
            r["tables"] = [expand(blocks) for blocks in r["tables"]] or [[] for _ in self.groups]
            r["hosts"] = [expand(blocks) for blocks in r["hosts"]] or [[] for _ in self.groups]

    def take(self, what: str, at: float, *rest: Any) -> None:
        self.seen[what] += 1
        if what in ("arrived", "ran", "first_token", "preempted", "resumed", "ended"):
            self.live(what, *rest)
            return
        group, rest = rest[0], rest[1:]
        if what in ("evicted", "forgotten"):
            assert self.cached[group] >= set(expand(rest[0]))
            self.cached[group] -= set(expand(rest[0]))
            for block, before in self.before[group].items():
                if before - 1 in expand(rest[0]):
                    self.before[group][block] = 0
        elif what == "cleared":
            self.cached[group].clear()
        elif what == "stored":
            assert not self.cached[group] & set(expand(rest[1]))
            assert len(expand(rest[1])) == len(rest[2])
            self.cached[group] |= set(expand(rest[1]))
            self.before[group] |= dict(zip(expand(rest[1]), expand(rest[3]), strict=True))
        else:
            self.move(what, self.requests[rest[0]], group, *rest[1:])

    def move(self, what: str, r: dict[str, Any], group: int, *rest: Any) -> None:
        table = r["tables"][group]
        if what in ("allocated", "shared"):
            table += expand(rest[0])
        elif what == "forked":
            assert not table
            table += expand(rest[1])
        elif what == "copied":
            table[table.index(rest[0])] = rest[1]
        elif what == "freed":
            blocks = expand(rest[0])
            if self.config["kinds"][group] == "states":  # one that was kept for others may have come after a later one
                assert set(blocks) <= set(table)
                table[:] = [block for block in table if block not in blocks]
            else:
                assert table[: len(blocks)] == blocks
                del table[: len(blocks)]
        elif what == "swapped_out":
            assert table == expand(rest[0])
            r["tables"][group], r["hosts"][group] = [], expand(rest[1])
        elif what == "swapped_in":
            assert r["hosts"][group] == expand(rest[1])
            r["tables"][group], r["hosts"][group] = expand(rest[0]), []
        else:
            assert what == "host_freed"
            assert r["hosts"][group] == expand(rest[0])
            r["hosts"][group] = []

    def live(self, what: str, key: int, *rest: Any) -> None:
        if what == "arrived":
            name, prompt, limit, sample, family = rest
            assert key not in self.requests
            self.requests[key] = {"key": key, "id": name, "prompt": prompt, "limit": limit, "sample": sample,
                                  "family": family,
                                  "state": "waiting", "report": None, "tables": [[] for _ in self.groups],
                                  "hosts": [[] for _ in self.groups]}  # fmt: skip
        elif what == "ended" and key < 0:
            self.stories.setdefault(rest[0], []).append("ended")
            return
        r = self.requests[key]
        self.stories.setdefault(r["id"], []).append(what)
        if what == "ran":
            assert r["state"] == "waiting"
            r["state"], r["report"] = "running", rest[0]
        elif what == "resumed":
            assert r["state"] in ("waiting", "swapped")
            r["state"] = "running"
        elif what == "preempted":
            r["state"], r["generated"] = rest
        elif what == "ended":
            assert not any(r["tables"])
            assert not any(r["hosts"])
            self.drafts.update(drafted=rest[-2], accepted=rest[-1])
            del self.requests[key]

    def check(self, engine: Engine) -> None:
        scheduler = engine.scheduler
        manager = scheduler.manager
        for g, pool in enumerate(manager.pools):
            for name, books in (("tables", pool), ("hosts", manager.host_pools[g])):
                counts = Counter(block for r in self.requests.values() for block in r[name][g])
                assert [counts[block] for block in range(books.num_blocks)] == list(books.ref_counts)
            assert self.cached[g] == set(manager.indexes[g].by_block)
            for block in self.cached[g]:  # one whose block before was evicted is reported no more, should it come back
                before = manager.indexes[g].block_before(block)
                assert self.before[g][block] in (0, 0 if before is None else before + 1)
        assert {r["id"] for r in self.requests.values()} == set(scheduler.requests)
        for r in self.requests.values():
            real = scheduler.requests[r["id"]]
            assert r["family"] == (real.group.members[0] if real.group else real).schedule.ordinal
            states = {"running": scheduler.running, "swapped": scheduler.swapped, "waiting": scheduler.waiting}
            assert [name for name, those in states.items() if real in those] in ([r["state"]], [])
            assert len(states[r["state"]]) == self.gauges[r["state"]]
            if r["state"] == "running":
                assert r["tables"] == [manager.owned(real, g).tolist() for g in self.groups]
                assert r["given"] == real.cache.num_freed
                assert r["drafts"] == [real.schedule.num_drafted, real.schedule.num_accepted]
                assert (r["generated"], r["stored"]) == (
                    real.num_generated,
                    max(real.cache.num_computed, real.cache.num_cached),
                )
                assert r["report"]["text"] == str(real.cache.prefix_report)


class Hub:
    """An engine with an inspector, and watchers who take everything at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.inspector = engine, Inspector(engine, {"model": "fake"})
        self.events: list[Event] = []

    def watch(self) -> tuple[Books, Watcher]:
        books = Books()

        def deliver(part: bytes) -> None:
            watcher.num_taken += len(part)
            if part:
                books.hear(part)

        watcher = Watcher(deliver)
        self.inspector.subscribe(watcher)
        return books, watcher

    def step(self) -> None:
        events = self.engine.step()
        self.events += events
        self.inspector.observe(events)


def load(engine: Engine, rng: random.Random) -> None:
    stems = [[rng.randrange(VOCAB) for _ in range(20)] for _ in range(2)]
    for i in range(25):
        prompt = [*rng.choice(stems)[: rng.randint(1, 20)], i]
        for r in siblings(f"r{i}", prompt, 3, max_tokens=12) if i % 3 == 0 else [request(f"r{i}", prompt)]:
            engine.add(r)


class EngineOnAThread:
    """An engine thread that steps when it is told to."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.hub = engine, Hub(engine)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (function := self._inbox.get()) is not None:
            function()

    async def call(self, function: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if not future.done():
                future.set_exception(error) if error else future.set_result(result)

        def run_it() -> None:
            try:
                result, error = function(), None
            except Exception as raised:
                result, error = None, raised
            loop.call_soon_threadsafe(settle, result, error)

        self._inbox.put(run_it)
        return await future

    def do(self, function: Callable[[], Any]) -> Any:
        """Run a function on the engine's thread, from any other."""
        done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

        def run_it() -> None:
            try:
                done.put((function(), None))
            except BaseException as error:
                done.put((None, error))

        self._inbox.put(run_it)
        result, error = done.get(timeout=20)
        if error is not None:
            raise error
        return result

    def steps(self, count: int = 1) -> None:
        """Do so many steps, if there is work."""

        def step() -> None:
            for _ in range(count):
                if self.engine.has_work:
                    self.hub.step()

        self.do(step)

    def finish(self) -> None:
        """Step until all is done."""
        while self.do(lambda: self.engine.has_work):
            self.steps(50)

    def stop(self) -> None:
        """End; the thread may have ended before."""
        self._inbox.put(None)
        self._thread.join(5)


class Served:
    """The worker of a server."""

    def __init__(self, worker: EngineOnAThread, port: int = 0) -> None:
        app = FastAPI()
        app.include_router(router(worker.hub.inspector, worker))
        self.schema = app.openapi()
        self.worker = worker
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", timeout_graceful_shutdown=2)
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        while not self.server.started:
            time.sleep(0.005)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/inspector"

    def stop(self) -> None:
        self.worker.hub.inspector.close()
        self.server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.worker.stop()
