"""Downloads of models that clients request: on a thread, one at a time, with their progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from http import HTTPStatus

from quire.errors import ModelError
from quire.models.hub import pull
from quire.server.http.api_error import ApiError
from quire.server.http.bounded_executor import BoundedExecutor
from quire.server.protocol.ollama import PullLine

MAX_WAITING = 4  # downloads of one client that wait
LOOK_EVERY = 0.2  # s between looks at a download
HUBS = ("hf.co/", "huggingface.co/")  # prefixes of names in Ollama


@dataclass
class Progress:
    """Bytes of a download. The event loop reads them, the download's threads write."""

    completed: int = 0
    total: int = 0
    is_wanted: bool = True

    def report(self, completed: int, total: int) -> None:
        """Note the state. Raises ModelError, which ends the download, if it is not wanted any more."""
        if not self.is_wanted:
            raise ModelError("the download was ended")
        self.completed, self.total = max(self.completed, completed), max(self.total, total)

    def end(self) -> None:
        """End the download at its next report."""
        self.is_wanted = False


class Puller:
    """Downloads models into the hub's cache. It belongs to the event loop."""

    def __init__(self) -> None:
        self._executor = BoundedExecutor("download", 1, MAX_WAITING)

    async def lines(
        self, client: str, model: str, progress: Progress, is_stopping: Callable[[], bool]
    ) -> AsyncIterator[PullLine]:
        """Download a model, and yield its progress. Raises ApiError if it cannot be downloaded, or the server stops.

        model: OWNER/NAME, or OWNER/NAME:FILE for a GGUF file. A download that was ended is resumed by the next one.
        """
        for hub in HUBS:
            model = model.removeprefix(hub)
        repository, _, file = model.removesuffix(":latest").partition(":")
        yield {"status": "pulling manifest"}
        download = partial(pull, repository, None, file or None, progress.report)
        work = asyncio.create_task(self._executor.run(client, download))
        shown, digest = -1, f"sha256:{sha256(model.encode()).hexdigest()}"  # identifies the lines of one bar
        try:
            while not work.done() and progress.is_wanted:
                await asyncio.wait([work], timeout=LOOK_EVERY)
                if is_stopping() and not work.done():
                    raise ApiError("the server is stopping", HTTPStatus.SERVICE_UNAVAILABLE, code="draining")
                completed, total = progress.completed, progress.total
                if total and completed != shown:
                    shown = completed
                    yield {"status": f"pulling {repository}", "digest": digest, "total": total, "completed": completed}
            if work.done():
                work.result()
                yield {"status": "success"}
        except ModelError as error:
            raise ApiError(str(error), param="model") from error
        finally:
            progress.end()
            work.cancel()

    def close(self) -> None:
        """Start no further download."""
        self._executor.close()
