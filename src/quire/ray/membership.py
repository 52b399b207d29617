"""The members of a fleet from Ray Serve, passed from its router's thread to the gateway's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from quire.fleet.membership import Members, member_at

URL = "url"  # key of a replica's address in its routing stats


class RayMembers:
    """The latest replicas of Serve's router. They stay while Ray's head is down."""

    def __init__(self) -> None:
        self._urls: dict[str, str] = {}  # replica id -> URL
        self._members: Members = frozenset()
        self._listeners: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def update(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the running replicas: id -> routing stats. Thread-safe.

        A replica whose stats have no URL is not a member yet, or keeps its known URL: a controller that has just
        restarted lists replicas without their stats. An empty list changes nothing, as with DNS.
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
            with suppress(RuntimeError):  # the listener's loop is closed
                tell()

    async def changes(self) -> AsyncIterator[Members]:
        """Implement `quire.fleet.membership.Membership.changes`."""
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


# Ray creates the router from a copy of its module, and only JSON can be passed to it. So router and gateway share this
# object of the process, which has one gateway at most.
MEMBERS = RayMembers()
