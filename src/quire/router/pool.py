"""ModelPool: which models are in memory. A model is loaded for its first request and unloaded when it is idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Protocol

from quire.errors import ModelError, QuireError
from quire.server.http.api_error import ApiError, shown

log = logging.getLogger("quire.router")


class State(Enum):
    """The state of a model. A leaving one takes no further request, and is unloaded when its answers have ended."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "unloading"


class Process(Protocol):
    """The server of one model."""

    url: str

    def stop(self, timeout: float) -> None:
        """End it; kill it after `timeout` seconds."""


@dataclass(eq=False)
class Entry:
    """A model of the pool."""

    name: str
    state: State = State.UNLOADED
    process: Process | None = None
    loading: asyncio.Task[None] | None = None
    num_waiting: int = 0  # requests that wait until it is loaded
    num_open: int = 0  # requests that are being answered
    last_used: float = 0.0  # seconds of the pool's clock, end of its last request
    num_loads: int = 0

    @property
    def url(self) -> str:
        """The address of its server."""
        return "" if self.process is None else self.process.url


class ModelPool:
    """Loads models for requests, at most `max_loaded` at a time. It belongs to the event loop."""

    def __init__(
        self,
        names: Mapping[str, object],
        start: Callable[[str, Callable[[int], None]], Process],
        *,
        max_loaded: int,
        idle_timeout: float,
        stop_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a pool without a loaded model.

        start: starts the server of a model and returns when it listens; called on a thread, with a function for the
        exit status of a server that ends without `stop`. Raises QuireError if it does not start. max_loaded: 0 is no
        limit. idle_timeout: seconds without a request until a model is unloaded; 0: never. stop_timeout: seconds that
        a server gets to end.
        """
        self.entries = {name: Entry(name) for name in names}
        self._start = start
        self._most = max_loaded or len(self.entries)
        self._idle_timeout = idle_timeout
        self._stop_timeout = stop_timeout
        self._clock = clock
        self._lacking: list[Entry] = []  # models that wait for room, in order
        self._changed = asyncio.Event()
        self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    def entry(self, name: str) -> Entry:
        """Return a model. Raises ApiError for an unknown name."""
        found = self.entries.get(name) or self.entries.get(name.removesuffix(":latest"))
        if found is None:
            names = ", ".join(self.entries)
            message = f"there is no model {shown(name)}; the models of this router are {names}"
            raise ApiError(message, HTTPStatus.NOT_FOUND, param="model", code="model_not_found")
        return found

    async def acquire(self, entry: Entry) -> None:
        """Wait until a model is loaded, and count a request of it. Call `release` at the request's end.

        Raises ApiError if the model cannot be loaded.
        """
        entry.num_waiting += 1
        try:
            while entry.state is not State.LOADED:
                if self._is_closed:
                    raise ApiError("the router is stopping", HTTPStatus.SERVICE_UNAVAILABLE, code="stopping")
                if entry.loading is not None:
                    await asyncio.shield(entry.loading)
                elif entry.state is State.UNLOADED and self._has_room(entry):
                    entry.state, entry.loading = State.LOADING, self._spawn(self._load(entry))
                else:
                    await self._changed.wait()
            entry.num_open += 1
        finally:
            entry.num_waiting -= 1
            if entry.num_waiting == 0 and self._lacking:  # it may leave now; or its clients have gone
                self._lacking = [one for one in self._lacking if one is not entry]
                self._notify()

    def release(self, entry: Entry) -> None:
        """Count the end of a request."""
        entry.num_open -= 1
        entry.last_used = self._clock()
        self._unload_if_free(entry)

    def unload(self, entry: Entry) -> None:
        """Unload a model when its open requests have ended. One that is not loaded is left alone."""
        if entry.state is State.LOADED:
            entry.state = State.LEAVING
            self._unload_if_free(entry)

    def unload_idle(self) -> None:
        """Unload the models without a request for the idle timeout. Call it every now and then."""
        now = self._clock()
        for entry in self.entries.values():
            if self._idle_timeout and entry.num_open == 0 and now - entry.last_used >= self._idle_timeout:
                self.unload(entry)

    async def close(self) -> None:
        """End all servers. Requests that wait for a model fail."""
        self._is_closed = True
        self._notify()
        for entry in self.entries.values():
            entry.num_open = 0
            if entry.loading is not None:
                await asyncio.wait([entry.loading])
            self.unload(entry)
            self._unload_if_free(entry)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _has_room(self, entry: Entry) -> bool:
        """Return whether a model can be loaded now. If not, make the one that was idle longest leave."""
        if entry not in self._lacking:
            self._lacking.append(entry)
        states = [one.state for one in self.entries.values()]
        num_free = self._most - len(states) + states.count(State.UNLOADED)
        if self._lacking.index(entry) < num_free:
            self._lacking.remove(entry)
            return True
        # Not one that was loaded just now, for requests that have not seen it yet.
        loaded = [one for one in self.entries.values() if one.state is State.LOADED and one.num_waiting == 0]
        if loaded and num_free + states.count(State.LEAVING) < len(self._lacking):
            self.unload(min(loaded, key=lambda one: (one.num_open > 0, one.last_used)))
        return False

    async def _load(self, entry: Entry) -> None:
        loop, statuses = asyncio.get_running_loop(), list[int]()

        def on_end(status: int) -> None:
            statuses.append(status)
            loop.call_soon_threadsafe(self._ended, entry, status)

        try:
            entry.process = await asyncio.to_thread(self._start, entry.name, on_end)
            if statuses:  # it listened, and ended before this line
                entry.process = None
                raise ModelError(f"its server ended with status {statuses[0]}")
        except QuireError as error:
            entry.state = State.UNLOADED
            message = f"model {entry.name} cannot be loaded: {error}"
            raise ApiError(message, HTTPStatus.SERVICE_UNAVAILABLE, code="model_not_loaded") from error
        except BaseException:
            entry.state = State.UNLOADED
            raise
        else:
            entry.state, entry.last_used = State.LOADED, self._clock()
            entry.num_loads += 1
        finally:
            entry.loading = None
            self._notify()

    def _ended(self, entry: Entry, status: int) -> None:
        """Note a server that ended without `stop`: its open requests fail, and the next one starts it again."""
        if entry.process is not None and entry.state in (State.LOADED, State.LEAVING):
            log.error("the server of model %s ended with status %d", entry.name, status)
            entry.process, entry.state = None, State.UNLOADED
            self._notify()

    def _unload_if_free(self, entry: Entry) -> None:
        process = entry.process
        if entry.state is State.LEAVING and entry.num_open == 0 and process is not None:
            entry.process = None
            self._spawn(self._stop(entry, process))

    async def _stop(self, entry: Entry, process: Process) -> None:
        try:
            await asyncio.to_thread(process.stop, self._stop_timeout)
        finally:
            entry.state = State.UNLOADED
            self._notify()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a request that waits for it raises it

    def _notify(self) -> None:
        """Wake all that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()
