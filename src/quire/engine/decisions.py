"""The scheduler's decisions as arithmetic on requests and counts, independent of the block manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from operator import le

from quire.engine.plan import PlanItem
from quire.engine.queue import RankedList
from quire.request import Request


class Hold(str, Enum):
    """The reason why the first waiting request does not run."""

    SLOTS = "slots"  # max_num_seqs requests are running
    BLOCKS = "blocks"  # there are not enough free blocks
    SWAPPED = "swapped"  # requests swapped out to the host resume first, once blocks are free
    BUDGET = "budget"  # the step's tokens are used up, or another request is computing blocks that this one could reuse


def num_new_tokens(request: Request, start: int, num_missing: int, budget: int, num_singles: int) -> int:
    """Return the tokens that a running request computes in this step; 0 or less if the budget has none for it.

    start: the first of its `num_missing` tokens. budget: tokens left in the step. num_singles: running requests that
    need a single token and have not been planned yet; they are served before a long prompt takes the rest.
    """
    if num_missing == 1:
        return 1
    most = min(num_missing, budget - num_singles)
    return most if request.images is None or most <= 0 else request.images.uncut(start + most) - start


def share_budget(going: Sequence[tuple[Request, int, int]], budget: int) -> list[PlanItem]:
    """Return the items of these running requests in a step. going: each with its first token and number of tokens."""
    singles = sum([missing == 1 for _, _, missing in going])
    items = []
    for request, start, missing in going:
        if budget <= 0:
            break
        num_new = num_new_tokens(request, start, missing, budget, singles)
        singles -= missing == 1
        if num_new > 0:
            items.append(PlanItem(request, start, num_new))
            budget -= num_new
    return items


def needs_token(request: Request) -> bool:
    """Return whether the host must know the token that the request is drawing before it can plan the next step.

    Its next draw may depend on it, and its siblings are forked only after it.
    """
    waits_to_fork = request.group is not None and request.num_generated == 0
    return request.looks_back or waits_to_fork


def who_gives_way(request: Request, running: RankedList) -> list[Request]:
    """Return the requests to preempt so that the running request can grow: the last one with its siblings.

    Siblings are preempted together, but not for one another: then only the last of them is.
    """
    last = running[-1]
    if last is request or (request.group is not None and last.group is request.group):
        return [last]
    return running.last_unit()


def free_slots(running: Iterable[Request], max_num_seqs: int) -> int:
    """Return the slots that are unused and unreserved. A beam search reserves one for each of its beams."""
    taken = 0
    searches = {}
    for request in running:
        if request.driven and request.group is not None:
            searches[request.group] = len(request.group.members)
        elif not request.driven:
            taken += 1
    return max_num_seqs - taken - sum(searches.values())


def slots_wanted(request: Request, running: RankedList) -> int:
    """Return the free slots that a waiting request needs: for a beam search, those of all beams at once."""
    if not request.driven or request.group is None:
        return 1
    return 0 if any(running.siblings_of(request)) else len(request.group.members)


def may_pass(request: Request, swapped: Sequence[Request]) -> bool:
    """Return whether a waiting request may be admitted although others are swapped out.

    That is so only if it was admitted before and ranks before them.
    """
    return not swapped or not (request.is_new or request.schedule.sort_key > swapped[0].schedule.sort_key)


def fits(needed: Sequence[int], free: Sequence[int]) -> bool:
    """Return whether the needed blocks are free, in every cache group."""
    return all(map(le, needed, free))
