"""Batches: runs the batches of a server's store, each until it has ended, also after the server was killed."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.server.api.service import Service
from quire.server.batch.answering import Answerer
from quire.server.batch.results import NotThisBatch, Results
from quire.server.batch.runner import BatchRun, prepared
from quire.server.batch.store import BATCH, FILE, OPEN, Store, result_files
from quire.server.http.api_error import ApiError, shown
from quire.server.protocol.batches import Batch, BatchError, BatchRequest, File

log = logging.getLogger("quire.server")

WINDOW = re.compile(r"(\d+)([smhd])")
SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
MOST_OPEN = 32  # batches of a key at a time; each holds three open files, and answers at least one line
MOST_STORED = 100 * 2**30  # bytes of the files of a key, after which it can upload no more
AGAIN = 10.0  # seconds after which a batch whose files cannot be written, such as on a full disk, is tried again


@dataclass
class _Open:
    """A batch that has not ended."""

    owner: str
    batch: Batch
    task: asyncio.Task[None] | None = None
    run: BatchRun | None = None
    results: Results | None = None
    has_expired: bool = False
    total: int = field(default=0)

    def shown(self) -> Batch:
        """Return the batch with the counts of now."""
        if self.results is None:
            return self.batch
        counts = self.results
        return {
            **self.batch,
            "request_counts": {"total": self.total, "completed": counts.num_answers, "failed": counts.num_errors},
        }


class Batches:
    """The batches of a server. Belongs to the event loop."""

    def __init__(self, service: Service, store: Store) -> None:
        self.store = store
        self._service = service
        self._open: dict[str, _Open] = {}  # by id

    def start(self) -> None:
        """Continue the batches that have not ended."""
        for owner, batch in self.store.batches():
            if batch["status"] in OPEN:
                self._begin(_Open(owner, batch))

    async def stop(self) -> None:
        """Stop. Those that have not ended continue at the next start."""
        tasks = [one.task for one in self._open.values() if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    def create(self, owner: str, body: BatchRequest) -> Batch:
        """Create a batch and begin with it. Raises ApiError for an unknown file or too many batches, and OSError."""
        self.file(owner, body.input_file_id, "input_file_id")
        self.check_room(owner)
        if sum(one.owner == owner for one in self._open.values()) >= MOST_OPEN:
            message = f"{MOST_OPEN} batches of this key have not ended, the most at a time; wait for one, or cancel it"
            raise ApiError(message, HTTPStatus.TOO_MANY_REQUESTS, code="too_many_batches")
        count, unit = WINDOW.fullmatch(body.completion_window).groups()  # type: ignore[union-attr]
        now = int(time.time())
        batch: Batch = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": body.endpoint,
            "model": self._service.model.names[0],
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "in_progress_at": None,
            "expires_at": now + int(count) * SECONDS[unit],
            "finalizing_at": None,
            "completed_at": None,
            "failed_at": None,
            "expired_at": None,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata,
        }
        self.store.put(owner, batch)
        self._begin(_Open(owner, batch))
        return batch

    def get(self, owner: str, name: str) -> Batch:
        """Return a batch. Raises ApiError (404)."""
        if name in self._open and self._open[name].owner == owner:
            return self._open[name].shown()
        found: Batch | None = self.store.get(owner, BATCH, name)
        if found is None:
            raise ApiError(f"there is no batch {shown(name)} of this key here", HTTPStatus.NOT_FOUND, param="batch_id")
        return found

    def cancel(self, owner: str, name: str) -> Batch:
        """Cancel a batch: lines without a result get none. Raises ApiError if it has ended, and OSError."""
        batch = self.get(owner, name)
        if batch["status"] not in OPEN:
            message = f"the batch {name} is {batch['status']}; only one that has not ended can be cancelled"
            raise ApiError(message, HTTPStatus.CONFLICT, param="batch_id")
        one = self._open[name]
        if batch["status"] != "cancelling":
            one.batch = {**one.batch, "status": "cancelling", "cancelling_at": int(time.time())}
            self.store.put(owner, one.batch)
            if one.run is not None:
                one.run.cancel()
        return one.shown()

    def file(self, owner: str, name: str, param: str = "file_id") -> File:
        """Return a file. Raises ApiError (404), which names a field."""
        found: File | None = self.store.get(owner, FILE, name)
        if found is None:
            raise ApiError(f"there is no file {shown(name)} of this key here", HTTPStatus.NOT_FOUND, param=param)
        return found

    def delete(self, owner: str, name: str) -> None:
        """Delete a file. Raises ApiError for one that is unknown or that a batch still reads, and OSError."""
        self.file(owner, name)
        for one in self._open.values():
            if one.batch["input_file_id"] == name:
                message = f"the file {name} is the input of {one.batch['id']}, which has not ended; cancel that first"
                raise ApiError(message, HTTPStatus.CONFLICT, param="file_id")
        self.store.delete(name)

    # ------------------------------------------------------------------------------------------------- one batch

    def _begin(self, one: _Open) -> None:
        self._open[one.batch["id"]] = one
        one.task = asyncio.create_task(self._work(one))

    def _width(self) -> int:
        """Return the most lines of a batch that are answered at a time. A quarter of the slots is for live requests."""
        return max(1, self._service.engine_client.num_slots()[0] * 3 // 4 // max(1, len(self._open)))

    async def _work(self, one: _Open) -> None:
        """Answer a batch to its end. While its files cannot be written it waits, unless it has no more to answer."""
        while True:
            try:
                try:
                    await self._answer(one)
                    break
                except NotThisBatch:  # of other weights, another model or version: all results are to be of one system
                    for name in result_files(one.batch["id"]):
                        self.store.content(name).unlink(missing_ok=True)
                    continue
            except Exception as error:
                cause = error.__cause__ if isinstance(error, ConfigError) else error  # of a file that cannot be made
                if isinstance(cause, OSError):
                    if self._is_over(one, cause):
                        break
                    message = "%s waits %g s, since %s cannot be written: %s"
                    log.warning(message, one.batch["id"], AGAIN, cause.filename, cause.strerror)
                    await asyncio.sleep(AGAIN)
                    continue
                cause = None if isinstance(error, ApiError) else error  # an ApiError: the engine has been stopped
                message = "%s stopped: %s; it continues when the server is started again"
                log.error(message, one.batch["id"], error, exc_info=cause)
                return
        del self._open[one.batch["id"]]

    def _is_over(self, one: _Open, error: OSError) -> bool:
        """End a batch that is cancelled, has expired or lacks its input, with its results. Return False for others."""
        one.has_expired = one.has_expired or time.time() >= one.batch["expires_at"]
        lacks_input = (
            isinstance(error, FileNotFoundError) and not self.store.content(one.batch["input_file_id"]).exists()
        )
        try:
            if one.has_expired or one.batch["status"] == "cancelling" or lacks_input:
                self._end(one, lacks_input=lacks_input)
                return True
        except OSError as error:
            log.warning("%s has ended, but %s cannot be written: %s", one.batch["id"], error.filename, error.strerror)
        return False

    async def _answer(self, one: _Open) -> None:
        """Answer the lines without a result, and store the end. Raises OSError, NotThisBatch, and ApiError (503)."""
        answers, errors = (self.store.content(name) for name in result_files(one.batch["id"]))
        one.results = results = Results(answers, errors)
        answerer = Answerer(self._service, one.owner)
        try:
            with self.store.content(one.batch["input_file_id"]).open("rb") as lines:
                parser, one.total = await prepared(answerer, lines, results, one.batch["endpoint"])
                if one.total and one.batch["status"] != "cancelling":
                    one.batch = {**one.batch, "status": "in_progress"}
                    one.batch["in_progress_at"] = one.batch["in_progress_at"] or int(time.time())
                    self.store.put(one.owner, one.batch)
                    one.run = BatchRun(answerer, lines, parser, results, self._width)
                    delay = max(0.0, one.batch["expires_at"] - time.time())
                    timer = asyncio.get_running_loop().call_later(delay, self._expire, one)
                    try:
                        await one.run.run()
                    finally:
                        timer.cancel()
            self._end(one)
        finally:
            if one.run is not None:
                one.batch = one.shown()
            one.run = one.results = None
            results.close(drop_empty_errors=True)

    def _expire(self, one: _Open) -> None:
        one.has_expired = True
        window = one.batch["completion_window"]
        if one.run is not None:
            message = f"it was not answered within the completion_window, which was {window}"
            one.run.expire(ApiError(message, HTTPStatus.GATEWAY_TIMEOUT, code="batch_expired"))

    def _end(self, one: _Open, *, lacks_input: bool = False) -> None:
        """Store the end of a batch and its files, at once. Raises OSError."""
        now = int(time.time())
        paths = (self.store.content(name) for name in result_files(one.batch["id"]))
        files = [
            _file(path.name, f"{one.batch['id']}_{kind}.jsonl", _size(path), "batch_output", now)
            for path, kind in zip(paths, ("output", "error"), strict=True)
        ]
        made: list[Any] = [one_file for one_file in files if one_file["bytes"]]
        ids = [one_file["id"] if one_file["bytes"] else None for one_file in files]
        batch: Batch = {**one.shown(), "output_file_id": ids[0], "error_file_id": ids[1]}
        if batch["status"] == "cancelling":
            batch["status"], batch["cancelled_at"] = "cancelled", now
        elif one.has_expired:
            batch["status"], batch["expired_at"] = "expired", now
        elif lacks_input or not one.total:
            batch["status"], batch["failed_at"] = "failed", now
            message = f"the file {batch['input_file_id']} has no line; each line must be a request"
            if lacks_input:
                message = f"the content of the file {batch['input_file_id']} is missing on the server; upload it again"
            code = "file_missing" if lacks_input else "empty_file"
            reason: BatchError = {"code": code, "message": message, "param": "input_file_id", "line": None}
            batch["errors"] = {"object": "list", "data": [reason]}
        else:
            batch["status"], batch["finalizing_at"], batch["completed_at"] = "completed", now, now
        self.store.put(one.owner, *made, batch)
        one.batch = batch

    def check_room(self, owner: str) -> None:
        """Raise ApiError if the files of a key have reached the limit of bytes."""
        if (size := self.store.size(owner)) >= MOST_STORED:
            message = f"the files of this key have {size} bytes; at {MOST_STORED} none can be added, so delete some"
            raise ApiError(message, HTTPStatus.TOO_MANY_REQUESTS, code="too_many_files")

    def add_file(self, owner: str, name: str, filename: str) -> File:
        """Add a file whose content is stored under its id already. Raises ApiError above the limit, and OSError."""
        self.check_room(owner)
        size = self.store.content(name).stat().st_size
        found = _file(name, filename, size, "batch", int(time.time()))
        self.store.put(owner, found)
        return found


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _file(name: str, filename: str, size: int, purpose: Any, now: int) -> File:
    return {
        "id": name,
        "object": "file",
        "bytes": size,
        "created_at": now,
        "expires_at": None,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
    }
