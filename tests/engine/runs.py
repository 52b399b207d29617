"""Engines of real models that run to their end, in memory of which all that must not be read is NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from quire.engine.engine import Engine
from quire.engine.graphs import GraphRunner
from quire.engine.runner import Runner
from quire.request import Event, Request


def drain(
    engine: Engine, requests: Iterable[Request] = (), before: Callable[[Engine], object] = lambda engine: None
) -> dict[str, list[Event]]:
    """Add the requests and step until nothing is left, with audits. Return the events of each.

    before: what happens before each step.
    """
    manager = engine.scheduler.manager
    found: dict[str, list[Event]] = {}
    for request in requests:
        engine.add(request)
        found[request.id] = []
    while engine.has_work:
        before(engine)
        for event in engine.step():
            found.setdefault(event.request_id, []).append(event)
        if manager.disk is None:  # whose threads write meanwhile
            engine.scheduler.audit()
    engine.scheduler.audit()
    assert all(pool.num_used == 0 for pool in manager.pools)
    return found


def whole(
    engine: Engine, requests: Iterable[Request] = (), before: Callable[[Engine], object] = lambda engine: None
) -> dict[str, list[Event]]:
    """Return the events of each, as `drain` does. None of them may be an error."""
    found = drain(engine, requests, before)
    errors = {event.error for events in found.values() for event in events}
    assert errors <= {None}, errors
    return found


@torch.inference_mode()
def poison(served: Engine) -> None:
    """Fill the slots that no request owns or may reuse, and a graph's inputs, which its next replay must write."""
    eager = served.runner
    if isinstance(eager, GraphRunner):
        for bucket in eager._buckets.values():
            bucket.inputs.fill_(-(2**40))
        eager = eager.runner
    assert isinstance(eager, Runner)
    manager = served.scheduler.manager
    of_groups = zip(manager.groups, manager.pools, manager.indexes, eager.cache._memory, strict=True)
    for group, pool, index, memory in of_groups:
        free = torch.tensor(pool.ref_counts) == 0
        free[list(index.by_block)] = False
        for layer in group.layers:
            memory[layer][free] = torch.nan
