"""Dispatch: the replicas of a fleet as one host of jobs. Assigns requests, and moves those of lost replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from quire.engine.beam import BeamSearchParams
from quire.errors import NoReplica
from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.attempts import Attempts, client_error, no_replica
from quire.fleet.choosing import Chooser
from quire.fleet.config import GatewayConfig
from quire.fleet.link import Link, LinkLost, Refused
from quire.fleet.membership import Membership
from quire.fleet.metrics import FleetMetrics
from quire.fleet.placement import NEW, Cause, Placement
from quire.fleet.resume import MOST_LOST
from quire.fleet.roster import Roster, end_tasks
from quire.fleet.score import PlacementChoice
from quire.fleet.search import FleetSearch
from quire.fleet.spans import span_of
from quire.fleet.stream import NumberedStream
from quire.fleet.wire import Frame, Hello
from quire.fleet.work import Assignment, Work
from quire.frontend.jobs import GenerationJob, Job
from quire.request import FinishReason, Request
from quire.server.http.api_error import ApiError, deadline_passed, engine_stopped, internal_error
from quire.server.http.timers import PatientTimer

if TYPE_CHECKING:  # its packages are an extra
    from quire.server.observability.traces import Traces

log = logging.getLogger("quire.fleet")

MAX_PLACEMENTS = 256  # kept for the inspector


class Dispatcher:
    """An `EngineClient` whose engines run in the replicas. Only the event loop may use it."""

    def __init__(
        self, membership: Membership, secret: str, model: Fingerprint, first: Hello, config: GatewayConfig,
        metrics: FleetMetrics, traces: Traces | None,
    ) -> None:  # fmt: skip
        """model, first: fingerprint and greeting of the replica whose tokenizer the gateway uses."""
        self.roster = Roster(membership, model, secret)
        self.placements: deque[Placement] = deque(maxlen=MAX_PLACEMENTS)  # the latest ones
        self._secret = secret.encode()
        self._first = first
        self._config = config
        self._metrics = metrics
        self._traces = traces
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining: set[Link] = set()
        self._open: dict[Job, PatientTimer | None] = {}  # with the timer of its deadline
        self._works: dict[GenerationJob, list[Work]] = {}
        self._assignments: dict[int, Assignment] = {}  # by flow
        self._chooser = Chooser(self.roster, secret, self._assignments)
        self._next_flow = 0
        self._failure: str | None = None

    # ---------------------------------------------------------------------------------------------------- as a Host

    def start(self) -> None:
        """Connect to the members of the fleet."""
        self._spawn(self.roster.follow(self))

    async def stop(self) -> None:
        """Stop. Jobs that are still open end with an error."""
        self.end_all("the gateway is stopping")
        await end_tasks(self._tasks)
        await self.roster.stop()

    def end_all(self, why: str) -> None:
        """End all jobs with an error, and accept no others."""
        self._failure = why
        for job in list(self._open):
            self._close(job, engine_stopped(why))

    async def fingerprint(self) -> str | None:
        """Return the fingerprint of the replica whose tokenizer the gateway uses."""
        return self.roster.model.digest

    @property
    def works(self) -> list[Work]:
        """The prompts that are open."""
        return [work for works in self._works.values() for work in works]

    @property
    def searches(self) -> list[FleetSearch]:
        """The beam searches that are open."""
        return [job for job in self._open if isinstance(job, FleetSearch)]

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

    def check_room(self, num_samples: int, name: str = "n") -> None:
        """Raise ApiError, with the name of the field, for more samples than a replica accepts."""
        if self._failure is not None:
            raise engine_stopped(self._failure)
        if num_samples > (limit := self._first.max_samples):
            message = f"the request asks for {num_samples} samples; this server takes {limit} at a time"
            raise ApiError(message, param=name)

    def check(self, request: Request) -> None:
        """Do nothing: a replica checks the request when it is submitted."""

    def search(
        self, name: str, prompt: Sequence[int], params: BeamSearchParams, salt: str, lora: str | None
    ) -> FleetSearch:
        """Return a beam search, not yet submitted. The replica checks whether it can run."""
        return FleetSearch(name, prompt, params, salt, lora)

    async def submit(self, job: Job) -> None:
        """Assign a job to replicas. Raises ApiError if none can serve it."""
        self.check_room(job.num_samples)
        if isinstance(job, FleetSearch):
            self._admit(job)
            job.task = self._spawn(self._serve_search(job))
            return
        if not isinstance(job, GenerationJob):
            raise TypeError(f"a fleet serves no {type(job).__name__}")
        context = None if self._traces is None else self._traces.current()
        works = self._works[job] = [Work(job, output, requests, context) for output, requests in job.prompts]
        if isinstance(job, NumberedStream):
            for work in works:
                work.wanted_fingerprint = job.wanted_fingerprint
        self._admit(job)
        try:
            placed = await asyncio.gather(*(self._place(work, NEW) for work in works), return_exceptions=True)
            for error in placed:
                if error is not None:
                    raise error
        except BaseException as error:
            if isinstance(error, ApiError):
                self._metrics.refused(error.status)
            self.abort(job)
            raise

    def abort(self, job: Job) -> None:
        """Abort a job."""
        if job not in self._open:
            return
        for work in self._works.get(job, []):  # type: ignore[call-overload]
            work.end(FinishReason.ABORT)
        self._close(job)

    # --------------------------------------------------------------------------------------------- jobs and their ends

    def _admit(self, job: Job) -> None:
        seconds, timer = self._config.request_timeout, None
        if seconds is not None:
            timer = PatientTimer(seconds, self._close, job, deadline_passed(seconds))
        self._open[job] = timer

    def _close(self, job: Job, error: ApiError | None = None) -> None:
        """End a job: wake its waiter, and abort its assignments at replicas."""
        if job not in self._open:
            return
        timer = self._open.pop(job)
        if timer is not None:
            timer.cancel()
        if isinstance(job, GenerationJob):
            for work in self._works.pop(job):
                for assignment in set(work.assigned.values()):
                    self._give_up(assignment, "taken back")
        elif isinstance(job, FleetSearch) and job.task is not None and job.task is not asyncio.current_task():
            job.task.cancel()
        if error is not None:
            self._metrics.refused(error.status)
        job.error = error
        job.ended.set()
        job.take([])

    def _give_up(self, assignment: Assignment, why: str, *, is_error: bool = False) -> None:
        """Forget an assignment and abort it at its replica."""
        if self._forget(assignment, why, is_error=is_error) and assignment.link.is_up:
            self._spawn(self._abort(assignment.link, assignment.flow))

    def _forget(self, assignment: Assignment, why: str, *, is_error: bool = False) -> bool:
        """Forget an assignment, so that its frames are ignored. Return False if it was forgotten already.

        why: outcome for the trace.
        """
        if self._assignments.pop(assignment.flow, None) is None:
            return False
        self.roster.index.settle(assignment.expectation)
        if assignment.span is not None:
            assignment.span.end(why, is_error=is_error)
        for sample in assignment.samples:
            if assignment.work.assigned.get(sample) is assignment:
                del assignment.work.assigned[sample]
        return True

    async def _abort(self, link: Link, flow: int) -> None:
        with suppress(LinkLost, Refused):  # a lost session ends the call, too
            await link.post("/fleet/abort", {"flow": flow})

    # ---------------------------------------------------------------------------------------------------- placing

    async def _place(self, work: Work, cause: Cause, samples: Sequence[int] = (), without: Link | None = None) -> None:
        """Assign these samples, or all open ones, to a replica. They share a call until one of them has a token.

        without: a replica that must not get them. Raises ApiError if all refuse, or if no replica is available within
        the patience. A request that has begun waits for room without a limit.
        """
        attempts = Attempts(self.roster, self._config.patience, without, work.requests[0].guide)
        while work.job in self._open:
            wanted = [sample for sample in work.open_samples if not samples or sample in samples]
            if not wanted:
                return
            if len(wanted) > 1 and not (work.is_untouched and len(wanted) == len(work.ledgers)):
                await asyncio.gather(*(self._place(work, cause, [sample], without) for sample in wanted))
                return
            try:
                link, choice = await self._chooser.for_work(work, wanted, attempts.passed_over)
            except NoReplica as error:
                await attempts.found_none(error, has_begun=work.is_admitted)
                continue
            try:
                await self._assign(work, wanted, link, self._placement(work, wanted, cause, choice))
                return
            except LinkLost:
                attempts.lost(link)
            except Refused as refusal:
                attempts.refused(link, refusal)

    def _placement(self, work: Work, samples: Sequence[int], cause: Cause, choice: PlacementChoice) -> Placement:
        delivered = len(work.ledgers[samples[0]].tokens)
        return Placement(time.time(), work.output.request_id, tuple(samples), delivered, cause, choice)

    async def _assign(self, work: Work, samples: Sequence[int], link: Link, placement: Placement) -> None:
        flow = self._next_flow
        self._next_flow += 1
        hello, fingerprint = link.hello, link.fingerprint
        if hello is None or fingerprint is None:
            raise LinkLost(link.url)
        digests = work.digests(samples, hello, self._secret)
        span = span_of(placement, self._traces, work.context)
        trace = None if span is None else span.traceparent
        call = work.call(flow, samples, is_strict=self._config.resume == "exact", trace=trace)
        best = placement.choice.best
        call = replace(call, uncached=best.uncached_tokens, holder=best.candidate.holder)
        expected = self.roster.index.expect(link.slot, digests)
        before = {sample: work.assigned[sample] for sample in samples if sample in work.assigned}
        assignment = Assignment(flow, work, link, set(samples), expected, placement, span, dict(before))
        self._assignments[flow] = assignment
        work.assigned.update(dict.fromkeys(samples, assignment))
        if work.is_untouched:
            work.fingerprint = work.output.fingerprint = fingerprint.digest
            if isinstance(work.job, NumberedStream) and not work.job.fingerprint:
                work.job.fingerprint = fingerprint.digest
                for one in self._works.get(work.job, ()):  # an event's id names one kind of replica
                    one.wanted_fingerprint = fingerprint.digest
        try:
            await link.post("/fleet/generate", call)
            if link.hello is not hello:
                raise LinkLost(f"{link.url}: {link.failure}")
        except BaseException as error:
            if isinstance(error, LinkLost) and assignment.is_placed:  # `lost` has moved it already
                return
            self._give_up(assignment, "not taken", is_error=True)
            for sample, other in before.items():
                if other.flow in self._assignments:
                    work.assigned[sample] = other
            if work.job not in self._open:
                for other in before.values():
                    self._give_up(other, "taken back")
            self._let_go(work.job)
            raise
        if not assignment.is_placed:
            self._placed(assignment)
        if self._assignments.get(flow) is not assignment:  # it ended or was aborted meanwhile
            self._spawn(self._abort(link, flow))

    def _let_go(self, job: GenerationJob) -> None:
        """Allow a stream any replica that its client's last event allows, unless one has or may have accepted it."""
        works = self._works.get(job, ())
        if isinstance(job, NumberedStream) and not any(one.is_admitted or one.assigned for one in works):
            job.fingerprint = ""
            for one in works:
                one.wanted_fingerprint = job.wanted_fingerprint

    def _placed(self, assignment: Assignment) -> None:
        """Record that a replica accepted a call: it answered so, or a frame of the call arrived before the answer."""
        assignment.is_placed = assignment.work.is_admitted = True
        self._metrics.routed(assignment.link.url, assignment.placement.choice)
        self.placements.append(assignment.placement)
        replaced, assignment.replaced = assignment.replaced, {}
        for sample, other in replaced.items():
            other.samples.discard(sample)
            if not other.samples:
                self._give_up(other, "moved")
        if assignment.link in self._draining:  # it began to drain after it had accepted this
            self._spawn(self._empty(assignment.link))

    async def _search(self, job: FleetSearch) -> None:
        """Run a beam search at a replica. If it is lost, another one restarts the search, with the same result."""
        context = None if self._traces is None else self._traces.current()
        attempts, cause, num_lost = Attempts(self.roster, self._config.patience), NEW, 0
        while True:
            try:
                link, choice = self._chooser.for_search(job, attempts.passed_over)
            except NoReplica as error:
                await attempts.found_none(error)
                continue
            job.replica = link.url
            placement = Placement(time.time(), job.call.name, (), 0, cause, choice)
            self.placements.append(placement)
            try:
                await job.run_at(link, span_of(placement, self._traces, context))
                self._metrics.routed(link.url, choice)
                return
            except LinkLost as error:
                num_lost += 1
                if num_lost > MOST_LOST:
                    message = f"{num_lost} replicas in a row were lost with the beam search"
                    raise no_replica(f"{message}, the last one at {link.url}") from error
                # The patience begins again, since the search may have run for long.
                attempts = Attempts(self.roster, self._config.patience)
                attempts.lost(link)
                cause = Cause("lost", link.url)
                self._metrics.resumed("lost")
            except Refused as refusal:
                attempts.refused(link, refusal)

    async def _serve_search(self, job: FleetSearch) -> None:
        try:
            await self._search(job)
        except ApiError as error:
            self._close(job, error)
        except Exception as error:  # without this the client would wait forever
            log.exception("a search cannot continue")
            self._close(job, internal_error(error))
        else:
            self._close(job)

    # ------------------------------------------------------------------------------------ as the Listener of its links

    def connected(self, link: Link) -> None:
        """Add a replica whose greeting arrived."""
        if not self.roster.connected(link):
            self._metrics.left_out(link.url)
            return
        for other in self._draining:  # requests that had to stay there may move now
            self._spawn(self._empty(other))

    def frames(self, link: Link, frames: Sequence[Frame]) -> None:
        """Take in the frames of a step. A client gets the deltas of all its samples together."""
        grown: dict[GenerationJob, dict[Work, None]] = {}
        try:
            for frame in frames:
                assignment = self._assignments.get(frame.flow)
                if assignment is None or assignment.link is not link or frame.sample not in assignment.samples:
                    self._metrics.late()
                elif self._enter(assignment, frame):
                    grown.setdefault(assignment.work.job, {})[assignment.work] = None
        finally:  # frames that were entered are delivered even if a later one is invalid
            for job, works in grown.items():
                self._report(job, works)

    def _enter(self, assignment: Assignment, frame: Frame) -> bool:
        """Take in a frame. Return False if it has nothing new. Raises WireError for an invalid one."""
        work = assignment.work
        is_new = work.enter(frame)
        if not assignment.is_placed:
            self._placed(assignment)
        if is_new and frame.tokens:
            self._token_came(assignment, frame.sample)
        ledger = work.ledgers[frame.sample]
        if ledger.output.finished:
            assignment.samples.discard(frame.sample)
            if not assignment.samples:
                self._forget(assignment, "finished")
            if is_new:
                work.output.num_running -= 1
                work.job.num_open -= work.output.finished
                self._chooser.averages.ended(len(ledger.tokens))
        if frame.more is None:
            return is_new
        if count := frame.more.get("differences", 0):
            self._metrics.mismatched(count)
            url = assignment.link.url
            log.error("replica %s draws other tokens than those that were delivered before it took over", url)
        if "cached" in frame.more:
            cached, num_prompt = frame.more["cached"], len(work.output.prompt_token_ids)
            self._chooser.averages.began(cached, num_prompt)
            self._metrics.cached(cached, num_prompt)
        return True

    def _report(self, job: GenerationJob, works: Iterable[Work]) -> None:
        """Deliver the deltas of a job's outputs, and close the job if all its samples have ended."""
        if job not in self._open:
            return
        try:
            if deltas := [delta for work in works for delta in job.news(work.output)]:
                job.take(deltas)
        except Exception as error:  # not the replica's fault
            log.exception("an answer cannot be made")
            self._close(job, internal_error(error))
        if job.num_open == 0:
            self._close(job)

    def _token_came(self, assignment: Assignment, sample: int) -> None:
        """Record a new token of a sample. If it is the first one from this replica, measure how long it took."""
        work, placement, now = assignment.work, assignment.placement, time.monotonic()
        work.num_lost = 0
        if sample not in assignment.heard:
            assignment.heard.add(sample)
            seconds = now - work.last_tokens.get(sample, work.began)
            if not work.last_tokens:
                self._metrics.first_token(seconds)
            if placement.cause is not NEW:
                self._metrics.stalled(seconds)
            if placement.seconds is None:
                placement.seconds = seconds
        work.last_tokens[sample] = now

    def failed(self, link: Link, flow: int, status: int, body: dict[str, Any]) -> None:
        """Handle a call that failed before its samples ended."""
        assignment = self._assignments.get(flow)
        if assignment is None or assignment.link is not link:
            self._metrics.late()
        elif status == HTTPStatus.SERVICE_UNAVAILABLE:  # its engine has failed
            self._lose(assignment, "failed")
        else:
            self._close(assignment.work.job, client_error(Refused(status, body)))

    def blocks(self, link: Link, snapshot: list[int] | None, events: list[list[Any]]) -> None:
        """Take in a snapshot of a replica's blocks, or events of them."""
        self.roster.blocks(link, snapshot, events)

    def started(self, link: Link, flows: Sequence[int]) -> None:
        """Mark calls that the replica's state counts."""
        for flow in flows:
            assignment = self._assignments.get(flow)
            if assignment is not None and assignment.link is link:
                assignment.is_seen = True

    def changed(self, link: Link) -> None:
        """Handle a new state of a replica."""
        self.roster.changed()
        if link.state is not None and link.state.draining and link not in self._draining:
            self._draining.add(link)
            self._spawn(self._empty(link))

    def contradicted(self, link: Link) -> None:
        """Count a message of a replica that is invalid or contradicts an earlier one."""
        self._metrics.contradicted(link.url)

    def lost(self, link: Link) -> None:
        """Move all calls of a lost replica to others."""
        self._draining.discard(link)
        self.roster.lost(link)
        self._metrics.lost(link.url)
        for assignment in [one for one in self._assignments.values() if one.link is link and one.is_placed]:
            self._lose(assignment, "lost")

    def _lose(self, assignment: Assignment, why: str) -> None:
        work, samples = assignment.work, sorted(assignment.samples)
        self._forget(assignment, why, is_error=True)
        if work.job not in self._open:
            return
        if self._config.resume == "never":
            self._close(work.job, no_replica(f"{assignment.link.url} was lost, and --resume is 'never'"))
            return
        work.num_lost += 1
        if work.num_lost > MOST_LOST:
            message = f"{work.num_lost} replicas in a row were lost with the request before a new token came"
            self._close(work.job, no_replica(f"{message}, the last one at {assignment.link.url}"))
            return
        self._metrics.resumed(why)
        if not assignment.is_moving:  # else `_move` continues, or resumes it itself
            self._spawn(self._resume(work, samples, Cause(why, assignment.link.url)))

    async def _resume(self, work: Work, samples: Sequence[int], cause: Cause) -> None:
        try:
            await self._place(work, cause, samples)
        except ApiError as error:
            self._close(work.job, error)
        except Exception as error:  # without this the client would wait forever
            log.exception("a request cannot continue")
            self._close(work.job, internal_error(error))

    async def _empty(self, link: Link) -> None:
        """Move a draining replica's requests to others. Those that no other replica accepts stay."""
        moving = [one for one in self._assignments.values() if one.link is link and one.is_placed and not one.is_moving]
        for one in moving:  # before another task runs `_empty`: a request that is moved twice is computed twice
            one.is_moving = True
        reasons = await asyncio.gather(*map(self._move, moving))
        stay = [why for why in reasons if why is not None]
        if stay:
            log.warning("%d requests stay at %s, which is draining: %s", len(stay), link.url, stay[0])

    async def _move(self, assignment: Assignment) -> str | None:
        """Move an assignment to another replica. Return the reason if that is not possible."""
        work, link, cause = assignment.work, assignment.link, Cause("drained", assignment.link.url)
        samples, why = sorted(assignment.samples), None
        try:
            if samples:  # else it has ended meanwhile
                await self._place(work, cause, samples, without=link)
                self._metrics.resumed("drained")
        except ApiError as error:
            why = str(error)
        except Exception as error:
            log.exception("a request cannot be moved")
            why = str(error)
        assignment.is_moving = False
        if why is not None and self._assignments.get(assignment.flow) is not assignment and work.job in self._open:
            await self._resume(work, [sample for sample in samples if sample not in work.assigned], cause)
        return why

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the gateway failed", exc_info=task.exception())
