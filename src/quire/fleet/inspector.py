"""The fleet's inspector: a page with a gateway's replicas, requests and placements, and the stream that updates it.

A watcher gets a snapshot every INTERVAL seconds if it differs from the previous one. All watchers share a snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from itertools import islice
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from quire.fleet.dispatch import Dispatcher
from quire.fleet.link import Link
from quire.fleet.placement import PARTS, Placement, reason_of
from quire.fleet.score import Ranked
from quire.fleet.search import FleetSearch
from quire.fleet.view import ReplicaView, Status
from quire.fleet.work import Work
from quire.server.http.api_error import ApiError
from quire.server.http.sse import STILL_HERE, EventStream, dumps
from quire.server.observability.page import HEARTBEAT, MAX_WATCHERS, page_at

INTERVAL = 0.25  # s between snapshots
MAX_SHOWN = 40  # requests, and placements, in a snapshot
MAX_CANDIDATES = 8  # the cheapest candidates of a placement that are shown


class FleetWatch:
    """Shows a fleet. Only the event loop may use it."""

    def __init__(self, fleet: Dispatcher, about: Mapping[str, str]) -> None:
        """about: information about the gateway on the page, such as the model's name."""
        self._fleet = fleet
        self._about = dict(about)
        self._epoch = time.time() - time.monotonic()
        self._leaving: set[asyncio.Event] = set()  # one for each watcher, set when its stream ends
        self._closed = False
        self._part = b""  # the latest snapshot
        self._part_until = 0.0  # s of time.monotonic(), when the next snapshot is made

    def router(self) -> APIRouter:
        """Return the routes GET /inspector, the page, and /inspector/events, its data."""
        routes = APIRouter(include_in_schema=False)
        page = page_at(Path(__file__).parent / "inspector.html")

        @routes.get("/inspector", response_model=None)
        async def inspector_page() -> Response:
            return page

        @routes.get("/inspector/events", response_model=None)
        async def inspector_events() -> Response:
            if len(self._leaving) >= MAX_WATCHERS:
                message = f"{MAX_WATCHERS} watch the fleet already"
                raise ApiError(message, HTTPStatus.SERVICE_UNAVAILABLE, code="watched")
            leaving = asyncio.Event()
            self._leaving.add(leaving)
            if self._closed:
                leaving.set()
            return EventStream(self._parts(leaving), partial(self._leave, leaving))

        return routes

    def close(self) -> None:
        """End the streams of all current and future watchers."""
        self._closed = True
        for leaving in self._leaving:
            leaving.set()

    # --------------------------------------------------------------------------------------------------- snapshots

    def replicas(self) -> list[ReplicaView]:
        """Return the replicas in the order in which they were added."""
        samples = Counter(one.link.url for work in self._fleet.jobs.works for one in work.assigned.values())
        return [self._replica(link, samples[link.url]) for link in self._fleet.roster.links.values()]

    def _replica(self, link: Link, num_samples: int) -> ReplicaView:
        if not link.is_up or link.state is None:
            status = Status.LOST
        elif not self._fleet.roster.is_fitting(link):
            status = Status.LEFT_OUT
        else:
            status = Status.DRAINING if link.state.draining else Status.UP
        fingerprint = link.fingerprint
        return ReplicaView(
            url=link.url,
            status=status,
            failure=link.failure if status is Status.LOST else None,
            fingerprint=None if fingerprint is None else fingerprint.digest,
            different=() if fingerprint is None else tuple(self._fleet.roster.model.difference(fingerprint)),
            state=link.state,
            held_blocks=self._fleet.roster.index.num_held(link.slot),
            num_samples=num_samples,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return all data of the page, ready for JSON. Times are seconds since 1970."""
        works, searches = self._fleet.jobs.works, self._fleet.jobs.searches
        requests = [*map(self._work, works[-MAX_SHOWN:]), *map(self._search, searches[-MAX_SHOWN:])]
        return {
            "about": self._about,
            "fingerprint": self._fleet.roster.model.digest,
            "parts": dict(PARTS),
            "replicas": [asdict(one) for one in self.replicas()],
            "num_requests": len(works) + len(searches),
            "requests": requests,
            "placements": [_placement(one) for one in islice(reversed(self._fleet.placements), MAX_SHOWN)],
        }

    def _work(self, work: Work) -> dict[str, Any]:
        samples = []
        for one in work.output.outputs:
            assignment = work.assigned.get(one.index)
            replica = None if assignment is None else assignment.link.url
            samples.append({"replica": replica, "tokens": len(one.token_ids), "end": one.finish_reason})
        return {
            "name": work.output.request_id,
            "arrived": self._epoch + work.began,
            "prompt": len(work.output.prompt_token_ids),
            "samples": samples,
        }

    def _search(self, search: FleetSearch) -> dict[str, Any]:
        return {
            "name": search.call.name,
            "arrived": self._epoch + search.began,
            "prompt": len(search.call.prompt),
            "samples": [{"replica": search.replica, "tokens": 0, "end": None}],
        }

    # ------------------------------------------------------------------------------------------------ as a stream

    async def _parts(self, leaving: asyncio.Event) -> AsyncIterator[bytes]:
        sent, last = b"", time.monotonic()
        try:
            while not leaving.is_set():
                part, now = self._latest(), time.monotonic()
                if part != sent:
                    yield b'data: {"time":%f,' % time.time() + part[1:] + b"\n\n"
                    sent, last = part, now
                elif now - last >= HEARTBEAT:
                    yield STILL_HERE
                    last = now
                try:
                    await asyncio.wait_for(leaving.wait(), INTERVAL)
                except asyncio.TimeoutError:
                    continue
        finally:
            self._leave(leaving)

    def _leave(self, leaving: asyncio.Event) -> None:
        leaving.set()
        self._leaving.discard(leaving)

    def _latest(self) -> bytes:
        now = time.monotonic()
        if now >= self._part_until:
            self._part, self._part_until = dumps(self.snapshot()), now + INTERVAL / 2
        return self._part


def _placement(one: Placement) -> dict[str, Any]:
    choice = one.choice
    return {
        "time": one.time,
        "request": one.request,
        "samples": one.samples,
        "delivered": one.num_delivered,
        "reason": one.cause.reason,
        "from": one.cause.replica,
        "replica": one.replica,
        "why": reason_of(choice),
        "seconds": one.seconds,
        "num_candidates": len(choice.ranking),
        "num_tied": choice.num_tied,
        "candidates": [_ranked(each) for each in choice.ranking[:MAX_CANDIDATES]],
    }


def _ranked(one: Ranked) -> dict[str, Any]:
    return {
        "replica": one.candidate.name,
        "cached": one.candidate.num_blocks * one.candidate.state.block_size,
        "uncached": one.uncached_tokens,
        "total": one.parts.total,
        "parts": one.parts._asdict(),
    }
