"""EngineClient: the routes' interface to the computation, by the engine of this process or those of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.engine.beam import BeamSearchParams
from quire.frontend.jobs import Job
from quire.request import Request
from quire.server.api.jobs import SearchJob


class EngineClient(Protocol):
    """Serves jobs. Call its methods from the event loop."""

    def start(self) -> None:
        """Start to serve, for the running event loop."""

    async def stop(self) -> None:
        """Stop, and fail the pending jobs."""

    @property
    def num_updates(self) -> int:
        """The number of times that the weights were replaced."""

    @property
    def is_sleeping(self) -> bool:
        """True if no request is accepted before the engine is woken up."""

    async def fingerprint(self, weights_version: str | None = None) -> str | None:
        """Return the digest of the system that computes outputs without an own fingerprint, or None if unknown.

        weights_version: of these outputs; None: the current one.
        """

    def check_alive(self) -> None:
        """Raise ApiError (503) if it cannot serve any more."""

    def check_health(self) -> None:
        """Raise ApiError (503) if it cannot serve now."""

    def num_slots(self) -> tuple[int, int]:
        """Return the number of samples that can run at a time, and of those that run."""

    def check_room(self, num_samples: int, name: str = "n") -> None:
        """Raise ApiError, naming a field, if `num_samples` more samples cannot be accepted now."""

    def check(self, request: Request) -> None:
        """Raise RequestError if a request could never run, as far as that is known before it is submitted."""

    def search(
        self, name: str, prompt: Sequence[int], params: BeamSearchParams, salt: str, lora: str | None
    ) -> SearchJob:
        """Create a beam search, not yet submitted. Raises RequestError if it could never run."""

    async def submit(self, job: Job) -> None:
        """Queue a job. Raises RequestError or ApiError, queueing nothing, if it cannot be served."""

    def abort(self, job: Job) -> None:
        """Abort a job."""
