"""Roster: the replicas of a fleet that a gateway is connected to, and which blocks each of them holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import aiohttp

from quire.bits.fingerprint import Fingerprint
from quire.fleet.index import MAX_SLOTS, FleetIndex
from quire.fleet.link import Link, Listener
from quire.fleet.membership import Membership

log = logging.getLogger("quire.fleet")

# Of a fingerprint: what makes a model another one. Replicas that differ in other parts compute other bits of the same.
MODEL_PARTS = ("weights", "config", "tokenizer", "template", "adapters")
MAX_POSTS = 512  # at a time, to each replica
END_AGAIN = 1.0  # s until a task that has not ended is cancelled again


class Roster:
    """Follows the membership. The event loop's."""

    def __init__(self, membership: Membership, model: Fingerprint, secret: str) -> None:
        """model: of the replica whose tokenizer the gateway has."""
        self.links: dict[str, Link] = {}  # by URL
        self.index = FleetIndex()
        self.disk = FleetIndex()  # of blocks on the replicas' disks
        self.model = model
        self._membership = membership
        self._secret = secret
        self._http: aiohttp.ClientSession | None = None
        self._runs: dict[str, asyncio.Task[None]] = {}  # of the links
        self._fitting: set[str] = set()  # URLs of replicas that have the gateway's tokenizer and template
        self._free_slots = list(range(MAX_SLOTS))
        self._news = asyncio.Event()  # something about a replica has changed

    async def follow(self, listener: Listener) -> None:
        """Be connected to all members, and to no others. listener: of all links."""
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=MAX_POSTS, keepalive_timeout=20.0)
        self._http = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        async for members in self._membership.changes():
            wanted = {member.url for member in members}
            for url in [url for url in self.links if url not in wanted]:
                link = self.links.pop(url)
                self._fitting.discard(url)
                self._runs.pop(url).cancel()
                self._free_slots.insert(0, link.slot)
            for url in sorted(wanted - self.links.keys()):
                if not self._free_slots:
                    log.error("replica %s is left out: a gateway has room for %d", url, MAX_SLOTS)
                    continue
                link = Link(self._free_slots.pop(0), url, self._secret, self._http, listener)
                self.links[url] = link
                self._runs[url] = asyncio.create_task(link.run())

    async def stop(self) -> None:
        """Leave all replicas. What follows the members has ended before."""
        await end_tasks(self._runs.values())
        if self._http is not None:
            await self._http.close()

    def at(self, slot: int) -> Link | None:
        """The replica with that number in the index; None where it has left the fleet."""
        return next((link for link in self.links.values() if link.slot == slot), None)

    def is_fitting(self, link: Link) -> bool:
        """Whether a replica that has answered has the gateway's tokenizer and template."""
        return link.url in self._fitting

    async def change(self, seconds: float) -> bool:
        """Wait until something about a replica changes. False: nothing did for that long."""
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), max(0.0, seconds))
        except asyncio.TimeoutError:
            return False
        return True

    # --------------------------------------------------------------------------------------- what a Listener hears

    def connected(self, link: Link) -> bool:
        """A replica has said what it is. False: it serves another model, and is left out."""
        self._fitting.discard(link.url)
        different = [] if link.fingerprint is None else self.model.difference(link.fingerprint)
        if set(different) & set(MODEL_PARTS):
            parts = ", ".join(different)
            log.error("replica %s is left out: it serves another model than this gateway's (%s)", link.url, parts)
            return False
        self._fitting.add(link.url)
        if different:
            log.warning("replica %s computes other bits: %s differ", link.url, ", ".join(different))
        log.info("replica %s is connected", link.url)
        return True

    def blocks(self, link: Link, snapshot: list[int] | None, events: list[list[Any]]) -> None:
        """The blocks that a replica holds, or what happened to them."""
        if snapshot is not None:
            self.index.replace(link.slot, snapshot)
            self.disk.clear(link.slot)
        for kind, *digests in events:
            if kind == "+":
                self.index.store(link.slot, digests)
            elif kind == "-":
                self.index.remove(link.slot, digests)
            elif kind == "d+":
                self.disk.store(link.slot, digests)
            elif kind == "d-":
                self.disk.remove(link.slot, digests)
            else:
                self.index.clear(link.slot)

    def changed(self) -> None:
        """Let who waits for a change look again."""
        self._news.set()

    def lost(self, link: Link) -> None:
        """A replica is gone, and its cache with it."""
        self.index.clear(link.slot)
        self.disk.clear(link.slot)
        self._news.set()


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them until all have ended: before Python 3.12 wait_for loses a cancellation that meets its result."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=END_AGAIN)
