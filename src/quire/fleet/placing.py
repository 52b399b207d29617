"""Placer: sends samples and beam searches to replicas, until one accepts them or no further one would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import blake2b

from quire.errors import NoReplica
from quire.fleet.attempts import Attempts, no_replica
from quire.fleet.choosing import Chosen
from quire.fleet.link import Link, LinkLost, Refused, abort
from quire.fleet.placement import NEW, Cause, Placement
from quire.fleet.resume import why_to_end
from quire.fleet.search import FleetSearch
from quire.fleet.shared import Shared
from quire.fleet.spans import span_of
from quire.fleet.stream import NumberedStream
from quire.fleet.wire import EncodeCall, EncodedPrompt, Images, read_encoded
from quire.fleet.work import Assignment, Work
from quire.frontend.jobs import GenerationJob


class Placer:
    """Applies the decisions of `Chooser` and `Attempts`."""

    def __init__(self, shared: Shared, secret: str, on_placed: Callable[[Assignment], None]) -> None:
        """on_placed: called when a replica has accepted a call."""
        self._shared = shared
        self._secret = secret.encode()
        self._on_placed = on_placed

    async def place(self, work: Work, cause: Cause, samples: Sequence[int] = (), without: Link | None = None) -> None:
        """Assign these samples, or all open ones, to a replica. They share a call until one of them has a token.

        without: a replica that must not get them. Raises ApiError if all refuse, or if no replica is available within
        the patience. A request that has begun waits for room without a limit.
        """
        shared = self._shared
        attempts = Attempts(shared.roster, shared.config.patience, without, work.requests[0].guide)
        while work.job in shared.jobs:
            wanted = [sample for sample in work.open_samples if not samples or sample in samples]
            if not wanted:
                return
            if not work.is_one_call(wanted):
                await asyncio.gather(*(self.place(work, cause, [sample], without) for sample in wanted))
                return
            try:
                chosen = await shared.chooser.for_work(work, wanted, attempts.passed_over)
            except NoReplica as error:
                await attempts.found_none(error, has_begun=work.is_admitted)
                continue
            try:
                await self._assign(work, wanted, cause, chosen)
                return
            except LinkLost:
                attempts.lost(chosen.link)
            except Refused as refusal:
                attempts.refused(chosen.link, refusal)

    async def search(self, job: FleetSearch) -> None:
        """Run a beam search at a replica. If it is lost, another one restarts the search, with the same result.

        Raises ApiError like `place`.
        """
        shared, context = self._shared, self._shared.context()
        attempts, cause, num_lost = Attempts(shared.roster, shared.config.patience), NEW, 0
        while True:
            try:
                link, choice = shared.chooser.for_search(job, attempts.passed_over)
            except NoReplica as error:
                await attempts.found_none(error)
                continue
            job.replica = link.url
            placement = Placement(time.time(), job.call.name, (), 0, cause, choice)
            shared.placements.append(placement)
            try:
                await job.run_at(link, span_of(placement, shared.traces, context))
                shared.metrics.routed(link.url, choice)
                return
            except LinkLost as error:
                num_lost += 1
                if (end := why_to_end("any", num_lost, "the beam search", link.url)) is not None:
                    raise no_replica(end) from error
                # The patience begins again, since the search may have run for long.
                attempts = Attempts(shared.roster, shared.config.patience)
                attempts.lost(link)
                cause = Cause("lost", link.url)
                shared.metrics.count("resumed", "lost")
            except Refused as refusal:
                attempts.refused(link, refusal)

    async def encode(self, images: Images) -> EncodedPrompt:
        """Return the tokens of a prompt with images. Raises ApiError like `place`.

        The same replica makes them for the same images, since it keeps their rows for a while.
        """
        shared = self._shared
        attempts, digest = Attempts(shared.roster, shared.config.patience), blake2b(digest_size=16)
        for url in images.urls:
            digest.update(url.encode())
        while True:
            links = [link for link in shared.roster.serving() if link not in attempts.passed_over]
            if not links:
                await attempts.found_none(NoReplica("no replica is there to read the images"))
                continue
            link = max(links, key=lambda one: blake2b(one.url.encode(), key=digest.digest()).digest())
            try:
                return await link.ask("/fleet/images", EncodeCall(images=images), read_encoded)
            except LinkLost:
                attempts.lost(link)
            except Refused as refusal:
                attempts.refused(link, refusal)

    def accepted(self, assignment: Assignment) -> None:
        """Record that a replica accepted a call: it answered so, or a frame of the call arrived before the answer."""
        shared = self._shared
        shared.metrics.routed(assignment.link.url, assignment.placement.choice)
        shared.placements.append(assignment.placement)
        shared.calls.accept(assignment)
        self._on_placed(assignment)

    async def _assign(self, work: Work, samples: Sequence[int], cause: Cause, chosen: Chosen) -> None:
        """Send a call. Raises Refused and LinkLost."""
        link, shared = chosen.link, self._shared
        hello, fingerprint = link.hello, link.fingerprint
        if hello is None or fingerprint is None:
            raise LinkLost(link.url)
        delivered, best = len(work.ledgers[samples[0]].tokens), chosen.choice.best
        placement = Placement(time.time(), work.output.request_id, tuple(samples), delivered, cause, chosen.choice)
        span, flow = span_of(placement, shared.traces, work.context), shared.calls.next_flow()
        trace = None if span is None else span.traceparent
        if work.is_untouched:
            work.begin(fingerprint.digest)
            self._bind(work.job, fingerprint.digest)
        call = work.call(flow, samples, is_strict=shared.config.resume == "exact", trace=trace)
        call = replace(call, uncached=best.uncached_tokens, holder=best.candidate.holder)
        expected = shared.roster.index.expect(link.slot, work.digests(samples, hello, self._secret))
        before = {sample: work.assigned[sample] for sample in samples if sample in work.assigned}
        assignment = Assignment(flow, work, link, set(samples), expected, placement, span, dict(before))
        shared.calls.add(assignment)
        try:
            await link.post("/fleet/generate", call)
            if link.hello is not hello:
                raise LinkLost(f"{link.url}: {link.failure}")
        except BaseException as error:
            if isinstance(error, LinkLost) and assignment.is_placed:  # `Mover.lost` has moved it already
                return
            shared.calls.refuse(assignment, before, is_over=work.job not in shared.jobs)
            self._unbind(work.job)
            raise
        if not assignment.is_placed:
            self.accepted(assignment)
        if not shared.calls.is_open(assignment):  # it ended or was aborted meanwhile
            shared.tasks.spawn(abort(link, flow))

    def _bind(self, job: GenerationJob, fingerprint: str) -> None:
        """Send all prompts of a stream to one kind of replica, which the ids of its events name."""
        if isinstance(job, NumberedStream) and not job.fingerprint:
            job.fingerprint = fingerprint
            for one in self._shared.jobs.of(job):
                one.wanted_fingerprint = fingerprint

    def _unbind(self, job: GenerationJob) -> None:
        """Allow a stream any replica that its client's last event allows, unless one has or may have accepted it."""
        works = self._shared.jobs.of(job)
        if isinstance(job, NumberedStream) and not any(one.is_admitted or one.assigned for one in works):
            job.fingerprint = ""
            for one in works:
                one.wanted_fingerprint = job.wanted_fingerprint
