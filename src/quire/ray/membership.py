"""The members of a fleet as Ray Serve knows them, handed from its router's thread to the gateway's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from quire.fleet.membership import Members, member_at

URL = "url"  # where a replica's routing stats have its address


class RayMembers:
    """The replicas that Serve's router was last shown. While Ray's head is down, these stay."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}  # replica id -> URL
        self._members: Members = frozenset()
        self._listeners: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def update(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in all replicas that run: id -> routing stats. May be called by any thread.

        One whose stats have no URL is not a member yet; or it stays what it was: a controller that has just begun
        again shows replicas without their stats. That no replica runs at all changes nothing, as with DNS.
        """
        with self._lock:
            urls = {id: stats.get(URL) or self._urls.get(id) for id, stats in replicas.items()}
            known = {id: url for id, url in urls.items() if url is not None}
            if not known:
                return
            self._urls = known
            self._members = frozenset(map(member_at, known.values()))
            listeners = list(self._listeners)
        for tell in listeners:
            with suppress(RuntimeError):  # its loop is closed
                tell()

    async def changes(self) -> AsyncIterator[Members]:
        """As of `quire.fleet.membership.Membership`."""
        news, known = asyncio.Event(), frozenset[Any]()
        tell = partial(asyncio.get_running_loop().call_soon_threadsafe, news.set)
        with self._lock:
            self._listeners.append(tell)
        try:
            while True:
                if (members := self._members) != known:
                    known = members
                    yield members
                await news.wait()
                news.clear()
        finally:
            with self._lock:
                self._listeners.remove(tell)


# Ray makes the router itself, out of a copy of its module, and nothing that is no JSON can be handed to it. So the two
# find each other here: an object of the process, which has one gateway at most.
MEMBERS = RayMembers()
