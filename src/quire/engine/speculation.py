"""Prompt lookup: guesses at the next tokens, from what stood after the same tokens before (Saxena 2023).

A step computes the guesses with the request's own token, as a piece of a prompt is computed, and draws a token after
each of them. Those that agree with the guesses are kept. Since a row has the same bits whatever stands beside it, and a
draw depends on its position alone, these are the tokens that would have come one by one.
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

MATCHED = (4, 3, 2)  # last tokens that must have stood together before, as many as possible
MAX_ROWS = MAX_SPECULATIVE_TOKENS + 1  # of a step: up to here reading the weights takes most of the time
LONGEST_PAUSE = 64  # steps
NUM_GUESSES = 3  # unless asked otherwise: a step with them takes a quarter longer, which one right in four pays for
NOTHING: array[int] = array("i")


@dataclass
class _Luck:
    """How a request's guesses went."""

    misses: int = 0  # guesses in a row of which none was right
    pause: int = 0  # steps to let pass before the next one


class PromptLookup:
    """Guesses for requests that decode, fewer where they were wrong before."""

    def __init__(self, num_tokens: int) -> None:
        """num_tokens: guessed at a time, at most."""
        self._num_tokens = num_tokens
        self.num_drafts = self.num_guessed = self.num_right = 0  # steps of a request with guesses, and their tokens
        self._luck: weakref.WeakKeyDictionary[Request, _Luck] = weakref.WeakKeyDictionary()

    def add_to(self, plan: Plan, manager: BlockManager, longest: Callable[[Request], int], budget: int) -> None:
        """Add guesses to a step in which all requests decode: for that many tokens, and where blocks are left.

        longest: tokens at which a request ends.
        """
        most = min(self.most(len(plan.items)), budget // max(1, len(plan.items)))
        for i, (request, start, num_new, _) in enumerate(plan.items):
            known = len(request.tokens)
            try:
                guesses = self.guess(request, min(most, longest(request) - known - 1))
                has_room = len(guesses) > 0 and manager.grow(request, known + len(guesses), plan.copies)
            except Exception:  # nothing was taken
                log.exception("request %s goes on without guesses", request.id)
                continue
            if has_room:
                plan.items[i] = PlanItem(request, start, num_new, guesses)
                plan.num_tokens += len(guesses)

    def most(self, num_rows: int) -> int:
        """Guesses for each of so many requests that decode together."""
        return min(self._num_tokens, (MAX_ROWS - num_rows) // num_rows) if 0 < num_rows < MAX_ROWS else 0

    def guess(self, request: Request, most: int) -> array[int]:
        """Up to that many tokens that may follow the request's."""
        if most <= 0 or not _can_be_guessed(request):
            return NOTHING
        if request.to_check:
            return request.to_check[:most]
        luck = self._luck.get(request)
        if luck is not None and luck.pause > 0:
            luck.pause -= 1
            return NOTHING
        guesses = _after_the_same(request.tokens, most)
        if not guesses:  # looking for them is not free
            self.judge(request, 0)
        return guesses

    def count(self, num_guessed: int, num_right: int) -> None:
        """A request's guesses were computed."""
        self.num_drafts += 1
        self.num_guessed += num_guessed
        self.num_right += num_right

    def judge(self, request: Request, num_right: int) -> None:
        """So many of the request's last guesses were right."""
        luck = self._luck.setdefault(request, _Luck())
        luck.misses = 0 if num_right else luck.misses + 1
        luck.pause = min(LONGEST_PAUSE, 2**luck.misses) if luck.misses else 0


def _can_be_guessed(request: Request) -> bool:
    """Whether its draws depend on nothing that earlier draws change but the tokens themselves."""
    return request.num_generated > 0 and not request.driven and not request.looks_back


def _after_the_same(tokens: array[int], most: int) -> array[int]:
    """What followed where the last tokens stood before, at the latest place."""
    size, data = tokens.itemsize, tokens.tobytes()
    for count in (count for count in MATCHED if count < len(tokens)):
        end, limit = data[-count * size :], len(data) - size
        while (at := data.rfind(end, 0, limit)) >= 0:
            if at % size == 0:
                after = tokens[at // size + count :][:most]
                return (after * -(-most // len(after)))[:most]  # what runs into the end goes round
            limit = at + len(end) - 1  # it began within a token
    return NOTHING
