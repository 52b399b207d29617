"""Shared: the parts of a dispatcher that its classes use together."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.fleet.calls import Calls
from quire.fleet.choosing import Chooser
from quire.fleet.config import GatewayConfig
from quire.fleet.metrics import FleetMetrics
from quire.fleet.open_jobs import OpenJobs
from quire.fleet.placement import Placement
from quire.fleet.roster import Roster, end_tasks

if TYPE_CHECKING:  # its packages are an extra
    from opentelemetry.context import Context

    from quire.server.observability.traces import Traces

log = logging.getLogger("quire.fleet")

MAX_PLACEMENTS = 256  # kept for the inspector


class Tasks:
    """The tasks of a gateway. An error of one is logged."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    async def end(self) -> None:
        """Cancel all tasks, and wait for them."""
        await end_tasks(self._running)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the gateway failed", exc_info=task.exception())


@dataclass(frozen=True)
class Shared:
    """The parts."""

    config: GatewayConfig
    metrics: FleetMetrics
    traces: Traces | None
    roster: Roster
    calls: Calls
    jobs: OpenJobs
    chooser: Chooser
    tasks: Tasks
    placements: deque[Placement] = field(default_factory=lambda: deque(maxlen=MAX_PLACEMENTS))  # the latest ones

    def context(self) -> Context | None:
        """Return the context of the current trace; None without tracing."""
        return None if self.traces is None else self.traces.current()
