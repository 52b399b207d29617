"""The block inspector: records of the cache's events, for a page that draws them.

A watcher gets a snapshot of all block tables, then records of the events since then, at most one every INTERVAL
seconds; from these it can rebuild every table. Without a watcher, events are only logged, so that a snapshot can show
the requests' earlier events.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from fastapi import APIRouter
from starlette.responses import Response

from quire.cache.groups import CacheGroup, RowGroup, StateGroup
from quire.engine.engine import Engine
from quire.errors import EngineStopped
from quire.frontend.jobs import EngineStep
from quire.request import Event
from quire.server.http.api_error import ApiError
from quire.server.http.sse import STILL_HERE, EventStream, dumps
from quire.server.observability.event_log import (
    MAX_UNREPORTED,
    EventLog,
    TrackedRequest,
    drafts_of,
    family,
    plain,
    shorten,
)
from quire.server.observability.page import HEARTBEAT, MAX_WATCHERS, PAGES, page_at

log = logging.getLogger("quire.server")

INTERVAL = 0.05  # seconds from one record to the next
MAX_HISTORY = 400_000  # bytes of earlier events that a snapshot includes
MAX_OUTSTANDING = 4 * 2**20  # bytes that may be on their way to a watcher; beyond, it gets no records
KINDS = {CacheGroup: "attention", StateGroup: "states", RowGroup: "rows"}
MAX_KEYS = 32  # of those that keep blocks
PATIENCE = 0.2  # seconds after which a stream requests a record of unreported events
T = TypeVar("T")


class Watcher:
    """One reader of the stream."""

    def __init__(self, deliver: Callable[[bytes], None]) -> None:
        """Create it. `deliver` accepts a part of the stream, on the engine's thread; an empty part is the end."""
        self.deliver = deliver
        self.gone = False  # set by the reader when it has disconnected
        self.num_taken = 0  # bytes; counted by the reader
        self.num_delivered = 0  # bytes; counted by Inspector
        self.missed = False  # set by Inspector if records were left out, so that a snapshot is next


class Inspector:
    """Reports the events of an engine to watchers. Call methods on the engine's thread, unless they state otherwise."""

    def __init__(
        self, engine: Engine, about: Mapping[str, str | int] | None = None, reports_salts: bool = True
    ) -> None:
        """Create it. about: properties of the server that the page shows, such as the model's name.

        reports_salts: whether a miss may reveal that the same text is cached under another salt, and the names of keys
        that keep blocks are shown. False if clients must not learn about each other, since each of them may watch.
        """
        self._scheduler = engine.scheduler
        self._reports_salts = reports_salts
        self._about = dict(about or {})
        self._log = EventLog(engine, reports_salts)
        self._epoch = time.time() - self._log.now
        self._history: deque[bytes] = deque()  # reported events
        self._history_size = 0  # bytes
        self._watchers: list[Watcher] = []
        self._number = 0  # of the last record
        self._next_flush = 0.0
        self._closed = False

    @property
    def has_news(self) -> bool:
        """True if there are unreported events. Any thread may read it."""
        return len(self._log) > 0

    def observe_step(self, step: EngineStep) -> None:
        """Log the events of an engine's step."""
        self.observe(step.events)

    def observe(self, events: Sequence[Event]) -> None:
        """Log the events of a step, and send a record to the watchers if it is time."""
        self._log.observe(events)
        if self._watchers and (time.monotonic() >= self._next_flush or len(self._log) > MAX_UNREPORTED // 2):
            self.flush()

    def subscribe(self, watcher: Watcher) -> None:
        """Send a watcher a snapshot, and then every record.

        Raises ApiError (503) if there are too many watchers already.
        """
        self.flush()  # first, so that the other watchers also get the events that the snapshot includes
        if len(self._watchers) >= MAX_WATCHERS:
            raise ApiError(f"{MAX_WATCHERS} watch the blocks already", HTTPStatus.SERVICE_UNAVAILABLE, code="watched")
        self._watchers.append(watcher)
        self._deliver(watcher, self._snapshot())
        if self._closed:
            self._hand(watcher, b"")

    def unsubscribe(self, watcher: Watcher) -> None:
        """Stop sending to a watcher. Any thread may call it."""
        watcher.gone = True

    def close(self) -> None:
        """End the streams of all current and future watchers. Any thread may call it."""
        self._closed = True
        for watcher in tuple(self._watchers):
            self._hand(watcher, b"")

    def flush(self) -> None:
        """Send the watchers a record of the events since the last one."""
        self._watchers = [watcher for watcher in self._watchers if not watcher.gone]
        if not self._watchers:
            return
        self._next_flush = time.monotonic() + INTERVAL
        if len(self._log) == MAX_UNREPORTED:  # events may be lost
            for watcher in self._watchers:
                watcher.missed = True
        events, numbers = self._take(), self._log.numbers()
        if events or numbers:
            self._number += 1
            head = {"kind": "record", "id": self._number, "time": self._log.now}
            head |= {"requests": numbers, "gauges": self._gauges()}
            record = self._part(head, "events", events)
            for watcher in self._watchers:
                on_its_way = watcher.num_delivered - watcher.num_taken
                watcher.missed |= on_its_way + len(record) > MAX_OUTSTANDING
                if not watcher.missed:
                    self._deliver(watcher, record)
        late = [w for w in self._watchers if w.missed and w.num_taken == w.num_delivered]
        snapshot = self._snapshot() if late else b""
        for watcher in late:
            watcher.missed = False
            self._deliver(watcher, snapshot)

    def _deliver(self, watcher: Watcher, part: bytes) -> None:
        watcher.num_delivered += len(part)
        self._hand(watcher, part)

    def _hand(self, watcher: Watcher, part: bytes) -> None:
        try:
            watcher.deliver(part)
        except Exception as error:  # such as a closed event loop
            log.debug("a watcher is let go: %s", error)
            watcher.gone = True

    def _take(self) -> list[bytes]:
        """Return the events since the last record, and add them to the history."""
        lines = self._log.take()
        self._history += lines
        self._history_size += sum(map(len, lines))
        while self._history_size > MAX_HISTORY:
            self._history_size -= len(self._history.popleft())
        return lines

    def _part(self, head: Mapping[str, Any], name: str, lines: Iterable[bytes]) -> bytes:
        """Return a server-sent event with the head's fields and, under `name`, the lines, which are already JSON."""
        start = f"id: {self._number}\ndata: ".encode() + dumps(head)[:-1]
        return start + f',"{name}":['.encode() + b",".join(lines) + b"]}\n\n"

    def _kept(self) -> list[tuple[str, int, float]]:
        """Return the keys that keep most blocks: each with its number of blocks, and the seconds that are left."""
        manager = self._scheduler.manager
        found = manager.retained[manager.lookup.leading_group].owners()
        most = sorted(found, key=lambda one: one[1], reverse=True)[:MAX_KEYS]
        named = self._reports_salts
        return [(one.key if named else "", count, round(until - manager.now, 1)) for one, count, until in most]

    def _gauges(self) -> dict[str, Any]:
        """Return the numbers of requests, the counters so far, and the keys that keep blocks."""
        scheduler, hits = self._scheduler, self._scheduler.manager.hits
        return {
            "waiting": len(scheduler.waiting),
            "running": len(scheduler.running),
            "swapped": len(scheduler.swapped),
            "preemptions": scheduler.num_preemptions,
            "generated_tokens": self._log.num_generated_tokens,
            "prompt_tokens": self._log.num_prompt_tokens,  # computed
            "drafted_tokens": 0 if scheduler.speculation is None else scheduler.speculation.num_draft_tokens,
            "accepted_tokens": 0 if scheduler.speculation is None else scheduler.speculation.num_right,
            "hits": hits.hits,
            "partial_hits": hits.partial_hits,
            "misses": hits.misses,
            "asked_tokens": hits.prompt_tokens,
            "cached_tokens": hits.cached_tokens,  # of those asked for
            "kept": self._kept(),
            **self._log.counts,
        }

    def _snapshot(self) -> bytes:
        """Return a snapshot: the current block tables, and the history."""
        self._take()
        self._log.numbers()
        scheduler, manager = self._scheduler, self._scheduler.manager
        cached = [sorted(index.by_block) for index in manager.indexes]
        head = {
            "kind": "snapshot",
            "id": self._number,
            "time": self._log.now,
            "epoch": round(self._epoch, 3),
            "about": self._about,
            "config": {
                "block_size": manager.block_size,
                "num_blocks": manager.num_blocks,
                "num_host_blocks": sum(pool.num_blocks for pool in manager.host_pools),
                "kinds": [KINDS[type(group)] for group in manager.groups],
                "pools": [pool.num_blocks for pool in manager.pools],
                "hosts": [pool.num_blocks for pool in manager.host_pools],
                "spans": manager.spans,  # tokens of a block
                "windows": [group.window for group in manager.groups],
                "layers": [len(group.layers) for group in manager.groups],
                "max_num_seqs": scheduler.max_num_seqs,
                "max_model_len": scheduler.max_model_len,
                "prefix_caching": manager.enable_prefix_caching,
            },
            "requests": [self._books_of(tracked) for tracked in self._log.requests.values()],
            "cached": [shorten(blocks) for blocks in cached],
            "before": [  # of each cached block: one more than the block before it, or 0
                shorten([0 if (b := index.block_before(block)) is None else b + 1 for block in blocks])
                for index, blocks in zip(manager.indexes, cached, strict=True)
            ],
            "gauges": self._gauges(),
        }
        return self._part(head, "history", self._history)

    def _books_of(self, tracked: TrackedRequest) -> dict[str, Any]:
        request, manager = tracked.request, self._scheduler.manager
        return {
            "key": request.schedule.ordinal,
            "id": request.id,
            "sample": request.sample_index,
            "family": family(request),
            "state": tracked.state,
            "prompt": request.num_prompt,
            "limit": self._scheduler.longest(request),
            "generated": request.num_generated,
            "stored": max(request.cache.num_computed, request.cache.num_cached),
            "report": plain(self._log.report(request)),
            "times": [tracked.arrived, tracked.ran, tracked.spoke],
            "given": request.cache.num_freed,
            "drafts": drafts_of(request),
            "tables": [shorten(manager.owned(request, g)) for g in range(len(request.cache.block_ids))],
            "hosts": [shorten(table) for table in request.cache.host_block_ids],
        }


# ------------------------------------------------------------------------------------------------------- HTTP


class EngineThread(Protocol):
    """The routes' interface to AsyncLLM."""

    def call(self, function: Callable[[], T]) -> Coroutine[Any, Any, T]:
        """Run a function on the engine's thread, between two steps. Raises EngineStopped."""


def router(inspector: Inspector, engine: EngineThread) -> APIRouter:
    """Return GET /inspector, the page, /inspector/events, its stream, and /inspector/demo, a sample recording."""
    routes = APIRouter()
    page = page_at(PAGES / "inspector.html")
    demo = (PAGES / "demo.json.gz").read_bytes()

    @routes.get("/inspector", include_in_schema=False)
    async def inspector_page() -> Response:
        return page

    @routes.get("/inspector/demo", include_in_schema=False)
    async def inspector_demo() -> Response:
        return Response(demo, media_type="application/json", headers={"Content-Encoding": "gzip"})

    @routes.get("/inspector/events", include_in_schema=False)
    async def inspector_events() -> Response:
        reader = _Reader(inspector, engine)
        try:
            await engine.call(partial(inspector.subscribe, reader.watcher))
        except BaseException:
            reader.leave()
            raise
        return EventStream(reader.parts(), reader.leave)

    return routes


class _Reader:
    """A watcher's stream on the event loop."""

    def __init__(self, inspector: Inspector, engine: EngineThread) -> None:
        self.watcher = Watcher(self._deliver)
        self._inspector, self._engine = inspector, engine
        self._loop = asyncio.get_running_loop()
        self._parts: deque[bytes] = deque()
        self._wake = asyncio.Event()

    def _deliver(self, part: bytes) -> None:
        """Queue a part. Called on the engine's thread."""
        self._parts.append(part)
        self._loop.call_soon_threadsafe(self._wake.set)

    def leave(self) -> None:
        """End the stream."""
        self._inspector.unsubscribe(self.watcher)
        self._wake.set()

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield each part after its delivery."""
        last = time.monotonic()
        while not self.watcher.gone:
            if self._parts:
                part = self._parts.popleft()
                if not part:
                    return
                yield part
                self.watcher.num_taken += len(part)
                last = time.monotonic()
                continue
            self._wake.clear()
            if self._parts:
                continue
            try:
                await asyncio.wait_for(self._wake.wait(), PATIENCE)
            except asyncio.TimeoutError:
                if (self._inspector.has_news or self.watcher.missed) and not await self._flush():
                    return
                if time.monotonic() - last >= HEARTBEAT:
                    last = time.monotonic()
                    yield STILL_HERE

    async def _flush(self) -> bool:
        """Request a record after a silence. Return False if the engine will not run again."""
        try:
            await asyncio.wait_for(self._engine.call(self._inspector.flush), HEARTBEAT)
        except asyncio.TimeoutError:
            return True  # the engine is in a long step
        except EngineStopped:
            return False
        return True
