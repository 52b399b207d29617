"""Dispatcher: the replicas of a fleet as one `EngineClient`. It places requests, and moves those of lost replicas.

Decisions are separate from their application. `Chooser` selects the replica of a request, `Attempts` decides whether to
ask another one, `why_to_end` whether a request survives a loss, and `Calls` assigns samples and frames to calls.
`Placer`, `Mover` and `Intake` apply these decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from quire.engine.beam import BeamSearchParams
from quire.errors import NoReplica
from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.attempts import client_error, no_replica
from quire.fleet.calls import Calls
from quire.fleet.choosing import Chooser
from quire.fleet.config import GatewayConfig
from quire.fleet.intake import Intake
from quire.fleet.link import Link, Refused, abort
from quire.fleet.membership import Membership
from quire.fleet.metrics import FleetMetrics
from quire.fleet.moves import Mover
from quire.fleet.open_jobs import OpenJobs
from quire.fleet.placement import NEW
from quire.fleet.roster import Roster
from quire.fleet.search import FleetSearch
from quire.fleet.shared import Shared, Tasks
from quire.fleet.stream import NumberedStream
from quire.fleet.wire import EncodedPrompt, Frame, Hello, Images
from quire.fleet.work import Work
from quire.frontend.jobs import GenerationJob, Job
from quire.request import Request
from quire.server.http.api_error import ApiError, engine_stopped

if TYPE_CHECKING:  # its packages are an extra
    from quire.server.observability.traces import Traces


class Dispatcher:
    """An `EngineClient` whose engines run in the replicas. Only the event loop may use it."""

    def __init__(
        self, membership: Membership, secret: str, model: Fingerprint, first: Hello, config: GatewayConfig,
        metrics: FleetMetrics, traces: Traces | None,
    ) -> None:  # fmt: skip
        """model, first: fingerprint and greeting of the replica whose tokenizer the gateway uses."""
        self.roster = Roster(membership, model, secret, first.incarnation)
        self._first = first
        self._metrics = metrics
        self._tasks = Tasks()
        self._failure: str | None = None
        self.calls = Calls(self.roster.index, lambda one: self._tasks.spawn(abort(one.link, one.flow)))
        self.jobs = OpenJobs(self.calls, metrics, config.request_timeout)
        self._chooser = Chooser(self.roster, secret, self.calls)
        self._shared = Shared(config, metrics, traces, self.roster, self.calls, self.jobs, self._chooser, self._tasks)
        self.placements = self._shared.placements
        self.mover = Mover(self._shared, secret)
        self._intake = Intake(self._shared, self.mover.placer.accepted)

    # --------------------------------------------------------------------------------------------- as an EngineClient

    def start(self) -> None:
        """Connect to the members of the fleet."""
        self._tasks.spawn(self.roster.follow(self))

    async def stop(self) -> None:
        """Stop. Jobs that are still open end with an error."""
        self.end_all("the gateway is stopping")
        await self._tasks.end()
        await self.roster.stop()

    def end_all(self, why: str) -> None:
        """End all jobs with an error, and accept no others."""
        self._failure = why
        for job in self.jobs:
            self.jobs.close(job, engine_stopped(why))

    is_sleeping = False  # its replicas do not

    @property
    def num_updates(self) -> int:
        """The number of times that the fleet's weights were replaced."""
        return self.roster.num_updates

    async def fingerprint(self, weights_version: str | None = None) -> str | None:  # noqa: ARG002
        """Return the fingerprint of the replica whose tokenizer the gateway uses."""
        return self.roster.model.digest

    def check_alive(self) -> None:
        """Raise ApiError (503) if this gateway has been stopped. A gateway without replicas is alive."""
        if self._failure is not None:
            raise engine_stopped(self._failure)

    def check_health(self) -> None:
        """Raise ApiError (503) if no replica serves."""
        try:
            self._chooser.check_health()
        except NoReplica as error:
            raise no_replica(str(error)) from error

    def num_slots(self) -> tuple[int, int]:
        """Return the number of samples that the connected replicas can run at a time, and of those that they run."""
        states = [link.state for link in self.roster.links.values() if link.state is not None]
        return sum(state.max_running for state in states), sum(state.num_running for state in states)

    def check_room(self, num_samples: int, name: str = "n") -> None:
        """Raise ApiError, with the name of the field, for more samples than a replica accepts."""
        if self._failure is not None:
            raise engine_stopped(self._failure)
        if num_samples > (limit := self._first.max_samples):
            message = f"the request asks for {num_samples} samples; this server takes {limit} at a time"
            raise ApiError(message, param=name)

    def check(self, request: Request) -> None:
        """Do nothing: a replica checks the request when it is submitted."""

    async def encode(self, images: Images) -> EncodedPrompt:
        """Return the tokens of a prompt with images, which a replica makes. Raises ApiError."""
        return await self.mover.placer.encode(images)

    def search(
        self, name: str, prompt: Sequence[int], params: BeamSearchParams, salt: str, lora: str | None
    ) -> FleetSearch:
        """Return a beam search, not yet submitted. The replica checks whether it can run."""
        return FleetSearch(name, prompt, params, salt, lora)

    async def submit(self, job: Job) -> None:
        """Assign a job to replicas. Raises ApiError if none can serve it."""
        self.check_room(job.num_samples)
        if isinstance(job, FleetSearch):
            self.jobs.admit(job)
            job.task = self._tasks.spawn(self._search(job))
            return
        if not isinstance(job, GenerationJob):
            raise TypeError(f"a fleet serves no {type(job).__name__}")
        context = self._shared.context()
        works = [Work(job, output, requests, context) for output, requests in job.prompts]
        if isinstance(job, NumberedStream):
            for work in works:
                work.wanted_fingerprint = job.wanted_fingerprint
        self.jobs.admit(job, works)
        try:
            place = self.mover.placer.place
            placed = await asyncio.gather(*(place(work, NEW) for work in works), return_exceptions=True)
            for error in placed:
                if error is not None:
                    raise error
        except BaseException as error:
            if isinstance(error, ApiError):
                self._metrics.count("refused", error.status)
            self.abort(job)
            raise

    async def _search(self, job: FleetSearch) -> None:
        with self.jobs.closing(job):
            await self.mover.placer.search(job)
        self.jobs.close(job)

    def abort(self, job: Job) -> None:
        """Abort a job."""
        self.jobs.abort(job)

    # ------------------------------------------------------------------------------------ as the Listener of its links

    def connected(self, link: Link) -> None:
        """Add a replica whose greeting arrived."""
        if self.roster.connected(link):
            self.mover.came()
        else:
            self._metrics.count("left_out", link.url)

    def frames(self, link: Link, frames: Sequence[Frame]) -> None:
        """Take in the frames of a step."""
        self._intake.frames(link, frames)

    def failed(self, link: Link, flow: int, status: int, body: dict[str, Any]) -> None:
        """Handle a call that failed before its samples ended."""
        assignment = self.calls.of(link, flow)
        if assignment is None:
            self._metrics.count("late_frames")
        elif status == HTTPStatus.SERVICE_UNAVAILABLE:  # its engine has failed
            self.mover.failed(assignment, "failed")
        else:
            self.jobs.close(assignment.work.job, client_error(Refused(status, body)))

    def blocks(self, link: Link, snapshot: list[int] | None, events: list[list[Any]]) -> None:
        """Take in a snapshot of a replica's blocks, or events of them."""
        self.roster.blocks(link, snapshot, events)

    def started(self, link: Link, flows: Sequence[int]) -> None:
        """Mark calls that the replica's state counts."""
        self.calls.seen(link, flows)

    def changed(self, link: Link) -> None:
        """Handle a new state of a replica."""
        self.roster.changed()
        if link.state is not None and link.state.draining:
            self.mover.drains(link)

    def contradicted(self, link: Link) -> None:
        """Count a message of a replica that is invalid or contradicts an earlier one."""
        self._metrics.count("contradictions", link.url)

    def lost(self, link: Link) -> None:
        """Move all calls of a lost replica to others."""
        self.roster.lost(link)
        self._metrics.count("lost", link.url)
        self.mover.lost(link)
