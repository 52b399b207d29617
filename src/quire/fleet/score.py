"""Routing: a request goes to the replica with the lowest cost, in seconds. No threshold switches the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from itertools import groupby, starmap
from statistics import median
from typing import Any, NamedTuple, TypeAlias, TypeVar

from quire.errors import BadValue, NoReplica, are_counts, are_times, check_integer, check_number
from quire.fleet.state import ReplicaState
from quire.request import Holder

T = TypeVar("T")
WORTH = 0.5  # a replica reads a block from elsewhere if that takes less than this share of the time to compute it
TIE = 1.03  # costs within this ratio of the smallest count as equal, since rates are not known more precisely
# Seconds to assume while no replica knows its rates. Only their ratios matter then.
ASSUMED_STEP = 0.02
ASSUMED_PROMPT_TOKEN = 0.0005
ASSUMED_SEQUENCE = 0.0005


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The needs of a request. Raises BadValue, with the field's name, for an invalid number."""

    request_id: str
    num_tokens: int  # tokens to be computed before the next one can be drawn: the prompt and the delivered ones
    new_tokens: float  # expected number: the average of earlier requests, at most this one's max_tokens
    hit_rate: float  # 0..1, recent share of the fleet's prompt tokens that were cached: the value of a cached token

    def __post_init__(self) -> None:
        check_integer(BadValue, "num_tokens", self.num_tokens, 1)
        check_number(BadValue, "new_tokens", self.new_tokens, 0.0)
        check_number(BadValue, "hit_rate", self.hit_rate, 0.0, 1.0)


@dataclass(kw_only=True, slots=True)
class Candidate:
    """A replica as the gateway sees it when a request arrives.

    It is not frozen: a gateway makes one for each replica and request, and a frozen one takes twice as long. The
    simulator reuses candidates and changes their `step_age`.
    Raises BadValue, with the field's name, for an invalid number.
    """

    slot: int
    name: str  # its URL, for messages
    fingerprint: str  # digest of everything that its bits depend on
    state: ReplicaState  # the last one that it sent
    # Estimated s since it began a step: since that state arrived or, if it was idle then, since a request was sent
    # there.
    step_age: float
    num_blocks: int  # leading full blocks of the request that it holds or is expected to hold: FleetIndex.runs
    unseen_tokens: int  # prompt tokens not expected to be cached, of requests that were sent there after that state
    unseen_requests: int
    num_disk_blocks: int = 0  # further blocks, after num_blocks, that it has in memory or on its disk
    num_given: int = 0  # leading blocks that it can send to others now: in memory or on its disk, not only expected
    holder: Holder | None = None  # another replica that it can read from; see `with_holders`
    salt: str = ""  # of its blocks' digests: another one for each replica that has replaced its weights

    def __post_init__(self) -> None:
        if not are_counts(
            self.num_blocks, self.unseen_tokens, self.unseen_requests, self.num_disk_blocks, self.num_given
        ):
            for name in ("num_blocks", "unseen_tokens", "unseen_requests", "num_disk_blocks", "num_given"):
                check_integer(BadValue, name, getattr(self, name), 0)
        if not are_times(self.step_age):
            check_number(BadValue, "step_age", self.step_age, 0.0)


class ScoreParts(NamedTuple):
    """The cost of a request at a replica, in seconds. The sum decides; the parts explain it."""

    queue: float  # the rest of the current step, and prompt tokens that are computed before its own
    step: float  # the step that draws its first token, with all sequences that decode in it
    compute: float  # its own tokens that are not cached
    delay: float  # the same again, since later requests wait for them
    disk: float  # reading blocks from its disk; nothing else waits for that
    peer: float  # reading from another replica; nothing else waits for that either
    decode: float  # its new tokens; each of their steps decodes other sequences, too
    room: float  # until enough requests have ended for it to get a slot and blocks
    evict: float  # recomputing the blocks evicted for it, weighted by the chance that they are needed again

    @property
    def total(self) -> float:
        """The cost."""
        return _total(*self)


def _total(
    queue: float, step: float, compute: float, delay: float, disk: float, peer: float, decode: float, room: float,
    evict: float,
) -> float:  # fmt: skip
    return queue + step + compute + delay + decode + disk + peer + room + evict


class Ranked(NamedTuple):
    """A candidate and its cost."""

    candidate: Candidate
    uncached_tokens: int  # tokens that it would compute for the request
    parts: ScoreParts


class PlacementChoice:
    """The result of routing a request."""

    def __init__(self, best: Ranked, num_tied: int, rank: Callable[[], tuple[Ranked, ...]]) -> None:
        """num_tied: candidates that are as good as the cheapest. rank: returns all candidates in order, these first."""
        self.best = best
        self.num_tied = num_tied
        self._rank = rank

    @cached_property
    def ranking(self) -> tuple[Ranked, ...]:
        """All candidates, the best first, to explain the choice. Computed at the first access."""
        return self._rank()


Rates: TypeAlias = tuple[float, float, float]  # seconds of a step, a prompt token and a sequence


def eligible(
    candidates: Iterable[Candidate], fingerprint: str | None = None, others: Sequence[str] = ()
) -> list[Candidate]:
    """Return the candidates that may take a request: those that are not draining.

    fingerprint: the one that a request needs after it has begun; before, None.
    others: reasons why other replicas are not candidates.

    Raises NoReplica, with a reason for each replica, if no candidate is left.
    """
    found, refused = [], list(others)
    for candidate in candidates:
        if candidate.state.draining:
            refused.append(f"{candidate.name} is draining")
        elif fingerprint is not None and candidate.fingerprint != fingerprint:
            refused.append(f"{candidate.name} computes other bits ({candidate.fingerprint}, not {fingerprint})")
        else:
            found.append(candidate)
    if not found:
        raise NoReplica(f"no replica can take the request: {'; '.join(refused) or 'the fleet has none'}")
    return found


def choose(demand: Demand, candidates: Sequence[Candidate]) -> PlacementChoice:
    """Rank the candidates by the cost of the request at each.

    Candidates within 3 % of the cheapest are ordered by the number of tokens to compute, then by the number of blocks
    that they hold, which balances the caches, then by a hash of the request's id: the same request always gets the
    same order.

    candidates: those from `eligible`. Raises NoReplica without a candidate.
    """
    if not candidates:
        raise NoReplica("no replica can take the request: the fleet has none")
    rates = _known_rates([candidate.state for candidate in candidates])
    uncached: list[int] = []
    costs: list[tuple[float, ...]] = []  # in the order of ScoreParts
    for candidate, those in zip(candidates, rates, strict=True):
        read = reading(candidate, those[1])
        tokens = uncached_tokens(demand, candidate, read.num_blocks)
        uncached.append(tokens)
        costs.append(_cost(demand, candidate, tokens, read, those))
    totals = list(starmap(_total, costs))
    limit = min(totals) * TIE
    tied = [i for i, total in enumerate(totals) if total <= limit]

    def ranked(i: int) -> Ranked:
        return Ranked(candidates[i], uncached[i], ScoreParts(*costs[i]))

    def wealth(i: int) -> tuple[int, int]:
        return uncached[i], candidates[i].state.held_blocks

    def by_chance(i: int) -> bytes:
        return _hash(demand.request_id, candidates[i].slot)

    def rank() -> tuple[Ranked, ...]:
        worse = [i for i, total in enumerate(totals) if total > limit]
        order = *_ordered(tied, wealth, by_chance), *_ordered(worse, totals.__getitem__, by_chance)
        return tuple(map(ranked, order))

    fortunes = list(map(wealth, tied))
    least = min(fortunes)
    poorest = [i for i, fortune in zip(tied, fortunes, strict=True) if fortune == least]
    return PlacementChoice(ranked(poorest[0] if len(poorest) == 1 else min(poorest, key=by_chance)), len(tied), rank)


def _ordered(items: Iterable[T], key: Callable[[T], Any], then: Callable[[T], Any]) -> Iterator[T]:
    """Sort by a key, and equal items by a second key, which is slower to compute."""
    for _, equal in groupby(sorted(items, key=key), key):
        those = list(equal)
        yield from those if len(those) == 1 else sorted(those, key=then)


def step_age(state: ReplicaState, state_time: float, sent: float, now: float) -> float:
    """Return the estimated seconds since a replica began a step, for Candidate.

    state_time: when its last state arrived. sent: when the first request that this state does not count was sent.
    """
    is_idle = state.num_running + state.num_waiting == 0
    return max(0.0, now - (sent if is_idle else state_time))


class Reading(NamedTuple):
    """Blocks that a candidate reads instead of computing them."""

    num_blocks: int = 0
    disk: float = 0.0  # s
    peer: float = 0.0  # s


NOTHING = Reading()


def reading(candidate: Candidate, prompt_token: float) -> Reading:
    """Return the blocks that the candidate would read from its disk or from another replica, whichever saves more.

    The replica decides by the same rule. prompt_token: its seconds per prompt token. A replica that does not report
    the time of reading does not read.
    """
    if not candidate.num_disk_blocks and candidate.holder is None:  # the usual case
        return NOTHING
    state, found, saved = candidate.state, NOTHING, 0.0
    computing = state.block_size * prompt_token
    peer_blocks = 0 if candidate.holder is None else candidate.holder.num_blocks - candidate.num_blocks
    for name, count, seconds in (
        ("disk", candidate.num_disk_blocks, state.seconds_a_disk_block),
        ("peer", peer_blocks, state.seconds_a_peer_block),
    ):
        if 0.0 < seconds < WORTH * computing and count * (computing - seconds) > saved:
            found, saved = Reading(count, **{name: count * seconds}), count * (computing - seconds)
    return found


def with_holders(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates, each with the one of the same kind that can send it the most blocks."""
    most: dict[tuple[str, str], list[Candidate]] = {}  # for each kind the two candidates that can send the most
    for one in candidates:
        if one.num_given:
            kind = (one.fingerprint, one.salt)
            most[kind] = sorted((*most.get(kind, ()), one), key=lambda other: (-other.num_given, other.slot))[:2]
    found = []
    for one in candidates:
        other = next((best for best in most.get((one.fingerprint, one.salt), ()) if best.slot != one.slot), None)
        is_more = other is not None and other.num_given > max(one.num_blocks, one.num_given)
        found.append(replace(one, holder=Holder(other.name, other.num_given)) if other and is_more else one)
    return found


def uncached_tokens(demand: Demand, candidate: Candidate, read: int = 0) -> int:
    """Return the number of tokens that the candidate would compute. The last token is always computed.

    read: blocks that it reads from its disk or from another replica.
    """
    return max(1, demand.num_tokens - (candidate.num_blocks + read) * candidate.state.block_size)


def _cost(demand: Demand, candidate: Candidate, uncached: int, read: Reading, rates: Rates) -> tuple[float, ...]:
    """Return the cost of a request at a replica, in the order of ScoreParts. Plain numbers, being called often."""
    state, (a_step, a_token, a_sequence) = candidate.state, rates
    num_blocks, block_size, most = state.num_blocks, state.block_size, state.max_running
    reported = state.num_running + state.num_waiting
    ahead = reported + candidate.unseen_requests
    running = ahead if ahead < most else most
    step = a_step + running * a_sequence
    # Some of the work that has begun is done by now. Requests sent since have begun, too, if the replica was idle.
    waiting = state.waiting_tokens + candidate.unseen_tokens
    begun = state.waiting_tokens if reported else waiting
    left = begun * a_token + (step if ahead else 0.0) - candidate.step_age
    queue = (left if left > 0.0 else 0.0) + (waiting - begun) * a_token

    blocks = -(-(demand.num_tokens + round(demand.new_tokens)) // block_size) - candidate.num_blocks
    promised = -(-waiting // block_size)  # blocks that earlier requests allocate first
    empty = state.free_blocks - state.cached_blocks - promised
    evicted = blocks - empty if empty > 0 else blocks
    # The share of running requests that must end before there is room. All are replaced in the time of one answer.
    slots = (ahead + 1 - most) / most
    memory = (blocks + promised - state.free_blocks) / num_blocks
    short = slots if slots > memory else memory

    compute = uncached * a_token
    return (
        queue,
        step,
        compute,
        compute,
        read.disk,
        read.peer,
        # A running request ends, on average, when half of this one is done. Later ones go to the least busy replica.
        demand.new_tokens * (running / 2 + 1) * a_sequence,
        short * demand.new_tokens * step if short > 0.0 else 0.0,
        min(evicted, state.cached_blocks) * block_size * a_token * demand.hit_rate if evicted > 0 else 0.0,
    )


def _known_rates(states: Sequence[ReplicaState]) -> list[Rates]:
    """Return each replica's rates. An unknown rate is replaced by the median of the others."""
    known = [(state.seconds_a_step, state.seconds_a_prompt_token, state.seconds_a_sequence) for state in states]
    if all(map(all, known)):
        return known
    if not any(map(any, known)):
        known = [(ASSUMED_STEP, ASSUMED_PROMPT_TOKEN, ASSUMED_SEQUENCE)] * len(states)
    usual = [median([value for value in values if value > 0.0] or [0.0]) for values in zip(*known, strict=True)]
    return [(a or usual[0], b or usual[1], c or usual[2]) for a, b, c in known]


def _hash(request_id: str, slot: int) -> bytes:
    """Return a sort key that depends only on the request and the slot."""
    return blake2b(f"{slot}\0{request_id}".encode(errors="surrogatepass"), digest_size=8).digest()
