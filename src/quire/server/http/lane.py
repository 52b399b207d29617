"""Lanes: slow work on threads of its own, a few pieces at a time, each client in its turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import TypeVar

from quire.server.http.api_error import ApiError

T = TypeVar("T")


class Lane:
    """Threads for one kind of work. Who finds them busy waits; clients that wait take turns, whatever each has asked.

    It belongs to the event loop; the functions run on the threads.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        """max_waiting: weight that may wait at a time for each client."""
        self._pool = ThreadPoolExecutor(num_threads, f"quire-{name}")
        self._name = name
        self._num_free = num_threads
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()  # the next one first

    @property
    def num_waiting(self) -> int:
        """Pieces of work that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def run(self, client: str, function: Callable[[], T], weight: int = 1) -> T:
        """What a function returns or raises. One that has begun keeps its thread even if no one waits for it any more.

        weight: of what is held while it waits. Raises ApiError (429) where too much of this client's waits already.
        """
        if self._num_free:
            self._num_free -= 1
        else:
            await self._turn(client, weight)
        loop = asyncio.get_running_loop()

        def done(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._leave)

        try:
            work = self._pool.submit(function)
        except BaseException:  # no thread can be started, or the lane is closed
            self._leave()
            raise
        work.add_done_callback(done)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, client: str, weight: int) -> None:
        """Wait for a thread, and take it."""
        queue = self._waiting.get(client, deque())
        if queue and sum(each for _, each in queue) + weight > self._max_waiting:
            raise ApiError(
                f"{len(queue)} requests of this client wait for their {self._name} already, which is as many as may; "
                f"try again later",
                HTTPStatus.TOO_MANY_REQUESTS,
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self._waiting[client] = queue
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append((turn, weight))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(client, turn)
            else:  # it had just been given the thread
                self._leave()
            raise

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        """Take out who waits no more."""
        queue = deque(each for each in self._waiting.get(client, ()) if each[0] is not turn)
        if queue:
            self._waiting[client] = queue
        else:
            self._waiting.pop(client, None)

    def _leave(self) -> None:
        """A thread is free: it is the next client's who waits, and he comes last again."""
        self._num_free += 1
        while self._num_free and self._waiting:
            client, queue = self._waiting.popitem(last=False)
            turn, _ = queue.popleft()
            if queue:
                self._waiting[client] = queue
            if not turn.done():  # else it was just cancelled
                self._num_free -= 1
                turn.set_result(None)
