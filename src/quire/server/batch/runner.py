"""BatchRun: answers the lines of a batch, a bounded number at a time, and writes the results in order."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import BinaryIO, TypeVar

from quire.server.batch.answering import Answerer
from quire.server.batch.lines import Line, LineParser, Result
from quire.server.batch.results import Results
from quire.server.http.api_error import ApiError

T = TypeVar("T")
CHUNK = 2**20  # bytes that are read at a time
AHEAD = 8  # times the width: lines whose results may wait for an earlier one
SYNC_EVERY = 1.0  # seconds after which results are certainly on the disk


class BatchRun:
    """One run over the lines of a batch that have no result yet. Belongs to the event loop."""

    def __init__(
        self,
        answerer: Answerer,
        source: BinaryIO,
        parser: LineParser,
        results: Results,
        width: Callable[[], int],
        written: Callable[[int], object] = abs,
    ) -> None:
        """Create it.

        Args:
            answerer: answers the lines.
            source: the lines, from the first one without a result on.
            parser: their parser.
            results: receives the results.
            width: returns the most lines to answer at a time.
            written: called with the number of results that were written.
        """
        self._answerer = answerer
        self._source = source
        self._parser = parser
        self._results = results
        self._width = width
        self._written = written
        self._pending: deque[tuple[Line, asyncio.Task[Result]]] = deque()  # in order
        self._running: set[asyncio.Task[Result]] = set()
        self._room = asyncio.Event()
        self._came = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None
        self._refusal: ApiError | None = None  # the result of all lines that have none yet, once set

    async def run(self) -> None:
        """Answer all lines.

        Raises OSError if a file cannot be read or written, ApiError if the engine has stopped, and NotThisBatch if the
        weights were replaced.
        """
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(lambda _: self._came.set())
        synced = time.monotonic()
        try:
            while await self._has_next():
                await asyncio.wait([self._pending[0][1]])
                results = [*self._ended_ones()]
                self._answerer.check_weights()
                self._results.write(results)
                self._written(len(results))
                self._room.set()
                if time.monotonic() > synced + SYNC_EVERY:
                    await uninterrupted(self._results.sync)
                    synced = time.monotonic()
            await uninterrupted(self._results.sync)
        finally:
            self._reading.cancel()
            for task in self._running:
                task.cancel()
            await asyncio.gather(self._reading, *self._running, return_exceptions=True)

    def expire(self, refusal: ApiError) -> None:
        """Answer the lines that have no result yet with an error."""
        self._refusal = refusal
        self._abort()

    def cancel(self) -> None:
        """End without results for the lines that have none yet."""
        if self._reading is not None:
            self._reading.cancel()
        self._abort()

    def _abort(self) -> None:
        for task in self._running:
            task.cancel()
        self._room.set()

    def _ended_ones(self) -> Iterator[Result]:
        """Remove the first lines that have ended, and yield their results. Raises the error of one that failed."""
        while self._pending and self._pending[0][1].done():
            line, task = self._pending.popleft()
            if not task.cancelled():
                yield task.result()
            elif self._refusal is not None:
                yield line.failed(self._refusal)

    async def _has_next(self) -> bool:
        """Wait for a pending line. Return False after the last one."""
        while not self._pending:
            if self._reading is not None and self._reading.done():
                if not self._reading.cancelled():
                    self._reading.result()  # raises its error
                return False
            self._came.clear()
            await self._came.wait()
        return True

    async def _read(self) -> None:
        """Read the lines, and begin to answer each as soon as there is room."""
        async for raw in self._lines():
            line = self._parser.parse(raw)
            if line is None:
                continue
            while self._is_full():
                self._room.clear()
                await self._room.wait()
            task = asyncio.create_task(self._answerer.result(line))
            if self._refusal is not None:
                task.cancel()
            self._running.add(task)
            task.add_done_callback(self._leave)
            self._pending.append((line, task))
            self._came.set()

    def _is_full(self) -> bool:
        width = self._width()
        return len(self._running) >= width or len(self._pending) >= AHEAD * width

    def _leave(self, task: asyncio.Task[Result]) -> None:
        self._running.discard(task)
        self._room.set()

    async def _lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the source, each once all of it has come."""
        rest = b""
        read = getattr(self._source, "read1", self._source.read)
        while chunk := await asyncio.to_thread(read, CHUNK):
            *complete, rest = (rest + chunk).split(b"\n")
            for line in complete:
                yield line
        if rest:
            yield rest


async def prepared(
    answerer: Answerer, lines: BinaryIO, results: Results, endpoint: str | None = None
) -> tuple[LineParser, int]:
    """Go to the first line without a result. Return the parser of the lines from there on, and the number of all lines.

    Raises NotThisBatch if the results are those of another batch.
    """
    parser = await answerer.parser(endpoint)

    def prepare() -> int:
        lines.seek(0)
        total = sum(bool(line.strip()) for line in lines)
        lines.seek(0)
        lines.seek(results.resume(lines, parser))
        return total

    return parser, await uninterrupted(prepare)


async def uninterrupted(function: Callable[[], T]) -> T:
    """Run a function on another thread. If the caller is cancelled, the function still ends before it."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
