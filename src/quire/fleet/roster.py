"""Roster: the replicas that a gateway is connected to, and the blocks that each of them holds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import aiohttp

from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.index import MAX_SLOTS, FleetIndex
from quire.fleet.link import Link, Listener
from quire.fleet.membership import Membership

log = logging.getLogger("quire.fleet")

# Parts of a fingerprint that identify the model. Replicas that differ in other parts compute other bits of the same
# model.
MODEL_PARTS = frozenset({"weights", "config", "tokenizer", "template", "adapters"})
WEIGHTS = ("weights", "weights version")  # the parts that change when a replica replaces its weights
MAX_SERVED = 2 * MAX_SLOTS  # processes that are known to have had the fleet's weights
MAX_POSTS = 512  # concurrent posts to each replica
END_AGAIN = 1.0  # s until a task that has not ended is cancelled again


class Roster:
    """Follows the membership. Only the event loop may use it."""

    def __init__(self, membership: Membership, model: Fingerprint, secret: str, incarnation: str) -> None:
        """model, incarnation: those of the replica whose tokenizer the gateway uses."""
        self.links: dict[str, Link] = {}  # by URL
        self.index = FleetIndex()
        self.disk = FleetIndex()  # blocks on the replicas' disks
        self.model = model
        self.num_updates = 0  # of the model's weights
        # Incarnations of the replicas that have had the fleet's current weights, the latest ones: if one of them has
        # other weights now, it has replaced them.
        self._served = {incarnation: None}
        self._membership = membership
        self._secret = secret
        self._http: aiohttp.ClientSession | None = None
        self._runs: dict[str, asyncio.Task[None]] = {}  # tasks of the links, by URL
        self._fitting: set[str] = set()  # URLs of replicas that have the gateway's model, with its weights
        self._free_slots = list(range(MAX_SLOTS))
        self._news = asyncio.Event()  # set when anything about a replica changes

    async def follow(self, listener: Listener) -> None:
        """Keep connections to all members, and to no others. listener: receives the messages of all links."""
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
        """Disconnect from all replicas. The task that runs `follow` must have ended before."""
        await end_tasks(self._runs.values())
        if self._http is not None:
            await self._http.close()

    def at(self, slot: int) -> Link | None:
        """Return the replica with that slot in the index; None if it has left the fleet."""
        return next((link for link in self.links.values() if link.slot == slot), None)

    def serving(self) -> list[Link]:
        """Return the replicas that can be called and have the gateway's model, with its weights."""
        return [link for link in self.links.values() if link.is_up and self.is_fitting(link)]

    def is_fitting(self, link: Link) -> bool:
        """Return whether a replica has answered and has the gateway's model, with its weights."""
        return link.url in self._fitting

    def has_other_weights_at_most(self, fingerprint: Fingerprint) -> bool:
        """Return whether a replica with that fingerprint has the gateway's model, perhaps with other weights."""
        return MODEL_PARTS & {*self.model.difference(fingerprint)} <= {"weights"}

    async def change(self, seconds: float) -> bool:
        """Wait until something about a replica changes. Return False if nothing does within `seconds`."""
        self._news.clear()
        try:
            await asyncio.wait_for(self._news.wait(), max(0.0, seconds))
        except asyncio.TimeoutError:
            return False
        return True

    # -------------------------------------------------------------------------------------- the calls of a Listener

    def connected(self, link: Link) -> bool:
        """Add a replica whose greeting arrived. Return False if it serves another model, so it is left out."""
        self._fitting.discard(link.url)
        self._follow_weights(link)
        different = [] if link.fingerprint is None else self.model.difference(link.fingerprint)
        if MODEL_PARTS & {*different}:
            parts = ", ".join(different)
            log.error("replica %s is left out: it serves another model than this gateway's (%s)", link.url, parts)
            return False
        self._fit(link)
        if different:
            log.warning("replica %s computes other bits: %s differ", link.url, ", ".join(different))
        log.info("replica %s is connected", link.url)
        return True

    def _follow_weights(self, link: Link) -> None:
        """Serve the new weights of a replica that had the fleet's ones, and leave out replicas with other weights."""
        hello, found = link.hello, link.fingerprint
        if hello is None or found is None or hello.incarnation not in self._served:
            return
        if MODEL_PARTS & {*self.model.difference(found)} != {"weights"}:
            return
        own = {name: value for name, value in self.model.parts.items() if name not in WEIGHTS}
        self.model = Fingerprint(own | {name: found.parts[name] for name in WEIGHTS if name in found.parts})
        self.num_updates += 1
        log.warning("replica %s has replaced its weights; the fleet serves these from now on", link.url)
        self._served.clear()
        for url, other in self.links.items():
            if other.fingerprint is None or MODEL_PARTS & {*self.model.difference(other.fingerprint)}:
                self._fitting.discard(url)
            elif other.is_up:
                self._fit(other)

    def _fit(self, link: Link) -> None:
        self._fitting.add(link.url)
        if link.hello is not None:
            self._served.pop(link.hello.incarnation, None)  # so that it is the last one
            self._served[link.hello.incarnation] = None
        if len(self._served) > MAX_SERVED:
            del self._served[next(iter(self._served))]

    def blocks(self, link: Link, snapshot: list[int] | None, events: list[list[Any]]) -> None:
        """Update the index from a snapshot of a replica's blocks, or from events of them."""
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
        """Wake those that wait for a change."""
        self._news.set()

    def lost(self, link: Link) -> None:
        """Forget the blocks of a replica that is lost."""
        self.index.clear(link.slot)
        self.disk.clear(link.slot)
        self._news.set()


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended: before Python 3.12, wait_for may lose a cancellation at its result."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=END_AGAIN)
