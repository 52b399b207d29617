"""What the scheduler decides, as arithmetic on requests and counts. Nothing here knows a block manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from operator import le

from quire.engine.plan import PlanItem
from quire.engine.queue import RankedList
from quire.request import Request


class Hold(str, Enum):
    """Why the first of the waiting requests does not run."""

    SEATS = "seats"  # max_num_seqs requests run
    BLOCKS = "blocks"  # there are not enough free blocks
    SWAPPED = "swapped"  # requests whose blocks are on the host come back first, when there are blocks
    BUDGET = "budget"  # the step's tokens are taken, or what it needs is just being computed by another request


def num_new_tokens(num_missing: int, budget: int, num_singles: int) -> int:
    """Tokens that a running request computes in this step; 0 or less: the budget has none for it.

    budget: tokens that the step has left. num_singles: running requests that need a single token and have not got it
    yet; they get it before a long prompt takes the rest.
    """
    return 1 if num_missing == 1 else min(num_missing, budget - num_singles)


def share_budget(going: Sequence[tuple[Request, int, int]], budget: int) -> list[PlanItem]:
    """What each of these running requests computes in a step. going: with the first token and the number of tokens."""
    singles = sum([missing == 1 for _, _, missing in going])
    items = []
    for request, start, missing in going:
        if budget <= 0:
            break
        num_new = num_new_tokens(missing, budget, singles)
        singles -= missing == 1
        if num_new > 0:
            items.append(PlanItem(request, start, num_new))
            budget -= num_new
    return items


def needs_token(request: Request) -> bool:
    """Whether what comes after the token that the request is drawing depends on that token, beyond being computed.

    Its next draw may; and where siblings wait to be forked, they come then.
    """
    waits_to_fork = request.group is not None and request.num_generated == 0
    return request.looks_back or waits_to_fork


def who_gives_way(request: Request, running: RankedList) -> list[Request]:
    """Whom to preempt so that the running request can grow: the last one with its siblings.

    Siblings give way together, but not to one another: then it is the last of them alone.
    """
    last = running[-1]
    if last is request or (request.group is not None and last.group is request.group):
        return [last]
    return running.last_unit()


def free_seats(running: Iterable[Request], max_num_seqs: int) -> int:
    """Seats that no request has or may yet claim: a beam search may claim one for each of its beams."""
    taken = 0
    searches = {}
    for request in running:
        if request.driven and request.group is not None:
            searches[request.group] = len(request.group.members)
        elif not request.driven:
            taken += 1
    return max_num_seqs - taken - sum(searches.values())


def seats_wanted(request: Request, running: RankedList) -> int:
    """Seats that a waiting request takes of those that are free: all of a beam search's at once."""
    if not request.driven or request.group is None:
        return 1
    return 0 if any(running.siblings_of(request)) else len(request.group.members)


def may_pass(request: Request, swapped: Sequence[Request]) -> bool:
    """Whether a waiting request may be admitted although others are swapped out.

    Only one that ranks before them and was admitted before: its turn has come back.
    """
    return not swapped or not (request.is_new or request.schedule.rank > swapped[0].schedule.rank)


def fits(needed: Sequence[int], free: Sequence[int]) -> bool:
    """Whether the blocks that are needed are free, in every cache group."""
    return all(map(le, needed, free))
