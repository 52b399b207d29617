"""Lanes: slots and threads for slow work, shared fairly by clients."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TypeVar

from quire.server.http.api_error import ApiError

T = TypeVar("T")


class Lane:
    """Slots for one kind of work. If all are taken, work waits, and the waiting clients take turns.

    It belongs to the event loop.
    """

    def __init__(self, name: str, num_slots: int, max_waiting: int) -> None:
        """Create the slots. max_waiting: the total weight of each client's waiting work."""
        self._name = name
        self._num_free = num_slots
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, deque[tuple[asyncio.Future[None], int]]] = OrderedDict()  # the next one first

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def slot(self, client: str, weight: int = 1) -> AsyncIterator[None]:
        """Wait for a slot, and hold it.

        weight: the cost of the data held while it waits. Raises ApiError (429) if too much work of this client waits.
        """
        await self._enter(client, weight)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, client: str, weight: int) -> None:
        if self._num_free:
            self._num_free -= 1
        else:
            await self._turn(client, weight)

    async def _turn(self, client: str, weight: int) -> None:
        """Wait for a slot, and take it."""
        queue = self._waiting.get(client, deque())
        if queue and sum(each for _, each in queue) + weight > self._max_waiting:
            raise ApiError(
                f"{len(queue)} requests of this client wait for their {self._name} already, which is the limit; "
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
            else:  # it had just received the slot
                self._leave()
            raise

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        """Remove a cancelled call from the queue."""
        queue = deque(each for each in self._waiting.get(client, ()) if each[0] is not turn)
        if queue:
            self._waiting[client] = queue
        else:
            self._waiting.pop(client, None)

    def _leave(self) -> None:
        """Give a free slot to the next waiting client, which then moves to the end of the queue."""
        self._num_free += 1
        while self._num_free and self._waiting:
            client, queue = self._waiting.popitem(last=False)
            turn, _ = queue.popleft()
            if queue:
                self._waiting[client] = queue
            if not turn.done():  # otherwise it was just cancelled
                self._num_free -= 1
                turn.set_result(None)


class BoundedExecutor(Lane):
    """A lane whose slots are threads: the functions run on them."""

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        """Create the threads. max_waiting: the total weight of each client's waiting work."""
        super().__init__(name, num_threads, max_waiting)
        self._pool = ThreadPoolExecutor(num_threads, f"quire-{name}")

    async def run(self, client: str, function: Callable[[], T], weight: int = 1) -> T:
        """Run a function on a thread, and return its result. A started function runs to its end even if cancelled.

        weight: the cost of the data held while it waits. Raises ApiError (429) if too much work of this client waits.
        """
        await self._enter(client, weight)
        loop = asyncio.get_running_loop()

        def done(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._leave)

        try:
            work = self._pool.submit(function)
        except BaseException:  # if no thread can be started, or the executor is closed
            self._leave()
            raise
        work.add_done_callback(done)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Start no further work."""
        self._pool.shutdown(wait=False, cancel_futures=True)
