"""Host: what computes for the routes, be it the engine of this process or those of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.engine.beam import BeamSearchParams
from quire.jobs import Job
from quire.request import Request
from quire.server.api.jobs import SearchJob


class Host(Protocol):
    """Serves jobs. Its methods are the event loop's."""

    def start(self) -> None:
        """Begin to serve, for the event loop in which this is called."""

    async def stop(self) -> None:
        """End. Who still waits gets an error."""

    async def fingerprint(self) -> str | None:
        """Return the digest of what computes outputs that name no other; None where it is not known."""

    def check_alive(self) -> None:
        """Raise ApiError (503) if it serves no one any more."""

    def check_health(self) -> None:
        """Raise ApiError (503) if it does not serve now."""

    def check_room(self, num_samples: int, name: str = "n") -> None:
        """Raise ApiError, naming a field, if so many samples cannot be taken now."""

    def check(self, request: Request) -> None:
        """Raise RequestError if a request could never run, as far as that is known before it is submitted."""

    def search(
        self, name: str, prompt: Sequence[int], params: BeamSearchParams, salt: str, lora: str | None
    ) -> SearchJob:
        """A beam search, not yet submitted. Raises RequestError if it could never run."""

    async def submit(self, job: Job) -> None:
        """Queue a job. Raises RequestError or ApiError, queueing nothing, if it cannot be served."""

    def abort(self, job: Job) -> None:
        """Take a job back."""
