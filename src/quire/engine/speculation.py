"""Speculative decoding: compute draft tokens together with a request's own token, and keep those that it draws itself.

A step computes the draft tokens like a chunk of a prompt, and draws a token after each of them by the same rule as
without drafts. Those that equal the draft tokens are accepted. Since rows are batch-invariant and a draw depends on the
tokens before it alone, the accepted tokens are the ones that decoding one by one would give: a draft changes no token.
"""

from __future__ import annotations

import logging
import time
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from quire.cache.manager import BlockManager
from quire.config import MAX_SPECULATIVE_TOKENS
from quire.engine.draft_costs import DraftCosts
from quire.engine.plan import Plan, PlanItem
from quire.request import Guide, Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("quire")

MATCHED = (4, 3, 2)  # numbers of last tokens to search for, the longest match first
MAX_ROWS = MAX_SPECULATIVE_TOKENS + 1  # of a step: up to here, a further row is assumed to be cheap
LONGEST_PAUSE = 64  # steps
MAX_FAILURES = 3  # of a drafter: then it is not asked any more, which would fill the log
NUM_GUESSES = 3  # default: a step with them takes a quarter longer, which one accepted in four pays for
NUM_FROM_HEAD = 5  # default with a draft head or model, which stop earlier where a further token would not pay
FIRST_SHARE = 0.7  # assumed share of accepted tokens of a new request
NEWEST = 0.1  # weight of the last draft in a request's share
LEAST = 0.2  # a further draft token is worth its cost if it is accepted with at least this probability
PROBE = 16  # steps after which a request whose drafts did not pay tries one again
FIRST_REST, LONGEST_REST = 16, 2048  # steps without drafts after none has paid, with more than MAX_ROWS rows
PROBES, PROBED = 2, 8  # steps, and most requests in each, in which one draft token is tried before that
MOST_LOST = 0.01  # part of the time that these may take
NOTHING: array[int] = array("i")

Draft: TypeAlias = Sequence[int]
Asked: TypeAlias = tuple[Request, int]  # with the maximum number of its draft tokens, one or more
Room: TypeAlias = Callable[[Request, int], bool]  # gives a request blocks for that number of draft tokens


class Drafter(Protocol):
    """Proposes tokens that may follow requests' tokens. Any proposal is safe: wrong ones only cost time."""

    @property
    def name(self) -> str:
        """The name in metrics."""

    def propose(self, asked: Sequence[Asked], room: Room, /) -> list[Draft]:
        """Return the draft tokens of each request. A drafter that stores K and V must ask for room first."""

    def judge(self, request: Request, num_drafts: int, num_right: int, /) -> None:
        """Record the numbers of a request's last draft tokens, and of those that were accepted."""


class Speculation:
    """Adds draft tokens to steps in which all requests decode."""

    def __init__(
        self, drafters: Sequence[Drafter], num_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """drafters: asked in this order, until one proposes something. num_tokens: most draft tokens at a time."""
        self.drafters = tuple(drafters)
        self._num_tokens = num_tokens
        self._source: weakref.WeakKeyDictionary[Request, Drafter] = weakref.WeakKeyDictionary()  # of the last draft
        self._failures: Counter[Drafter] = Counter()
        self._clock = clock
        self.costs, self._acceptance = DraftCosts(), Acceptance()
        self._rest = self._probes = 0  # see `_paying`
        self._probed, self._rested = PROBED, 0  # requests in the next probe, and steps of the rest before the last one
        self._probing = 0.0  # seconds of the probes' drafts, with the tokens that a drafter had to catch up with
        self._watched: Plan | None = None  # the last plan of a step that only decodes
        self._seconds = 0.0  # of its drafts
        self._drafted_before = False
        self.num_drafts = self.num_draft_tokens = self.num_right = 0  # drafts, their tokens, accepted tokens
        # Tokens by the name of their drafter; those that a guide forces or the caller has to check are "certain".
        self.drafted: dict[str, int] = dict.fromkeys(["certain", *(drafter.name for drafter in drafters)], 0)
        self.accepted = dict(self.drafted)

    def add_to(self, plan: Plan, manager: BlockManager, longest: Callable[[Request], int], budget: int) -> None:
        """Add draft tokens to a step in which all requests decode, within `budget` tokens and the free blocks.

        longest: tokens at which a request ends.
        """
        count, self._watched, self._seconds = plan.num_decoding + len(plan.rest), plan, 0.0
        most = min(self.most(count), budget // max(1, count))
        if most:
            items = plan.items
            allowed = dict.fromkeys((item.request for item in items), most)
        else:
            allowed = self._paying(plan, count, budget)
            items = plan.items if allowed else []
        asked = [
            (item.request, wanted)
            for item in items
            if (wanted := min(allowed.get(item.request, 0), longest(item.request) - len(item.request.tokens) - 1)) > 0
        ]
        if not asked or plan.copies:  # drafters run before the step, so they cannot read blocks that it copies first
            self._drafted_before = False
            return

        def room(request: Request, count: int) -> bool:
            return manager.grow(request, len(request.tokens) + count, plan.copies)

        begin = self._clock()
        drafts = self.drafts(asked, room)
        self._seconds = self._clock() - begin
        self._probing += self._seconds
        found = sum([len(guided.tokens) for guided in drafts.values()])
        if found and self._drafted_before:  # the first draft after a while catches up with the tokens since then
            self.costs.observe_drafts(found, self._seconds)
        self._drafted_before = bool(found)
        for i, (request, start, num_new, *_) in enumerate(items):
            if request in drafts:
                items[i] = PlanItem(request, start, num_new, *drafts[request])
                plan.num_tokens += len(drafts[request].tokens)
        if drafts:
            plan.items = items

    def most(self, num_rows: int) -> int:
        """Return the maximum number of draft tokens for each of `num_rows` requests that decode together."""
        return min(self._num_tokens, (MAX_ROWS - num_rows) // num_rows) if 0 < num_rows < MAX_ROWS else 0

    def observe(self, plan: Plan, seconds: float) -> None:
        """Record the time of a step, if it only decoded: from the start of its plan until its results."""
        if plan is self._watched:
            self.costs.observe(plan.num_tokens, max(0.0, seconds - self._seconds))

    def _paying(self, plan: Plan, count: int, budget: int) -> dict[Request, int]:
        """Return the numbers of draft tokens that pay by the measured costs, with more than MAX_ROWS rows.

        If none pays, some requests try one token in PROBES steps, because either side may have changed. If none pays
        then, either, nothing is computed until the time of these was a small part of all.
        """
        if self._rest or count == 0:
            self._rest = max(0, self._rest - 1)
            return {}
        requests = [item.request for item in plan.items]
        step, price = self.costs.step(count), self.costs.price
        rate, found = count / step, dict[Request, int]()
        while self.costs.knows_drafts:
            wanted, expected = self._worth(requests, price * rate, budget)
            total = (count + expected) / (step + price * sum(wanted.values()))
            if total <= rate:
                break
            rate, found = total, wanted
        if found:
            self._probes = 0
        elif self._probes < PROBES:
            if self._probes == 0:
                self._probing = 0.0
            self._probes += 1
            found = dict.fromkeys(requests[: min(self._probed, budget)], 1)
        else:
            lost = (self._probing + PROBES * min(self._probed, count) * self.costs.row) / step
            # A drafter has more to catch up with after a longer rest, so that this part of the time stays the same.
            fits = MOST_LOST * (self._rested + PROBES) / lost if lost else PROBED
            self._probed = max(1, min(PROBED, 2 * self._probed, round(self._probed * fits)))
            self._rest = self._rested = min(LONGEST_REST, max(FIRST_REST, int(lost / MOST_LOST)))
            self._probes = 0
        return found

    def _worth(self, requests: Sequence[Request], least: float, budget: int) -> tuple[dict[Request, int], float]:
        """Return the numbers of tokens accepted with a probability of `least` or more, and how many will be."""
        found, expected = dict[Request, int](), 0.0
        for request in requests:
            wanted = min(self._acceptance.worthwhile(request, least), self._num_tokens, budget)
            if wanted:
                found[request] = wanted
                budget -= wanted
                expected += sum(self._acceptance.share(request) ** (k + 1) for k in range(wanted))
        return found, expected

    def drafts(self, asked: Sequence[Asked], room: Room) -> dict[Request, Guided]:
        """Return the draft tokens of the requests that have any, and blocks for them.

        They are the tokens that the caller has to check, else those that its guide forces, else a drafter's.
        """
        found: dict[Request, Guided] = {}
        left = [(one, most) for one, most in asked if one.num_generated and not one.driven]
        for request, most in left:
            self._source.pop(request, None)
            self._add(found, request, room, _certain(request, most))
        for drafter in self.drafters:
            left = [(request, most) for request, most in left if request not in found]
            if not left:
                break
            for (request, _), tokens in zip(left, self._proposed(drafter, left, room), strict=True):
                if not tokens:
                    continue
                if self._add(found, request, room, tokens):
                    self._source[request] = drafter
                elif request.guide is not None:  # it forbids the first of them
                    drafter.judge(request, len(tokens), 0)
        return found

    def _proposed(self, drafter: Drafter, asked: Sequence[Asked], room: Room) -> list[Draft]:
        """Return a drafter's tokens for each request; none if it fails, or has failed MAX_FAILURES times."""
        if self._failures[drafter] < MAX_FAILURES:
            try:
                return drafter.propose(asked, room)
            except Exception:
                self._failures[drafter] += 1
                rest = "is not asked any more" if self._failures[drafter] == MAX_FAILURES else "is asked again"
                log.exception("%d requests continue without draft tokens; %s %s", len(asked), drafter, rest)
        return [NOTHING] * len(asked)

    def _add(self, found: dict[Request, Guided], request: Request, room: Room, tokens: Draft) -> bool:
        """Add draft tokens as far as the request's guide allows, and blocks for them. Return False if none is left."""
        try:
            guided = _guided(request, tokens)
            if not guided.tokens or not room(request, len(guided.tokens)):
                return False
        except Exception:
            log.exception("request %s continues without draft tokens", request.id)
            return False
        found[request] = guided
        return True

    def judge(self, item: PlanItem, num_right: int) -> None:
        """Record the number of a step's draft tokens that were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += len(item.drafts)
        self.num_right += num_right
        source, schedule = self._source.get(item.request), item.request.schedule
        name = "certain" if source is None else source.name
        self.drafted[name] += len(item.drafts)
        self.accepted[name] += num_right
        schedule.num_drafted += len(item.drafts)
        schedule.num_accepted += num_right
        if source is not None:
            self._acceptance.judge(item.request, len(item.drafts), num_right)
            source.judge(item.request, len(item.drafts), num_right)


class Guided(NamedTuple):
    """Draft tokens and, if the request has a guide, the tokens that it allows after each of them."""

    tokens: Draft
    masks: Sequence[NDArray[np.int32]]


def _certain(request: Request, most: int) -> Draft:
    """Return the tokens that the caller has to check, or that the request's guide forces."""
    if request.to_check:
        return request.to_check[:most]
    try:
        return NOTHING if request.guide is None else request.guide.forced()[:most]
    except Exception:
        log.exception("request %s has no forced tokens", request.id)
        return NOTHING


def _guided(request: Request, tokens: Draft) -> Guided:
    """Return the draft tokens that the request's guide allows."""
    if request.guide is None:
        return Guided(tokens, ())
    masks = masks_after(request.guide, tokens, request.ending_tokens)
    return Guided(tokens[: len(masks)], masks)


def masks_after(guide: Guide, drafts: Draft, ending_tokens: frozenset[int]) -> list[NDArray[np.int32]]:
    """Return the tokens that a guide allows after each draft token, up to one that it forbids or that ends the text.

    The guide is unchanged.
    """
    masks: list[NDArray[np.int32]] = []
    there = guide.for_drafts() if drafts else None
    if there is None:
        return masks
    for token in drafts:
        allowed = there.allowed()
        if token in ending_tokens or token // 32 >= len(allowed) or not allowed[token // 32] >> (token % 32) & 1:
            break
        there.accept(token)
        if there.done:
            break
        masks.append(there.allowed())
    return masks


class Acceptance:
    """The share of each request's draft tokens that is accepted, and the number that is worth its cost."""

    def __init__(self, newest_of_all: float = NEWEST) -> None:
        """newest_of_all: weight of the last draft of any request in the share that new requests begin with."""
        self._usual, self._newest_of_all = FIRST_SHARE, newest_of_all
        self._shares: weakref.WeakKeyDictionary[Request, float] = weakref.WeakKeyDictionary()
        self._idle: weakref.WeakKeyDictionary[Request, int] = weakref.WeakKeyDictionary()  # steps without a draft

    def share(self, request: Request) -> float:
        """Return the probability that a draft token of the request is accepted if those before it are."""
        return self._shares.get(request, self._usual)

    def judge(self, request: Request, num_drafts: int, num_right: int) -> None:
        """Record the numbers of a request's last draft tokens, and of those that were accepted."""
        if num_drafts:
            share = num_right / min(num_drafts, num_right + 1)
            self._shares[request] = (1 - NEWEST) * self.share(request) + NEWEST * share
            self._usual += self._newest_of_all * (share - self._usual)

    def worthwhile(self, request: Request, least: float) -> int:
        """Return the number of draft tokens that are accepted with a probability of `least` or more."""
        share, count, chance = self.share(request), 0, 1.0
        while (chance := chance * share) >= least and count < MAX_SPECULATIVE_TOKENS:
            count += 1
        return count

    def cheap(self, request: Request) -> int:
        """Return the same for LEAST; instead of zero, one now and then, since the share may have changed."""
        if count := self.worthwhile(request, LEAST):
            return count
        self._idle[request] = idle = self._idle.get(request, 0) + 1
        return int(idle % PROBE == 0)


@dataclass
class _Luck:
    """The success of a request's draft tokens."""

    misses: int = 0  # consecutive drafts without an accepted token
    pause: int = 0  # steps to skip before the next draft


class PromptLookup:
    """A drafter that continues an earlier occurrence of the last tokens (prompt lookup decoding, Saxena 2023).

    It proposes less often for requests whose drafts were rejected.
    """

    name = "lookup"

    def __init__(self) -> None:
        self._luck: weakref.WeakKeyDictionary[Request, _Luck] = weakref.WeakKeyDictionary()

    def propose(self, asked: Sequence[Asked], _: Room) -> list[Draft]:
        """Return the draft tokens of each request."""
        return [self.draft(request, most) for request, most in asked]

    def draft(self, request: Request, most: int) -> Draft:
        """Return up to `most` tokens that followed an earlier occurrence of the request's last tokens."""
        luck = self._luck.get(request)
        if luck is not None and luck.pause > 0:
            luck.pause -= 1
            return NOTHING
        drafts = _after_the_same(request.tokens, most)
        if request.images is not None:  # a row of an image is no token to propose
            drafts = array("i", takewhile(lambda token: token >= 0, drafts))
        if not drafts:  # searching costs time
            self.judge(request, 0, 0)
        return drafts

    def judge(self, request: Request, _: int, num_right: int) -> None:
        """Record the number of a request's last draft tokens that were accepted."""
        luck = self._luck.setdefault(request, _Luck())
        luck.misses = 0 if num_right else luck.misses + 1
        luck.pause = min(LONGEST_PAUSE, 2**luck.misses) if luck.misses else 0


def _after_the_same(tokens: array[int], most: int) -> array[int]:
    """Return the tokens that follow the latest earlier occurrence of the last tokens."""
    size, data = tokens.itemsize, tokens.tobytes()
    for count in (count for count in MATCHED if count < len(tokens)):
        end, limit = data[-count * size :], len(data) - size
        while (at := data.rfind(end, 0, limit)) >= 0:
            if at % size == 0:
                after = tokens[at // size + count :][:most]
                return (after * -(-most // len(after)))[:most]  # repeat them if they reach the end
            limit = at + len(end) - 1  # the match began within a token
    return NOTHING
