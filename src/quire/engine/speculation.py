"""Prompt lookup: draft tokens taken from the text after an earlier occurrence of the last tokens (Saxena 2023).

A step computes the draft tokens together with the request's own token, like a chunk of a prompt, and draws a token
after each of them. Those that equal the draft tokens are accepted. Since rows are batch-invariant and a draw depends on
its position alone, the accepted tokens are the ones that decoding one by one would give.
"""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from quire.cache.manager import BlockManager
from quire.config import MAX_SPECULATIVE_TOKENS
from quire.engine.plan import Plan, PlanItem
from quire.request import Request

log = logging.getLogger("quire")

MATCHED = (4, 3, 2)  # numbers of last tokens to search for, the longest match first
MAX_ROWS = MAX_SPECULATIVE_TOKENS + 1  # of a step: up to here, reading the weights takes most of the time
LONGEST_PAUSE = 64  # steps
NUM_GUESSES = 3  # default: a step with them takes a quarter longer, which one accepted in four pays for
NOTHING: array[int] = array("i")


@dataclass
class _Luck:
    """The success of a request's draft tokens."""

    misses: int = 0  # consecutive drafts without an accepted token
    pause: int = 0  # steps to skip before the next draft


class PromptLookup:
    """Proposes draft tokens for decoding requests, less often for requests whose drafts were rejected."""

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: maximum number of draft tokens at a time."""
        self._num_tokens = num_tokens
        self.num_drafts = self.num_draft_tokens = self.num_right = 0  # drafts, their tokens, accepted tokens
        self._luck: weakref.WeakKeyDictionary[Request, _Luck] = weakref.WeakKeyDictionary()

    def add_to(self, plan: Plan, manager: BlockManager, longest: Callable[[Request], int], budget: int) -> None:
        """Add draft tokens to a step in which all requests decode, within `budget` tokens and the free blocks.

        longest: tokens at which a request ends.
        """
        count = plan.num_decoding + len(plan.rest)
        most = min(self.most(count), budget // max(1, count))
        items = plan.items if most else []
        has_drafts = False
        for i, (request, start, num_new, _) in enumerate(items):
            known = len(request.tokens)
            try:
                drafts = self.draft(request, min(most, longest(request) - known - 1))
                has_room = len(drafts) > 0 and manager.grow(request, known + len(drafts), plan.copies)
            except Exception:  # nothing was allocated
                log.exception("request %s continues without draft tokens", request.id)
                continue
            if has_room:
                items[i], has_drafts = PlanItem(request, start, num_new, drafts), True
                plan.num_tokens += len(drafts)
        if has_drafts:
            plan.items = items

    def most(self, num_rows: int) -> int:
        """Return the maximum number of draft tokens for each of `num_rows` requests that decode together."""
        return min(self._num_tokens, (MAX_ROWS - num_rows) // num_rows) if 0 < num_rows < MAX_ROWS else 0

    def draft(self, request: Request, most: int) -> array[int]:
        """Return up to `most` draft tokens that may follow the request's tokens."""
        if most <= 0 or not _can_be_drafted(request):
            return NOTHING
        if request.to_check:
            return request.to_check[:most]
        luck = self._luck.get(request)
        if luck is not None and luck.pause > 0:
            luck.pause -= 1
            return NOTHING
        drafts = _after_the_same(request.tokens, most)
        if not drafts:  # searching costs time
            self.judge(request, 0)
        return drafts

    def count(self, num_draft_tokens: int, num_right: int) -> None:
        """Count a request's draft tokens that were computed and accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_right += num_right

    def judge(self, request: Request, num_right: int) -> None:
        """Record the number of the request's last draft tokens that were accepted."""
        luck = self._luck.setdefault(request, _Luck())
        luck.misses = 0 if num_right else luck.misses + 1
        luck.pause = min(LONGEST_PAUSE, 2**luck.misses) if luck.misses else 0


def _can_be_drafted(request: Request) -> bool:
    """Return whether its draws depend on earlier draws through their tokens only."""
    return request.num_generated > 0 and not request.driven and not request.looks_back


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
