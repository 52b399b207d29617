"""Who comes first: the order of service.

An order gives each request a rank, once, when it arrives; the lowest rank is served first and loses its
blocks last. Every rank counts from the request's ordinal, so whatever handicap it has, only the requests of that many
arrivals can overtake it: nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from quire.request import Request

Order: TypeAlias = Callable[[Request], float]

ARRIVALS_PER_PRIORITY = 65_536  # arrivals that one step of priority overtakes
TOKENS_PER_ARRIVAL = 8  # of a prompt, each eight let one more later arrival pass


def first_come_first_served(request: Request) -> float:
    """By arrival."""
    return request.schedule.ordinal


def by_priority(request: Request) -> float:
    """The lower priority value first, then by arrival."""
    return request.schedule.ordinal + ARRIVALS_PER_PRIORITY * request.priority


def shortest_prompt_first(request: Request) -> float:
    """The shorter prompt first, then by arrival."""
    return request.schedule.ordinal + request.num_prompt // TOKENS_PER_ARRIVAL


BLIND_TO_PRIORITY = (first_come_first_served, shortest_prompt_first)

# Names as vLLM has them.
ORDERS: Mapping[str, Order] = MappingProxyType(
    {"fcfs": first_come_first_served, "priority": by_priority, "shortest": shortest_prompt_first}
)
