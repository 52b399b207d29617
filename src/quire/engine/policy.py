"""Scheduling policies: the order in which requests are served.

An order gives each request a rank once, on arrival. The lowest rank is served first and loses its blocks last. Every
rank counts from the request's ordinal, so only a bounded number of later arrivals can overtake a request: none starves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from quire.request import Request

Order: TypeAlias = Callable[[Request], float]

ARRIVALS_PER_PRIORITY = 65_536  # later arrivals that one step of priority overtakes
TOKENS_PER_ARRIVAL = 8  # of a prompt; each eight let one more later arrival overtake it


def first_come_first_served(request: Request) -> float:
    """Rank by arrival."""
    return by_priority(request)  # which is 0, or that of the background


def by_priority(request: Request) -> float:
    """Rank by priority, the lower value first, then by arrival."""
    return request.schedule.ordinal + ARRIVALS_PER_PRIORITY * request.priority


def shortest_prompt_first(request: Request) -> float:
    """Rank by the prompt's length, the shorter one first, then by arrival."""
    return by_priority(request) + request.num_prompt // TOKENS_PER_ARRIVAL


BLIND_TO_PRIORITY = (first_come_first_served, shortest_prompt_first)

# The names are vLLM's.
ORDERS: Mapping[str, Order] = MappingProxyType(
    {"fcfs": first_come_first_served, "priority": by_priority, "shortest": shortest_prompt_first}
)
