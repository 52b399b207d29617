"""Dispatch: the replicas of a fleet as one host of jobs. Who computes what, and who goes on when a replica is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import aiohttp

from quire.engine.beam import BeamSearchParams
from quire.errors import NoReplica
from quire.fleet.config import GatewayConfig
from quire.fleet.fingerprint import Fingerprint
from quire.fleet.index import MAX_SLOTS, FleetIndex
from quire.fleet.link import Link, LinkLost, Refused
from quire.fleet.membership import Membership
from quire.fleet.metrics import FleetMetrics
from quire.fleet.placement import NEW, Cause, Placement
from quire.fleet.score import Candidate, Choice, Demand, choose, eligible
from quire.fleet.spans import attributes_of
from quire.fleet.stream import NumberedStream
from quire.fleet.wire import Frame, Hello
from quire.fleet.work import Assignment, FarGuide, FleetSearch, Work, wire_digests
from quire.request import FinishReason, Request
from quire.server.api.jobs import Generation, Job
from quire.server.http.api_error import ApiError, deadline_passed, engine_stopped, internal_error

if TYPE_CHECKING:  # its packages are an extra
    from opentelemetry.context import Context

    from quire.server.watch.traces import CallSpan, Traces

log = logging.getLogger("quire.fleet")

# Of a fingerprint: what makes a model another one. Replicas that differ in other parts compute other bits of the same.
MODEL_PARTS = ("weights", "config", "tokenizer", "template")
MAX_POSTS = 512  # at a time, to each replica
WAIT_FOR_ROOM = 1.0  # s, if nothing changes before: then a replica that was full is asked again
MATCH_TIMEOUT = 0.05  # s that a replica has to say what it has cached
MAX_PLACEMENTS = 256  # that are kept, so that people can see them
MOST_LOST = 8  # replicas, as a request that kills each of them must not go through the whole fleet
MEMORY = 0.05  # weight of the latest request in what is expected of the next one
REFUSED_ELSEWHERE_TOO = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class Fleet:
    """A `Host` whose engines are elsewhere. The event loop's."""

    def __init__(
        self, membership: Membership, secret: str, model: Fingerprint, first: Hello, config: GatewayConfig,
        metrics: FleetMetrics, traces: Traces | None,
    ) -> None:  # fmt: skip
        """model, first: of the replica whose tokenizer the gateway has."""
        self.links: dict[str, Link] = {}  # by URL
        self.index = FleetIndex()
        self.placements: deque[Placement] = deque(maxlen=MAX_PLACEMENTS)  # the latest ones
        self.model = model
        self._membership = membership
        self._secret = secret
        self._first = first
        self._config = config
        self._metrics = metrics
        self._traces = traces
        self._http: aiohttp.ClientSession | None = None
        self._runs: dict[str, asyncio.Task[None]] = {}  # of the links
        self._tasks: set[asyncio.Task[Any]] = set()
        self._draining: set[Link] = set()
        self._fitting: set[str] = set()  # URLs of replicas that have the gateway's tokenizer and template
        self._free_slots = list(range(MAX_SLOTS))
        self._open: dict[Job, asyncio.TimerHandle | None] = {}  # with its deadline
        self._works: dict[Generation, list[Work]] = {}
        self._assignments: dict[int, Assignment] = {}  # by flow
        self._next_flow = 0
        self._news = asyncio.Event()  # something about a replica has changed
        self._new_tokens = 128.0  # that a request generates, on the average
        self._hit_rate = 0.5  # share of the prompts' tokens that were cached, lately
        self._failure: str | None = None

    # ---------------------------------------------------------------------------------------------------- as a Host

    def start(self) -> None:
        """Connect to the members."""
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=MAX_POSTS, keepalive_timeout=20.0)
        self._http = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        self._spawn(self._follow())

    async def stop(self) -> None:
        """End. Who still waits gets an error."""
        self.end_all("the gateway is stopping")
        for task in (*self._tasks, *self._runs.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._runs.values(), return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def end_all(self, why: str) -> None:
        """End all jobs with an error, and take no others."""
        self._failure = why
        for job in list(self._open):
            self._close(job, engine_stopped(why))

    @property
    def works(self) -> list[Work]:
        """The prompts that are open."""
        return [work for works in self._works.values() for work in works]

    @property
    def searches(self) -> list[FleetSearch]:
        """The beam searches that are open."""
        return [job for job in self._open if isinstance(job, FleetSearch)]

    def is_fitting(self, link: Link) -> bool:
        """Whether a replica that has answered has the gateway's tokenizer and template."""
        return link.url in self._fitting

    def check_health(self) -> None:
        """Raise ApiError (503) if no replica serves."""
        try:
            eligible(self._candidates(set(), lambda _: ()))
        except NoReplica as error:
            raise _nobody(str(error)) from error

    def check_room(self, num_samples: int, name: str = "n") -> None:
        """Raise ApiError, naming a field, if a replica takes fewer samples."""
        if self._failure is not None:
            raise engine_stopped(self._failure)
        if num_samples > (limit := self._first.max_samples):
            message = f"the request asks for {num_samples} samples; this server takes {limit} at a time"
            raise ApiError(message, param=name)

    def check(self, request: Request) -> None:
        """A replica checks it when it is submitted."""

    def search(self, name: str, prompt: Sequence[int], params: BeamSearchParams, salt: str) -> FleetSearch:
        """A beam search, not yet submitted. The replica says whether it could ever run."""
        return FleetSearch(name, prompt, params, salt)

    async def submit(self, job: Job) -> None:
        """Give a job to replicas. Raises ApiError if none can serve it."""
        self.check_room(job.num_samples)
        if isinstance(job, FleetSearch):
            self._admit(job)
            job.task = self._spawn(self._search(job))
            return
        if not isinstance(job, Generation):
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
        """Take a job back."""
        if job not in self._open:
            return
        for work in self._works.get(job, []):  # type: ignore[call-overload]
            work.end(FinishReason.ABORT)
        self._close(job)

    # --------------------------------------------------------------------------------------------- jobs and their ends

    def _admit(self, job: Job) -> None:
        seconds, timer = self._config.request_timeout, None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, self._close, job, deadline_passed(seconds))
        self._open[job] = timer

    def _close(self, job: Job, error: ApiError | None = None) -> None:
        """Let whoever waits for a job go on, and take back what replicas still do for it."""
        if job not in self._open:
            return
        timer = self._open.pop(job)
        if timer is not None:
            timer.cancel()
        if isinstance(job, Generation):
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
        """Want nothing more of an assignment, and let its replica know."""
        if self._forget(assignment, why, is_error=is_error) and assignment.link.is_up:
            self._spawn(self._abort(assignment.link, assignment.flow))

    def _forget(self, assignment: Assignment, why: str, *, is_error: bool = False) -> bool:
        """Hear no more of an assignment. why: what traces say of it. False: that is so already."""
        if self._assignments.pop(assignment.flow, None) is None:
            return False
        self.index.settle(assignment.expectation)
        if assignment.span is not None:
            assignment.span.end(why, is_error=is_error)
        for sample in assignment.samples:
            if assignment.work.assigned.get(sample) is assignment:
                del assignment.work.assigned[sample]
        return True

    async def _abort(self, link: Link, flow: int) -> None:
        with suppress(LinkLost, Refused):  # with its session the replica forgets the call
            await link.post("/fleet/abort", {"flow": flow})

    # ---------------------------------------------------------------------------------------------------- placing

    async def _place(self, work: Work, cause: Cause, samples: Sequence[int] = (), without: Link | None = None) -> None:
        """Let a replica compute these samples, or all that are open: together as long as nothing of them is known.

        without: a replica that must not get them. Raises ApiError if all refuse, or none is there for a while. What has
        begun waits for room as long as it takes.
        """
        deadline = asyncio.get_running_loop().time() + self._config.patience
        excluded = set() if without is None else {without}
        refusal: Refused | None = None
        while work.job in self._open:
            wanted = [sample for sample in work.open_samples if not samples or sample in samples]
            if not wanted:
                return
            if len(wanted) > 1 and not (work.is_untouched and len(wanted) == len(work.ledgers)):
                await asyncio.gather(*(self._place(work, cause, [sample], without) for sample in wanted))
                return
            try:
                choice = await self._choose(work, wanted, excluded)
                link = self._link_at(choice.best.candidate.slot)
                await self._assign(work, wanted, link, self._placement(work, wanted, cause, choice))
                return
            except LinkLost:
                excluded.add(link)
            except Refused as error:
                if error.status in REFUSED_ELSEWHERE_TOO or (refusal is not None and error.is_own_fault):
                    raise _client_error(error, work) from error
                excluded.add(link)
                refusal = error
            except NoReplica as error:
                if without is not None:
                    raise _nobody(f"{error}{_without(excluded)}") from error
                is_full = refusal is not None and refusal.status == HTTPStatus.TOO_MANY_REQUESTS
                if refusal is not None and not (is_full and work.is_admitted):
                    raise _client_error(refusal, work) from error
                left = deadline - asyncio.get_running_loop().time()
                if not await self._change(WAIT_FOR_ROOM if is_full else left) and not is_full:
                    raise _nobody(str(error)) from error
                excluded, refusal = set(), None

    def _placement(self, work: Work, samples: Sequence[int], cause: Cause, choice: Choice) -> Placement:
        delivered = len(work.ledgers[samples[0]].tokens)
        return Placement(time.time(), work.output.request_id, tuple(samples), delivered, cause, choice)

    async def _assign(self, work: Work, samples: Sequence[int], link: Link, placement: Placement) -> None:
        flow = self._next_flow
        self._next_flow += 1
        hello, fingerprint = link.hello, link.fingerprint
        if hello is None or fingerprint is None:
            raise LinkLost(link.url)
        digests = work.digests(samples, hello, self._secret.encode())
        span = self._span(placement, work.context)
        trace = None if span is None else span.traceparent
        call = work.call(flow, samples, is_strict=self._config.resume == "exact", trace=trace)
        call = replace(call, uncached=placement.choice.best.uncached_tokens)
        expected = self.index.expect(link.slot, digests)
        before = {sample: work.assigned[sample] for sample in samples if sample in work.assigned}
        assignment = Assignment(flow, work, link, set(samples), expected, placement, span, dict(before))
        self._assignments[flow] = assignment
        work.assigned.update(dict.fromkeys(samples, assignment))
        if work.is_untouched:
            work.fingerprint = fingerprint.digest
            if isinstance(work.job, NumberedStream) and not work.job.fingerprint:
                work.job.fingerprint = fingerprint.digest
                for one in self._works.get(work.job, ()):  # an event's id names one kind of replica
                    one.wanted_fingerprint = fingerprint.digest
        try:
            await link.post("/fleet/generate", call)
            if link.hello is not hello:
                raise LinkLost(f"{link.url}: {link.failure}")
        except BaseException as error:
            if isinstance(error, LinkLost) and assignment.is_placed:  # it was lost as one that runs
                return
            self._give_up(assignment, "not taken", is_error=True)
            for sample, other in before.items():
                if other.flow in self._assignments:
                    work.assigned[sample] = other
            if work.job not in self._open:
                for other in before.values():
                    self._give_up(other, "taken back")
            raise
        if not assignment.is_placed:
            self._placed(assignment)
        if self._assignments.get(flow) is not assignment:  # it ended, or was taken back, meanwhile
            self._spawn(self._abort(link, flow))

    def _placed(self, assignment: Assignment) -> None:
        """A replica has taken a call: it has said so, or something has come of it before that."""
        assignment.is_placed = assignment.work.is_admitted = True
        self._metrics.routed(assignment.link.url, assignment.placement.choice)
        self.placements.append(assignment.placement)
        replaced, assignment.replaced = assignment.replaced, {}
        for sample, other in replaced.items():
            other.samples.discard(sample)
            if not other.samples:
                self._give_up(other, "moved")

    def _span(self, placement: Placement, context: Context | None) -> CallSpan | None:
        """The span of a placement, where there are traces. context: what it goes below."""
        if self._traces is None or context is None:
            return None
        return self._traces.call("placement", context, attributes_of(placement))

    async def _choose(self, work: Work, samples: Sequence[int], excluded: set[Link]) -> Choice:
        """Raises NoReplica."""
        secret = self._secret.encode()
        found = self._candidates(excluded, lambda hello: work.digests(samples, hello, secret))
        candidates = eligible(found, work.wanted_fingerprint if work.is_untouched else work.fingerprint)
        if any(link.hello is not None and link.hello.has_windows for link in self.links.values()):
            candidates = await self._asked(work, samples, candidates)
        most = work.sampling.max_tokens
        expected = self._new_tokens if most is None else min(most, self._new_tokens)
        return choose(
            Demand(
                request_id=work.output.request_id,
                num_tokens=len(work.tokens(samples)),
                new_tokens=expected * len(samples),
                hit_rate=self._hit_rate,
            ),
            candidates,
        )

    def _candidates(self, excluded: set[Link], digests: Callable[[Hello], Sequence[int]]) -> list[Candidate]:
        """All replicas that could make sense of the gateway's prompts. digests: of a prompt, as a replica has them."""
        found, unseen = [], self._unseen()
        runs: dict[tuple[str, int], dict[int, int]] = {}
        for link in self.links.values():
            if link in excluded or link.state is None or link.hello is None or link.fingerprint is None:
                continue
            if link.url not in self._fitting:
                continue
            kind = (link.hello.salt, link.hello.block_size)
            if kind not in runs:
                runs[kind] = self.index.runs(digests(link.hello))
            uncached, requests = unseen.get(link, (0, 0))
            found.append(
                Candidate(
                    slot=link.slot,
                    name=link.url,
                    fingerprint=link.fingerprint.digest,
                    healthy=link.is_up,
                    state=link.state,
                    num_blocks=runs[kind].get(link.slot, 0),
                    unseen_tokens=uncached,
                    unseen_requests=requests,
                )
            )
        return found

    def _unseen(self) -> dict[Link, tuple[int, int]]:
        """Tokens and requests that were sent to each replica and are not in its state yet."""
        found: dict[Link, tuple[int, int]] = {}
        for one in self._assignments.values():
            if not one.is_seen:
                tokens, requests = found.get(one.link, (0, 0))
                found[one.link] = (tokens + one.placement.choice.best.uncached_tokens, requests + len(one.samples))
        return found

    async def _asked(self, work: Work, samples: Sequence[int], candidates: list[Candidate]) -> list[Candidate]:
        """The candidates, with what each says that it has cached: of windowed layers the index does not know."""
        call = work.call(0, samples, is_strict=False)

        async def ask(one: Candidate) -> Candidate:
            try:
                link = self._link_at(one.slot)
                if one.num_blocks == 0 or link.hello is None or not link.hello.has_windows:
                    return one
                answer = await asyncio.wait_for(link.post("/fleet/match", call), MATCH_TIMEOUT)
            except (LinkLost, Refused, asyncio.TimeoutError):
                return replace(one, num_blocks=0)
            return replace(one, num_blocks=answer["cached"] // one.state.block_size)

        return list(await asyncio.gather(*map(ask, candidates)))

    async def _search(self, job: FleetSearch) -> None:
        """Let a replica do a beam search. When it is lost, another one does it from the start, with the same result."""
        name, excluded, cause = job.call.name, set[Link](), NEW
        context = None if self._traces is None else self._traces.current()
        refusal: Refused | None = None
        deadline = asyncio.get_running_loop().time() + self._config.patience
        tokens, salt, secret = array("i", job.call.prompt), job.call.salt, self._secret.encode()
        while job in self._open:
            try:
                found = self._candidates(excluded, lambda hello: wire_digests(tokens, salt, hello, secret))
                candidates = eligible(found)
                new = float(job.call.max_tokens * job.num_samples)
                demand = Demand(request_id=name, num_tokens=len(tokens), new_tokens=new, hit_rate=self._hit_rate)
                choice = choose(demand, candidates)
                link = self._link_at(choice.best.candidate.slot)
                job.replica = link.url
                self._metrics.routed(link.url, choice)
                placement = Placement(time.time(), name, (), 0, cause, choice)
                self.placements.append(placement)
                job.finish(await self._searched(job, link, self._span(placement, context)))
            except LinkLost:
                excluded.add(link)
                cause = Cause("lost", link.url)
                self._metrics.resumed("lost")
            except Refused as error:
                if error.status in REFUSED_ELSEWHERE_TOO or error.is_own_fault:
                    self._close(job, _client_error(error))
                excluded.add(link)
                refusal = error
            except NoReplica as error:
                if refusal is not None:
                    self._close(job, _client_error(refusal))
                elif not await self._change(deadline - asyncio.get_running_loop().time()):
                    self._close(job, _nobody(str(error)))
                excluded.clear()
            else:
                self._close(job)

    async def _searched(self, job: FleetSearch, link: Link, span: CallSpan | None) -> dict[str, Any]:
        """What a replica answers to a search. Raises as Link.post."""
        if span is None:
            return await link.post("/fleet/search", job.call)
        outcome = "not finished"
        try:
            answer = await link.post("/fleet/search", replace(job.call, trace=span.traceparent))
            outcome = "finished"
            return answer
        finally:
            span.end(outcome, is_error=outcome != "finished")

    # ------------------------------------------------------------------------------------ as the Listener of its links

    def connected(self, link: Link) -> None:
        """A replica has said what it is."""
        self._fitting.discard(link.url)
        if link.fingerprint is not None and not self._same_model(link.fingerprint):
            parts = ", ".join(self.model.difference(link.fingerprint))
            log.error("replica %s is left out: it serves another model than this gateway's (%s)", link.url, parts)
            self._metrics.left_out(link.url)
            return
        self._fitting.add(link.url)
        if link.fingerprint is not None and (different := self.model.difference(link.fingerprint)):
            log.warning("replica %s computes other bits: %s differ", link.url, ", ".join(different))
        log.info("replica %s is connected", link.url)
        for other in self._draining:  # what found no other place may find one now
            self._spawn(self._empty(other))

    def frame(self, link: Link, frame: Frame) -> None:
        """Something came to a call."""
        assignment = self._assignments.get(frame.flow)
        if assignment is None or assignment.link is not link or frame.sample not in assignment.samples:
            self._metrics.late()
            return
        work, job = assignment.work, assignment.work.job
        is_new = work.enter(frame)
        if not assignment.is_placed:
            self._placed(assignment)
        ledger = work.ledgers[frame.sample]
        if frame.more is not None and (count := frame.more.get("differences", 0)):
            self._metrics.mismatched(count)
            log.error("replica %s draws other tokens than those that were delivered before it took over", link.url)
        if is_new and frame.tokens:
            self._token_came(assignment, frame.sample)
        if ledger.output.finished:
            assignment.samples.discard(frame.sample)
            if not assignment.samples:
                self._forget(assignment, "finished")
            if is_new:
                work.output.num_running -= 1
                job.num_open -= work.output.finished
                self._new_tokens += MEMORY * (len(ledger.tokens) - self._new_tokens)
        if frame.more is not None and "cached" in frame.more:
            share = frame.more["cached"] / max(1, len(work.output.prompt_token_ids))
            self._hit_rate += MEMORY * (share - self._hit_rate)
            self._metrics.cached(frame.more["cached"], len(work.output.prompt_token_ids))
        try:
            if (is_new or frame.more) and (deltas := job.news(work.output)):
                job.take(deltas)
        except Exception as error:  # no fault of the replica's
            log.exception("an answer cannot be made")
            self._close(job, internal_error(error))
        if job.num_open == 0:
            self._close(job)

    def _token_came(self, assignment: Assignment, sample: int) -> None:
        """A new token of a sample came: how long that took is counted where it is the first from this replica."""
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
        """A call has ended before its samples did."""
        assignment = self._assignments.get(flow)
        if assignment is None or assignment.link is not link:
            self._metrics.late()
        elif status == HTTPStatus.SERVICE_UNAVAILABLE:  # its engine has failed
            self._lose(assignment, "failed")
        else:
            self._close(assignment.work.job, _client_error(Refused(status, body)))

    def blocks(self, link: Link, snapshot: list[int] | None, events: list[list[Any]]) -> None:
        """The blocks that a replica holds, or what happened to them."""
        if snapshot is not None:
            self.index.replace(link.slot, snapshot)
        for kind, *digests in events:
            if kind == "+":
                self.index.store(link.slot, digests)
            elif kind == "-":
                self.index.remove(link.slot, digests)
            else:
                self.index.clear(link.slot)

    def started(self, link: Link, flows: Sequence[int]) -> None:
        """The replica's state counts these calls."""
        for flow in flows:
            assignment = self._assignments.get(flow)
            if assignment is not None and assignment.link is link:
                assignment.is_seen = True

    def changed(self, link: Link) -> None:
        """A replica's state is another one."""
        self._news.set()
        if link.state is not None and link.state.draining and link not in self._draining:
            self._draining.add(link)
            self._spawn(self._empty(link))

    def contradicted(self, link: Link) -> None:
        """A replica has sent what cannot be."""
        self._metrics.contradicted(link.url)

    def lost(self, link: Link) -> None:
        """Whatever a replica was asked for is asked of others."""
        self._draining.discard(link)
        self.index.clear(link.slot)
        self._news.set()
        self._metrics.lost(link.url)
        for assignment in [one for one in self._assignments.values() if one.link is link and one.is_placed]:
            self._lose(assignment, "lost")

    def _lose(self, assignment: Assignment, why: str) -> None:
        work, samples = assignment.work, sorted(assignment.samples)
        self._forget(assignment, why, is_error=True)
        if work.job not in self._open:
            return
        if self._config.resume == "never":
            self._close(work.job, _nobody(f"{assignment.link.url} was lost, and --resume is 'never'"))
            return
        work.num_lost += 1
        if work.num_lost > MOST_LOST:
            message = f"{work.num_lost} replicas in a row were lost with the request before a new token came"
            self._close(work.job, _nobody(f"{message}, the last one at {assignment.link.url}"))
            return
        self._metrics.resumed(why)
        if not assignment.is_moving:  # else its move goes on, or ends in the same
            self._spawn(self._resume(work, samples, Cause(why, assignment.link.url)))

    async def _resume(self, work: Work, samples: Sequence[int], cause: Cause) -> None:
        try:
            await self._place(work, cause, samples)
        except ApiError as error:
            self._close(work.job, error)
        except Exception as error:  # a client must not wait for ever
            log.exception("a request cannot go on")
            self._close(work.job, internal_error(error))

    async def _empty(self, link: Link) -> None:
        """Let others go on with what a draining replica computes. What has no other place stays."""
        moving = [one for one in self._assignments.values() if one.link is link and one.is_placed and not one.is_moving]
        reasons = await asyncio.gather(*map(self._move, moving))
        stay = [why for why in reasons if why is not None]
        if stay:
            log.warning("%d requests stay at %s, which is draining: %s", len(stay), link.url, stay[0])

    async def _move(self, assignment: Assignment) -> str | None:
        """Let another replica go on with an assignment. Returns why that is not possible."""
        work, link, cause = assignment.work, assignment.link, Cause("drained", assignment.link.url)
        samples, why = sorted(assignment.samples), None
        assignment.is_moving = True
        try:
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

    # -------------------------------------------------------------------------------------------------- membership

    async def _follow(self) -> None:
        """Be connected to all members, and to no others."""
        if self._http is None:
            return
        async for members in self._membership.changes():
            wanted = {member.url for member in members}
            for url in [url for url in self.links if url not in wanted]:
                link = self.links.pop(url)
                self._runs.pop(url).cancel()
                self._free_slots.insert(0, link.slot)
            for url in sorted(wanted - self.links.keys()):
                if not self._free_slots:
                    log.error("replica %s is left out: a gateway has room for %d", url, MAX_SLOTS)
                    continue
                link = Link(self._free_slots.pop(0), url, self._secret, self._http, self)
                self.links[url] = link
                self._runs[url] = asyncio.create_task(link.run())

    def _link_at(self, slot: int) -> Link:
        for link in self.links.values():
            if link.slot == slot:
                return link
        raise LinkLost("the replica has left the fleet")

    def _same_model(self, fingerprint: Fingerprint) -> bool:
        return not set(self.model.difference(fingerprint)) & set(MODEL_PARTS)

    async def _change(self, seconds: float) -> bool:
        """Wait until something about a replica changes. False: nothing did for that long."""
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), max(0.0, seconds))
        except asyncio.TimeoutError:
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the gateway failed", exc_info=task.exception())


def _without(links: Collection[Link]) -> str:
    return f"; without {', '.join(sorted(link.url for link in links))}" if links else ""


def _nobody(why: str) -> ApiError:
    return ApiError(why, HTTPStatus.SERVICE_UNAVAILABLE, code="no_replica", headers={"Retry-After": "1"})


def _client_error(error: Refused, work: Work | None = None) -> ApiError:
    """What a replica has refused, as the client would have been refused without a fleet."""
    found = error.error
    param, code = found.get("param"), found.get("code")
    guide = None if work is None else work.requests[0].guide
    if code == "bad_grammar" and isinstance(guide, FarGuide):
        param, code = guide.field, None
    headers = {"Retry-After": "1"} if error.status == HTTPStatus.TOO_MANY_REQUESTS else None
    return ApiError(str(error), HTTPStatus(error.status), param=param, code=code, headers=headers)
