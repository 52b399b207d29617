"""Chooser: selects the replica for a request from the known states of all replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from quire.errors import NoReplica
from quire.fleet.averages import Averages
from quire.fleet.calls import Calls, Unseen
from quire.fleet.link import Link, LinkLost, Refused
from quire.fleet.roster import Roster
from quire.fleet.score import Candidate, Demand, PlacementChoice, choose, eligible, step_age, with_holders
from quire.fleet.search import FleetSearch
from quire.fleet.wire import Hello, MatchCall, encoded_to_json, read_matched
from quire.fleet.work import Work

MATCH_TIMEOUT = 0.05  # s that a replica has to report its cached tokens


class Chosen(NamedTuple):
    """The replica that was chosen, and the ranking that led to it."""

    link: Link
    choice: PlacementChoice


class _Runs(NamedTuple):
    """Numbers of leading blocks of a prompt, by slot."""

    held: dict[int, int]  # in memory, or expected there
    reach: dict[int, int]  # in memory, expected there, or on the disk
    given: dict[int, int]  # in memory or on the disk, without those that are only expected


class Chooser:
    """Chooses replicas, and learns from the results. Only the event loop may use it."""

    def __init__(self, roster: Roster, secret: str, calls: Calls) -> None:
        """calls: all open ones."""
        self._roster = roster
        self._secret = secret.encode()
        self._calls = calls
        self.averages = Averages()

    def check_health(self) -> None:
        """Raise NoReplica if no replica serves."""
        eligible(self._candidates(lambda _: ()), others=self._others(()))

    async def for_work(self, work: Work, samples: Sequence[int], passed_over: Collection[Link]) -> Chosen:
        """Choose a replica for these samples. Raises NoReplica."""
        found = self._candidates(lambda hello: work.digests(samples, hello, self._secret), work.needed_fingerprint)
        # Replicas that were passed over cannot take the request, but they may have blocks of it.
        apart = {link.slot for link in passed_over}
        candidates = eligible(_without(found, apart), work.needed_fingerprint, self._others(passed_over))
        if any(link.hello is not None and link.hello.has_windows for link in self._roster.links.values()):
            found = await self._asked(work, samples, found)
        # Another prompt of the same stream may have begun meanwhile.
        there = _without(with_holders(found), apart)
        candidates = eligible(there, work.needed_fingerprint, self._others(passed_over))
        expected = self.averages.new_tokens(work.sampling.max_tokens) * len(samples)
        name, num_tokens = work.output.request_id, len(work.tokens(samples))
        return self._cheapest(self.averages.demand(name, num_tokens, expected), candidates)

    def for_search(self, job: FleetSearch, passed_over: Collection[Link]) -> Chosen:
        """Choose a replica for a beam search. Raises NoReplica."""
        found = self._candidates(lambda hello: job.digests(hello, self._secret))
        candidates = eligible(_without(found, {link.slot for link in passed_over}), others=self._others(passed_over))
        expected = float(job.call.max_tokens * job.num_samples)
        return self._cheapest(self.averages.demand(job.call.name, len(job.call.prompt), expected), candidates)

    def _cheapest(self, demand: Demand, candidates: Sequence[Candidate]) -> Chosen:
        choice = choose(demand, candidates)
        link = self._roster.at(choice.best.candidate.slot)
        if link is None:
            raise LookupError(f"slot {choice.best.candidate.slot} is a candidate's and no replica's")
        return Chosen(link, choice)

    def _candidates(self, digests: Callable[[Hello], Sequence[int]], needed: str | None = None) -> list[Candidate]:
        """Return all replicas that have the gateway's model.

        digests: returns the digests of a prompt's blocks for a replica. needed: the fingerprint of the replicas that
        have begun a prompt, which may have old weights.
        """
        found, unseen, now = [], self._calls.unseen(), time.monotonic()
        runs: dict[tuple[str, int], _Runs] = {}
        for link in self._roster.links.values():
            if link.state is None or link.hello is None or link.fingerprint is None:
                continue
            if not self._roster.is_fitting(link) and not (
                # A client's Last-Event-ID may name any fingerprint.
                link.fingerprint.digest == needed and self._roster.has_other_weights_at_most(link.fingerprint)
            ):
                continue
            kind = (link.hello.salt, link.hello.block_size)
            if kind not in runs:
                runs[kind] = self._runs(digests(link.hello))
            held, reach, given = (one.get(link.slot, 0) for one in runs[kind])
            sent = unseen.get(link, Unseen(0, 0, now))
            found.append(
                Candidate(
                    slot=link.slot,
                    name=link.url,
                    fingerprint=link.fingerprint.digest,
                    salt=link.hello.salt,
                    state=link.state,
                    step_age=step_age(link.state, link.state_time, sent.since, now),
                    num_blocks=held,
                    num_disk_blocks=reach - held,
                    num_given=given if link.state.seconds_a_peer_block else 0,
                    unseen_tokens=sent.tokens,
                    unseen_requests=sent.requests,
                )
            )
        return found

    def _runs(self, digests: Sequence[int]) -> _Runs:
        """Return the number of leading blocks that each replica has."""
        index, disk = self._roster.index, self._roster.disk
        held = index.runs(digests)
        reach = index.runs(digests, disk) if len(disk) else held
        return _Runs(held, reach, index.held_runs(digests, disk) if held or len(disk) else held)

    def _others(self, passed_over: Collection[Link]) -> list[str]:
        """Return a reason for each replica that is not a candidate."""
        found = []
        for link in self._roster.links.values():
            if not link.is_up:
                found.append(f"{link.url} does not answer: {link.failure}")
            elif not self._roster.is_fitting(link):
                found.append(f"{link.url} serves another model")
            elif link in passed_over:
                found.append(f"{link.url} was asked and has not taken it")
        return found

    async def _asked(self, work: Work, samples: Sequence[int], candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates with the numbers of blocks that they report themselves.

        The index does not know enough about sliding windows and recurrent states. Candidates that have left the fleet
        meanwhile are dropped. Raises NoReplica if all have.
        """
        call = MatchCall(**vars(work.call(0, samples, is_strict=False)))
        if (rows := work.requests[0].images) is not None:
            call = replace(call, images=None, encoded=encoded_to_json(call.prompt, rows))
        read = partial(read_matched, len(work.tokens(samples)))

        async def ask(one: Candidate) -> Candidate:
            link = self._roster.at(one.slot)
            if one.num_blocks + one.num_disk_blocks == 0:
                return one
            if link is None or link.hello is None or not link.hello.has_windows:
                return one
            try:
                cached, stored = await asyncio.wait_for(link.ask("/fleet/match", call, read), MATCH_TIMEOUT)
            except (LinkLost, Refused, asyncio.TimeoutError):
                cached = stored = 0
            held, reach = cached // one.state.block_size, stored // one.state.block_size
            given = reach if one.state.seconds_a_peer_block else 0
            return replace(
                one,
                num_blocks=held,
                num_disk_blocks=reach - held,
                num_given=given,
            )

        asked = await asyncio.gather(*map(ask, candidates))
        there = [one for one in asked if self._is_there(one)]
        if not there:
            raise NoReplica("no replica can take the request: those that could have left the fleet")
        return there

    def _is_there(self, one: Candidate) -> bool:
        """Return whether the candidate's slot still belongs to the same replica with the same fingerprint."""
        link = self._roster.at(one.slot)
        if link is None or link.url != one.name or link.fingerprint is None:
            return False
        return link.fingerprint.digest == one.fingerprint


def _without(candidates: Sequence[Candidate], slots: Collection[int]) -> list[Candidate]:
    return [one for one in candidates if one.slot not in slots]
