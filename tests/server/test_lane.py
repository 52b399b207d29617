"""Slow work waits for threads of its own, each client in its turn: grammars, long texts, chat templates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from quire.errors import RequestError
from quire.sandbox.grammar import num_trials
from quire.server.api import service as service_module
from quire.server.http.api_error import ApiError
from quire.server.http.bounded_executor import BoundedExecutor
from tests.server.serving import Serving, serving
from tests.server.test_robust import Client, until

# ------------------------------------------------------------------------------------------------------ a lane


class Work:
    """Pieces of work that each wait for the test, in the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._gates: dict[str, threading.Event] = {}

    def piece(self, name: str) -> Callable[[], str]:
        self._gates[name] = threading.Event()

        def work() -> str:
            self.begun.append(name)
            self._gates[name].wait(20)
            return name

        return work

    def end(self, name: str) -> None:
        self._gates[name].set()


async def came(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


def in_a_lane(test: Callable[[BoundedExecutor, Work], Awaitable[None]], num_threads: int, max_waiting: int) -> None:
    async def run() -> None:
        lane = BoundedExecutor("test", num_threads, max_waiting)
        await asyncio.wait_for(test(lane, Work()), 30)
        assert (lane.num_waiting, lane._num_free, len(lane._waiting)) == (0, num_threads, 0)
        lane.close()

    asyncio.run(run())


def test_clients_take_turns() -> None:
    async def run(lane: BoundedExecutor, work: Work) -> None:
        names = ["a0", "a1", "a2", "a3", "b0", "b1", "c0"]
        tasks = []
        for name in names:
            tasks.append(asyncio.create_task(lane.run(name[0], work.piece(name))))
            await asyncio.sleep(0)
        order = ["a0", "a1", "a2", "b0", "c0", "a3", "b1"]  # two at a time: the first two find free threads
        for name, count in zip(order, (2, 3, 4, 5, 6, 7, 7), strict=True):
            await came(lambda count=count: len(work.begun) == count)  # type: ignore[misc]
            work.end(name)
        assert await asyncio.gather(*tasks) == names
        assert sorted(work.begun[:2]) == ["a0", "a1"]
        assert work.begun[2:] == order[2:]

    in_a_lane(run, 2, 10)


def test_what_waits_is_bounded_for_each_client() -> None:
    async def run(lane: BoundedExecutor, work: Work) -> None:
        first = asyncio.create_task(lane.run("a", work.piece("first")))
        await came(lambda: work.begun == ["first"])
        one_large = asyncio.create_task(lane.run("a", work.piece("large"), 100))  # alone it may wait
        other = asyncio.create_task(lane.run("b", work.piece("other"), 4))
        await came(lambda: lane.num_waiting == 2)
        with pytest.raises(ApiError, match="1 requests of this client wait for their test") as caught:
            await lane.run("a", work.piece("more"))
        assert (caught.value.status, caught.value.headers) == (429, {"Retry-After": "1"})
        fits = asyncio.create_task(lane.run("b", work.piece("fits"), 6))
        await came(lambda: lane.num_waiting == 3)
        for name in ("first", "large", "other", "fits"):
            work.end(name)
        assert await asyncio.gather(first, one_large, other, fits) == ["first", "large", "other", "fits"]

    in_a_lane(run, 1, 10)


def test_who_goes_leaves_his_turn_but_what_has_begun_keeps_its_thread() -> None:
    async def run(lane: BoundedExecutor, work: Work) -> None:
        tasks = [asyncio.create_task(lane.run("a", work.piece(f"{i}"))) for i in range(4)]
        await came(lambda: lane.num_waiting == 3 and work.begun == ["0"])
        for i in (0, 1):
            tasks[i].cancel()
        await came(lambda: lane.num_waiting == 2 and tasks[0].done())
        assert work.begun == ["0"]
        work.end("0")
        await came(lambda: work.begun == ["0", "2"])
        work.end("2")
        tasks[3].cancel()
        assert await tasks[2] == "2"
        await came(lambda: lane._num_free == 1)

    in_a_lane(run, 1, 10)


def test_who_goes_as_his_turn_comes_hands_it_on() -> None:
    async def run(lane: BoundedExecutor, work: Work) -> None:
        first, second, third = (asyncio.create_task(lane.run("a", work.piece(name))) for name in "123")
        await came(lambda: lane.num_waiting == 2 and work.begun == ["1"])
        work.end("1")
        old = lane._leave

        def leave() -> None:
            old()
            second.cancel()  # it has been given the thread, and has not run since

        lane._leave = leave  # type: ignore[method-assign]
        await came(lambda: work.begun == ["1", "3"])
        work.end("3")
        assert (await first, await third, second.cancelled()) == ("1", "3", True)

    in_a_lane(run, 1, 10)


def test_what_work_raises_comes_back() -> None:
    async def run(lane: BoundedExecutor, work: Work) -> None:
        with pytest.raises(ZeroDivisionError):
            await lane.run("a", lambda: 1 // 0)
        await came(lambda: lane._num_free == 1)

    in_a_lane(run, 1, 1)


# -------------------------------------------------------------------------------------------------- in a server


class Gated:
    """Grammars that take until the gate opens, but for those that are known."""

    def __init__(self, known: tuple[str, ...] = ()) -> None:
        self.known = known
        self.gate = threading.Event()
        self.begun: list[str] = []

    def compile_if_quick(self, spec: Any) -> None:
        if spec.text in self.known:
            self.compile(spec)

    def compile(self, spec: Any) -> None:
        if spec.text not in self.known:
            self.begun.append(spec.text)
            self.gate.wait(30)
        raise RequestError(f"{spec.text} was looked at")

    def close(self) -> None:
        self.gate.set()


def gated(server: Serving, monkeypatch: pytest.MonkeyPatch, *known: str) -> Gated:
    made = Gated(known)
    monkeypatch.setattr(server.service.factory, "_grammars", made)
    return made


def test_known_grammars_of_one_client_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have threads of their own, for which clients wait in turns, and not those of everything else."""
    monkeypatch.setattr(service_module, "MAX_GRAMMARS", 3)
    with serving() as server:
        grammars = gated(server, monkeypatch)
        monkeypatch.setattr(grammars, "compile_if_quick", grammars.compile)
        count = service_module.MAX_QUICK_GRAMMARS
        clients = [Client(server, prompt="a", regex=f"[a-z]{i}") for i in range(count + 3)]
        until(lambda: server.service._quick_grammars.num_waiting == 3)
        assert len(grammars.begun) == count
        assert server.post("/v1/completions", prompt="a", max_tokens=1, regex="more").status == 429
        assert server.post("/v1/completions", prompt="a", max_tokens=1).status == 200
        grammars.gate.set()
        assert all(client.read().startswith(b"HTTP/1.1 400") for client in clients)


def test_a_lane_whose_thread_cannot_start_keeps_its_place() -> None:
    async def run(lane: BoundedExecutor, work: Work) -> None:
        submit = lane._pool.submit
        lane._pool.submit = lambda _: 1 // 0  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError):
            await lane.run("a", lambda: 1)
        lane._pool.submit = submit  # type: ignore[method-assign]
        assert await lane.run("a", lambda: 1) == 1

    in_a_lane(run, 1, 1)


def test_a_grammar_whose_client_has_gone_is_not_compiled(server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars, lane, count = gated(server, monkeypatch), server.service.compilers, num_trials()
    clients = [Client(server, prompt="a", regex=f"[a-z]{i}") for i in range(count + 4)]
    until(lambda: (len(grammars.begun), lane.num_waiting) == (count, 4))
    for client in clients:
        client.hang_up()
    until(lambda: lane.num_waiting == 0)
    late = Client(server, prompt="a", regex="late")
    until(lambda: lane.num_waiting == 1)  # those that had begun still have their threads
    grammars.gate.set()
    assert late.read().startswith(b"HTTP/1.1 400")
    assert (len(grammars.begun), grammars.begun[-1]) == (count + 1, "late")
    assert server.get("/health").status == 200


def test_known_grammars_do_not_wait_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait. The new ones of a client are bounded."""
    monkeypatch.setattr(service_module, "MAX_GRAMMARS", 3)
    with serving() as server:
        grammars, lane = gated(server, monkeypatch, "known"), server.service.compilers
        clients = [Client(server, prompt="a", regex=f"[a-z]{i}") for i in range(num_trials() + 3)]
        until(lambda: lane.num_waiting == 3)
        assert len(grammars.begun) == num_trials()  # side by side
        known = server.post("/v1/completions", prompt="a", max_tokens=1, regex="known")
        assert known.error()["message"] == "known was looked at"
        refused = server.post("/v1/completions", prompt="a", max_tokens=1, regex="new")
        assert (refused.status, refused.error()["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        for body in ({}, {"response_format": {"type": "text"}}):
            assert server.post("/v1/completions", prompt="a", max_tokens=1, **body).status == 200
        grammars.gate.set()
        assert [client.read().startswith(b"HTTP/1.1 400") for client in clients] == [True] * len(clients)


def test_a_client_with_many_grammars_does_not_fill_the_others_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys take turns, whatever cache_salt they give."""
    monkeypatch.setattr(service_module, "num_trials", lambda: 1)
    monkeypatch.setattr(service_module, "MAX_GRAMMARS", 4)
    with serving(api_key=("one", "two")) as server, ThreadPoolExecutor(9) as pool:
        grammars, lane = gated(server, monkeypatch), server.service.compilers

        def ask(key: str, regex: str, count: int) -> Any:
            body = {"prompt": "a", "max_tokens": 1, "regex": regex, "cache_salt": regex}
            asked = pool.submit(server.ask, "POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"})
            until(lambda: len(grammars.begun) + lane.num_waiting == count or asked.done())
            return asked

        many = [ask("one", f"1{i}", i + 1) for i in range(5)]
        assert ask("one", "15", 5).result().status == 429
        few = [ask("two", f"2{i}", 6 + i) for i in range(2)]
        grammars.gate.set()
        assert [asked.result().status for asked in (*many, *few)] == [400] * 7
        assert grammars.begun == ["10", "11", "20", "12", "21", "13", "14"]


def test_one_clients_templates_do_not_fill_the_threads_that_others_need(
    server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of asyncio, of which there are few, and those for long texts."""
    gate, begun, most = threading.Event(), threading.Semaphore(0), service_module.MAX_TEMPLATES

    def render(*_: Any, **__: Any) -> str:
        begun.release()
        gate.wait(30)
        return "a"

    monkeypatch.setattr(server.service.model.template, "render", render)
    say = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    clients = [Client(server, "/v1/chat/completions", **say) for _ in range(40)]
    assert all(begun.acquire(timeout=20) for _ in range(most))
    until(lambda: server.service._templates.num_waiting == 40 - most)
    assert server.post("/tokenize", prompt="a" * 10_000).status == 200
    body = {"prompt": "a", "max_tokens": 1, "response_format": {"type": "json_object"}}
    assert server.post("/v1/completions", **body).status == 200
    gate.set()
    assert all(client.read().startswith(b"HTTP/1.1 200") for client in clients)
