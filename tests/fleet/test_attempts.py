"""Attempts: which refusals are a client's, and when a replica is asked again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from quire.errors import NoReplica
from quire.fleet.attempts import WAIT_FOR_ROOM, Attempts
from quire.fleet.link import Link, Refused
from quire.fleet.roster import Roster
from quire.server.http.api_error import ApiError
from tests.patches import set_in_this_thread


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


def test_one_that_is_full_has_not_failed() -> None:
    async def main() -> None:
        tried, links = attempts(), [a_link(), a_link()]
        tried.refused(links[0], refusal(429))
        tried.refused(links[1], refusal(500))
        assert tried.passed_over == set(links)
        with pytest.raises(ApiError):
            tried.refused(a_link(), refusal(500))

    run(main)


def test_who_does_not_know_the_session_has_not_failed() -> None:
    async def main() -> None:
        tried = attempts(True)
        tried.refused(a_link(), refusal(404, "unknown_session"))
        await tried.found_none(NoReplica("none"))
        assert not tried.passed_over

    run(main)


def test_one_that_is_still_connected_is_asked_again_though_nothing_changes() -> None:
    """As when a call alone was lost, and not the session."""

    async def main() -> None:
        tried, link = attempts(False, False), a_link()
        link.hello, link.state = cast(Any, object()), cast(Any, object())
        tried.lost(link)
        await tried.found_none(NoReplica("none"))
        assert not tried.passed_over
        tried.lost(link)
        link.state = None
        with pytest.raises(ApiError):
            await tried.found_none(NoReplica("none"))

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


def test_only_what_has_begun_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """And whatever changes, it waits for a while: states come at each step, to all that wait."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    set_in_this_thread(monkeypatch, asyncio, "sleep", sleep)

    async def main() -> None:
        tried = attempts()
        for _ in range(2):
            tried.refused(a_link(), refusal(429))
            await tried.found_none(NoReplica("none"), has_begun=True)
            assert not tried.passed_over
        tried.refused(a_link(), refusal(429))
        with pytest.raises(ApiError) as error:
            await tried.found_none(NoReplica("none"))
        assert error.value.status == 429

    run(main)
    assert pauses == [WAIT_FOR_ROOM] * 2


def test_what_is_served_already_does_not_wait() -> None:
    async def main() -> None:
        tried = attempts(without=a_link())
        with pytest.raises(ApiError, match="without http://a:1"):
            await tried.found_none(NoReplica("none"))

    run(main)
