"""Speculative decoding: compute draft tokens together with a request's own token, and keep those that it draws itself.

A step computes the draft tokens like a chunk of a prompt, and draws a token after each of them by the same rule as
without drafts. Those that equal the draft tokens are accepted. Since rows are batch-invariant and a draw depends on the
tokens before it alone, the accepted tokens are the ones that decoding one by one would give: a draft changes no token.
"""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from quire.cache.manager import BlockManager
from quire.config import MAX_SPECULATIVE_TOKENS
from quire.engine.plan import Plan, PlanItem
from quire.request import Guide, Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger("quire")

MATCHED = (4, 3, 2)  # numbers of last tokens to search for, the longest match first
MAX_ROWS = MAX_SPECULATIVE_TOKENS + 1  # of a step: up to here, reading the weights takes most of the time
LONGEST_PAUSE = 64  # steps
NUM_GUESSES = 3  # default: a step with them takes a quarter longer, which one accepted in four pays for
NUM_FROM_HEAD = 5  # default with a draft head, which stops earlier where a further token would not pay
NOTHING: array[int] = array("i")

Draft: TypeAlias = Sequence[int]
Asked: TypeAlias = tuple[Request, int]  # with the maximum number of its draft tokens, one or more
Room: TypeAlias = Callable[[Request, int], bool]  # gives a request blocks for that number of draft tokens


class Drafter(Protocol):
    """Proposes tokens that may follow requests' tokens. Any proposal is safe: wrong ones only cost time."""

    def propose(self, asked: Sequence[Asked], room: Room, /) -> list[Draft]:
        """Return the draft tokens of each request. A drafter that stores K and V must ask for room first."""

    def judge(self, request: Request, num_drafts: int, num_right: int, /) -> None:
        """Record the numbers of a request's last draft tokens, and of those that were accepted."""


class Speculation:
    """Adds draft tokens to steps in which few requests decode."""

    def __init__(self, drafters: Sequence[Drafter], num_tokens: int) -> None:
        """drafters: asked in this order, until one proposes something. num_tokens: most draft tokens at a time."""
        self.drafters = tuple(drafters)
        self._num_tokens = num_tokens
        self._source: weakref.WeakKeyDictionary[Request, Drafter] = weakref.WeakKeyDictionary()  # of the last draft
        self.num_drafts = self.num_draft_tokens = self.num_right = 0  # drafts, their tokens, accepted tokens

    def add_to(self, plan: Plan, manager: BlockManager, longest: Callable[[Request], int], budget: int) -> None:
        """Add draft tokens to a step in which all requests decode, within `budget` tokens and the free blocks.

        longest: tokens at which a request ends.
        """
        count = plan.num_decoding + len(plan.rest)
        most = min(self.most(count), budget // max(1, count))
        items = plan.items if most else []
        asked = [
            (item.request, wanted)
            for item in items
            if (wanted := min(most, longest(item.request) - len(item.request.tokens) - 1)) > 0
        ]
        if not asked:
            return

        def room(request: Request, count: int) -> bool:
            return manager.grow(request, len(request.tokens) + count, plan.copies)

        drafts = self.drafts(asked, room)
        for i, (request, start, num_new, *_) in enumerate(items):
            if request in drafts:
                items[i] = PlanItem(request, start, num_new, *drafts[request])
                plan.num_tokens += len(drafts[request].tokens)
        if drafts:
            plan.items = items

    def most(self, num_rows: int) -> int:
        """Return the maximum number of draft tokens for each of `num_rows` requests that decode together."""
        return min(self._num_tokens, (MAX_ROWS - num_rows) // num_rows) if 0 < num_rows < MAX_ROWS else 0

    def drafts(self, asked: Sequence[Asked], room: Room) -> dict[Request, Guided]:
        """Return the draft tokens of the requests that have any, and blocks for them.

        They are the tokens that the caller has to check, else those that its guide forces, else a drafter's.
        """
        found: dict[Request, Guided] = {}
        left = [(one, most) for one, most in asked if one.num_generated and not one.driven]
        for drafter in (None, *self.drafters):
            try:
                made = [_certain(*one) for one in left] if drafter is None else drafter.propose(left, room)
            except Exception:
                log.exception("%d requests continue without draft tokens", len(left))
                made = [NOTHING] * len(left)
            for (request, _), tokens in zip(left, made, strict=True):
                try:
                    guided = _guided(request, tokens)
                    if guided.tokens and room(request, len(guided.tokens)):
                        found[request] = guided
                        self._source.pop(request, None)
                        if drafter is not None:
                            self._source[request] = drafter
                except Exception:  # nothing was allocated
                    log.exception("request %s continues without draft tokens", request.id)
            left = [(request, most) for request, most in left if request not in found]
            if not left:
                break
        return found

    def judge(self, item: PlanItem, num_right: int) -> None:
        """Record the number of a step's draft tokens that were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += len(item.drafts)
        self.num_right += num_right
        if (source := self._source.get(item.request)) is not None:
            source.judge(item.request, len(item.drafts), num_right)


class Guided(NamedTuple):
    """Draft tokens and, if the request has a guide, the tokens that it allows after each of them."""

    tokens: Draft
    masks: Sequence[NDArray[np.int32]]


def _certain(request: Request, most: int) -> Draft:
    """Return the tokens that the caller has to check, or that the request's guide forces."""
    if request.to_check:
        return request.to_check[:most]
    return NOTHING if request.guide is None else request.guide.forced()[:most]


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
    there = guide.copy() if drafts else guide
    for token in drafts:
        allowed = there.allowed()
        if token in ending_tokens or token // 32 >= len(allowed) or not allowed[token // 32] >> (token % 32) & 1:
            break
        there.accept(token)
        if there.done:
            break
        masks.append(there.allowed())
    return masks


@dataclass
class _Luck:
    """The success of a request's draft tokens."""

    misses: int = 0  # consecutive drafts without an accepted token
    pause: int = 0  # steps to skip before the next draft


class PromptLookup:
    """A drafter that continues an earlier occurrence of the last tokens (prompt lookup decoding, Saxena 2023).

    It proposes less often for requests whose drafts were rejected.
    """

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
