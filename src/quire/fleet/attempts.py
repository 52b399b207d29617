"""Attempts: retry a call at one replica after another until one accepts it or retrying cannot help."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from quire.errors import NoReplica
from quire.fleet.link import Link, Refused
from quire.fleet.roster import Roster
from quire.fleet.work import FarGuide
from quire.request import Guide
from quire.server.http.api_error import ApiError

WAIT_FOR_ROOM = 1.0  # s before a full replica is asked again: many waiting requests may see the same state of it
ASK_AGAIN = 0.1  # s before a connected replica that did not accept a call is asked again, if nothing changes earlier
REFUSED_ELSEWHERE_TOO = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


class Attempts:
    """The replicas to pass over, and the decision whether to try another one."""

    def __init__(
        self, roster: Roster, patience: float, without: Link | None = None, guide: Guide | None = None
    ) -> None:
        """patience: seconds to wait for a replica. guide: the guide of the request.

        without: the replica that already serves the request. If it is given, another replica is found at once or not at
        all.
        """
        self.passed_over = set() if without is None else {without}
        self._roster = roster
        self._without = without
        self._guide = guide
        self._deadline = asyncio.get_running_loop().time() + patience
        self._refusal: Refused | None = None

    def lost(self, link: Link) -> None:
        """Record that a replica was lost while it was asked."""
        self.passed_over.add(link)

    def refused(self, link: Link, refusal: Refused) -> None:
        """Record a refusal.

        Raises ApiError if other replicas would refuse, too: a second failure of a replica is no coincidence.
        """
        if refusal.status in REFUSED_ELSEWHERE_TOO or (
            self._refusal is not None and self._refusal.is_own_fault and refusal.is_own_fault
        ):
            raise client_error(refusal, self._guide) from refusal
        self.passed_over.add(link)
        if not refusal.is_away:
            self._refusal = refusal

    async def found_none(self, error: NoReplica, *, has_begun: bool = False) -> None:
        """Wait until all replicas may be asked again. Raises ApiError if that would be too late.

        has_begun: the client already has a part of the answer, so the request waits for room without a limit.
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
        """Wait until asking again is useful. Return False if no time is left for that."""
        left = self._deadline - asyncio.get_running_loop().time()
        if left > ASK_AGAIN and any(link.is_up for link in self.passed_over):
            await self._roster.change(ASK_AGAIN)
            return True
        return await self._roster.change(left)


def no_replica(why: str) -> ApiError:
    """Return an error that asks the client to retry later."""
    return ApiError(why, HTTPStatus.SERVICE_UNAVAILABLE, code="no_replica", headers={"Retry-After": "1"})


def client_error(refusal: Refused, guide: Guide | None = None) -> ApiError:
    """Return a replica's refusal as the error that a single server would send. guide: the guide of the request."""
    param, code = refusal.error.get("param"), refusal.error.get("code")
    if code == "bad_grammar" and isinstance(guide, FarGuide):
        param, code = guide.field, None
    headers = {"Retry-After": "1"} if refusal.status == HTTPStatus.TOO_MANY_REQUESTS else None
    return ApiError(str(refusal), HTTPStatus(refusal.status), param=param, code=code, headers=headers)
