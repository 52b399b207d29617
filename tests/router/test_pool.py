"""Which models a pool loads and unloads, with servers that do nothing, on a clock that the tests set."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quire.errors import ModelError
from quire.router.pool import Entry, ModelPool, State
from quire.server.http.api_error import ApiError


class Machine:
    """Starts servers, and records how many there are."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.most = 0
        self.started: list[str] = []
        self.on_end: dict[str, Callable[[int], None]] = {}
        self.fails = self.ends = False
        self.lock = threading.Lock()
        self.now = 0.0

    def start(self, name: str, on_end: Callable[[int], None]) -> Server:
        if self.fails:
            raise ModelError(f"there is no {name}")
        with self.lock:
            assert name not in self.running
            self.running.add(name)
            self.started.append(name)
            self.most = max(self.most, len(self.running))
        self.on_end[name] = on_end
        if self.ends:
            self.running.remove(name)
            on_end(3)
        return Server(self, name)


class Server:
    def __init__(self, machine: Machine, name: str) -> None:
        self.url = f"http://{name}"
        self._machine, self._name = machine, name

    def stop(self, timeout: float) -> None:
        assert timeout == 7
        with self._machine.lock:
            self._machine.running.remove(self._name)


def run(test: Callable[[ModelPool, Machine], Coroutine[Any, Any, None]], names: str = "abc", most: int = 1) -> Machine:
    machine = Machine()

    async def main() -> None:
        pool = ModelPool(
            dict.fromkeys(names),
            machine.start,
            max_loaded=most,
            idle_timeout=10.0,
            stop_timeout=7,
            clock=lambda: machine.now,
        )
        await asyncio.wait_for(test(pool, machine), 20)
        await asyncio.wait_for(pool.close(), 20)
        assert not machine.running
        assert {one.state for one in pool.entries.values()} == {State.UNLOADED}

    asyncio.run(main())
    return machine


async def settled(pool: ModelPool) -> None:
    while pool._tasks:
        await asyncio.wait(pool._tasks)


async def ask(pool: ModelPool, name: str, wait: Callable[[Entry], Coroutine[Any, Any, None]] | None = None) -> None:
    entry = pool.entry(name)
    await pool.acquire(entry)
    try:
        assert entry.url == f"http://{entry.name}"
        if wait is not None:
            await wait(entry)
    finally:
        pool.release(entry)


def test_one_load_serves_all_that_wait_for_it() -> None:
    async def test(pool: ModelPool, machine: Machine) -> None:
        await asyncio.gather(*(ask(pool, name) for name in ("a", "a:latest", "a")))
        assert machine.started == ["a"]

    run(test)


def test_a_model_leaves_when_its_answers_have_ended_and_its_later_requests_wait() -> None:
    async def test(pool: ModelPool, machine: Machine) -> None:
        done, order = asyncio.Event(), []

        async def hold(_: Entry) -> None:
            await done.wait()
            order.append("first a")

        first = asyncio.create_task(ask(pool, "a", hold))
        while machine.started != ["a"]:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(ask(pool, "b"))
        await asyncio.sleep(0.01)
        assert pool.entry("a").state is State.LEAVING
        third = asyncio.create_task(ask(pool, "a"))  # b was first
        await asyncio.sleep(0.01)
        assert machine.started == ["a"]
        done.set()
        await asyncio.gather(first, second, third)
        assert machine.started == ["a", "b", "a"]
        assert order == ["first a"]

    assert run(test).most == 1


def test_the_model_that_was_idle_longest_leaves_and_idle_ones_after_their_time() -> None:
    async def test(pool: ModelPool, machine: Machine) -> None:
        for name in "ab":
            machine.now += 1
            await ask(pool, name)
        machine.now += 1
        await ask(pool, "a")
        await ask(pool, "c")
        assert machine.running == {"a", "c"}
        machine.now += 9.5
        await ask(pool, "c")
        machine.now += 1
        pool.unload_idle()
        await settled(pool)
        assert machine.running == {"c"}
        pool.unload(pool.entry("c"))
        await settled(pool)
        assert not machine.running

    assert run(test, most=2).most == 2


def test_a_closed_pool_loads_nothing_for_those_that_wait() -> None:
    async def test(pool: ModelPool, machine: Machine) -> None:
        gone = asyncio.Event()

        async def hold(_: Entry) -> None:
            await gone.wait()

        first = asyncio.create_task(ask(pool, "a", hold))
        while machine.started != ["a"]:
            await asyncio.sleep(0.001)
        waiting = asyncio.create_task(ask(pool, "b"))
        await asyncio.sleep(0.01)
        await pool.close()
        with pytest.raises(ApiError, match="the router is stopping"):
            await waiting
        gone.set()
        await first
        assert machine.started == ["a"]

    run(test)


def test_failures_reach_the_requests_that_wait_and_the_next_one_tries_again() -> None:
    async def test(pool: ModelPool, machine: Machine) -> None:
        machine.fails = True
        found = await asyncio.gather(*(ask(pool, "a") for _ in range(3)), return_exceptions=True)
        assert [str(one) for one in found] == ["model a cannot be loaded: there is no a"] * 3
        assert {one.status for one in found if isinstance(one, ApiError)} == {503}
        machine.fails = False
        await ask(pool, "a")
        machine.running.discard("a")
        machine.on_end["a"](-9)
        while pool.entry("a").state is State.LOADED:
            await asyncio.sleep(0.001)
        await ask(pool, "a")
        assert machine.started == ["a", "a"]
        machine.ends = True
        with pytest.raises(ApiError, match="model b cannot be loaded: its server ended with status 3"):
            await ask(pool, "b")
        with pytest.raises(ApiError, match="there is no model 'd'; the models of this router are a, b, c"):
            pool.entry("d")

    run(test)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_random_requests_are_all_answered(most: int) -> None:
    """Some clients leave while they wait. No model is in memory twice, nor more models than may be."""
    rng = random.Random(most)

    async def test(pool: ModelPool, machine: Machine) -> None:
        async def pause(_: Entry) -> None:
            await asyncio.sleep(rng.random() * 0.004)

        tasks = []
        for _ in range(150):
            tasks.append(asyncio.create_task(ask(pool, rng.choice("abcd"), pause)))
            if rng.random() < 0.2:
                rng.choice(tasks).cancel()
            if rng.random() < 0.1:
                pool.unload(pool.entry(rng.choice("abcd")))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.003)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(one) for one in found} <= {type(None), asyncio.CancelledError}
        assert sum(one is None for one in found) > 100

    assert run(test, "abcd", most).most == most
