"""Attempts: one replica after another is asked for the same thing, until one takes it or no other would."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from quire.errors import NoReplica
from quire.fleet.link import Link, Refused
from quire.fleet.roster import Roster
from quire.fleet.work import FarGuide
from quire.request import Guide
from quire.server.http.api_error import ApiError

WAIT_FOR_ROOM = 1.0  # s until a replica that was full is asked again: each state of it may come to many that wait
ASK_AGAIN = 0.1  # s, if nothing changes before, until a replica is that did not take a call and is still connected
REFUSED_ELSEWHERE_TOO = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class Attempts:
    """Which replicas are passed over, and when asking another one is of no use."""

    def __init__(
        self, roster: Roster, patience: float, without: Link | None = None, guide: Guide | None = None
    ) -> None:
        """patience: seconds to wait for a replica. guide: of the request.

        without: a replica that serves what is asked for already, so that another one is found at once or not at all.
        """
        self.passed_over = set() if without is None else {without}
        self._roster = roster
        self._without = without
        self._guide = guide
        self._deadline = asyncio.get_running_loop().time() + patience
        self._refusal: Refused | None = None

    def lost(self, link: Link) -> None:
        """A replica was lost while it was asked."""
        self.passed_over.add(link)

    def refused(self, link: Link, refusal: Refused) -> None:
        """A replica has refused. Raises ApiError where others would, too: a second one that fails is no accident."""
        if refusal.status in REFUSED_ELSEWHERE_TOO or (
            self._refusal is not None and self._refusal.is_own_fault and refusal.is_own_fault
        ):
            raise client_error(refusal, self._guide) from refusal
        self.passed_over.add(link)
        if not refusal.is_away:
            self._refusal = refusal

    async def found_none(self, error: NoReplica, *, has_begun: bool = False) -> None:
        """Wait until all replicas may be asked again. Raises ApiError where that is too late.

        has_begun: a client has a part of it, so it waits for room as long as it takes.
        """
        if self._without is not None:
            passed_over = ", ".join(sorted(link.url for link in self.passed_over))
            raise no_replica(f"{error}; without {passed_over}") from error
        is_full = self._refusal is not None and self._refusal.status == HTTPStatus.TOO_MANY_REQUESTS
        if self._refusal is not None and not (is_full and has_begun):
            raise client_error(self._refusal, self._guide) from error
        if is_full:
            await asyncio.sleep(WAIT_FOR_ROOM)
        elif not await self._change():
            raise no_replica(str(error)) from error
        self.passed_over, self._refusal = set(), None

    async def _change(self) -> bool:
        """Wait until it is of use to ask again. False: there is no time left for that."""
        left = self._deadline - asyncio.get_running_loop().time()
        if left > ASK_AGAIN and any(link.is_up for link in self.passed_over):
            await self._roster.change(ASK_AGAIN)
            return True
        return await self._roster.change(left)


def no_replica(why: str) -> ApiError:
    """An error that says to try again later."""
    return ApiError(why, HTTPStatus.SERVICE_UNAVAILABLE, code="no_replica", headers={"Retry-After": "1"})


def client_error(refusal: Refused, guide: Guide | None = None) -> ApiError:
    """What a replica has refused, as the client would have been refused without a fleet. guide: of its request."""
    param, code = refusal.error.get("param"), refusal.error.get("code")
    if code == "bad_grammar" and isinstance(guide, FarGuide):
        param, code = guide.field, None
    headers = {"Retry-After": "1"} if refusal.status == HTTPStatus.TOO_MANY_REQUESTS else None
    return ApiError(str(refusal), HTTPStatus(refusal.status), param=param, code=code, headers=headers)
