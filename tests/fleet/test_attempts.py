"""Attempts: which refusals are a client's, and when a replica is asked again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from quire.errors import NoReplica
from quire.fleet.attempts import Attempts
from quire.fleet.link import Link, Refused
from quire.fleet.roster import Roster
from quire.server.http.api_error import ApiError


class FakeRoster:
    """Says whether something changes, and what it was asked."""

    def __init__(self, *changes: bool) -> None:
        self.changes = list(changes)

    async def change(self, seconds: float) -> bool:
        return self.changes.pop(0)


def a_link() -> Link:
    return Link(0, "http://a:1", "s", cast(Any, None), cast(Any, None))


def refusal(status: int, code: str | None = None) -> Refused:
    return Refused(status, {"error": {"message": f"refused with {status}", "code": code}})


def attempts(*changes: bool, without: Link | None = None) -> Attempts:
    return Attempts(cast(Roster, FakeRoster(*changes)), 1.0, without)


def run(main: Any) -> None:
    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 413])
def test_what_others_would_refuse_too_is_the_client_s(status: int) -> None:
    async def main() -> None:
        with pytest.raises(ApiError) as error:
            attempts().refused(a_link(), refusal(status))
        assert error.value.status == status

    run(main)


def test_a_failure_is_the_client_s_the_second_time() -> None:
    async def main() -> None:
        tried, first = attempts(), a_link()
        tried.refused(first, refusal(500))
        assert tried.passed_over == {first}
        with pytest.raises(ApiError) as error:
            tried.refused(a_link(), refusal(500))
        assert error.value.status == 500

    run(main)


def test_replicas_that_drain_are_passed_over_one_after_another() -> None:
    async def main() -> None:
        tried, links = attempts(), {a_link() for _ in range(3)}
        for link in links:
            tried.refused(link, refusal(503, "draining"))
        assert tried.passed_over == links

    run(main)


def test_all_are_asked_again_after_a_change() -> None:
    async def main() -> None:
        tried = attempts(True, False)
        tried.lost(a_link())
        await tried.found_none(NoReplica("none"))
        assert not tried.passed_over
        with pytest.raises(ApiError) as error:
            await tried.found_none(NoReplica("none"))
        assert (error.value.status, error.value.code) == (503, "no_replica")

    run(main)


def test_only_what_has_begun_waits_for_room() -> None:
    async def main() -> None:
        tried = attempts(False, False)
        for _ in range(2):
            tried.refused(a_link(), refusal(429))
            await tried.found_none(NoReplica("none"), has_begun=True)
            assert not tried.passed_over
        tried.refused(a_link(), refusal(429))
        with pytest.raises(ApiError) as error:
            await tried.found_none(NoReplica("none"))
        assert error.value.status == 429

    run(main)


def test_what_is_served_already_does_not_wait() -> None:
    async def main() -> None:
        tried = attempts(without=a_link())
        with pytest.raises(ApiError, match="without http://a:1"):
            await tried.found_none(NoReplica("none"))

    run(main)
