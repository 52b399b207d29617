"""The members that Serve's router shows, from its thread to the gateway's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from quire.fleet.membership import Members
from quire.ray.membership import RayMembers


def urls(members: Members) -> list[str]:
    return sorted(member.url for member in members)


def seen(actions: list[Callable[[RayMembers], None]], count: int) -> list[list[str]]:
    """What a reader gets, where each action runs on another thread as soon as the reader has what was before it."""
    members, found = RayMembers(), []

    async def read() -> None:
        pending = list(actions)

        def act() -> None:
            if pending:
                thread = threading.Thread(target=pending.pop(0), args=(members,))
                thread.start()
                thread.join()

        asyncio.get_running_loop().call_soon(act)
        async for one in members.changes():
            found.append(urls(one))
            if len(found) == count:
                return
            act()

    asyncio.run(asyncio.wait_for(read(), 30))
    return found


def shows(**replicas: str | None) -> Callable[[RayMembers], None]:
    stats = {id: {} if url is None else {"url": url} for id, url in replicas.items()}
    return lambda members: members.update(stats)


def test_a_reader_gets_what_there_is_and_each_change() -> None:
    changes = [shows(a="http://x:1"), shows(a="http://x:1", b="http://x:2"), shows(b="http://x:2")]
    assert seen(changes, 3) == [["http://x:1"], ["http://x:1", "http://x:2"], ["http://x:2"]]


def test_a_replica_without_its_stats_is_none_yet_or_what_it_was() -> None:
    def all_at_once(members: RayMembers) -> None:
        shows(a="http://x:1", b=None)(members)
        assert urls(members._members) == ["http://x:1"]
        shows(a=None, b="http://x:2")(members)  # a controller that has just begun again
        assert urls(members._members) == ["http://x:1", "http://x:2"]
        shows(b=None)(members)
        assert urls(members._members) == ["http://x:2"]

    assert seen([all_at_once], 1) == [["http://x:2"]]


def test_that_no_replica_runs_changes_nothing() -> None:
    members = RayMembers()
    shows(a="http://x:1")(members)
    shows()(members)
    shows(b=None)(members)
    assert urls(members._members) == ["http://x:1"]


def test_a_reader_that_went_away_is_forgotten_and_harms_nothing() -> None:
    members = RayMembers()
    shows(a="http://x:1")(members)

    async def read_one() -> None:
        changes = members.changes()
        assert urls(await anext(changes)) == ["http://x:1"]
        await changes.aclose()  # type: ignore[attr-defined]

    asyncio.run(read_one())
    assert not members._listeners

    async def leave() -> None:
        await anext(members.changes())

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    shows(a="http://x:2")(members)
    assert urls(members._members) == ["http://x:2"]


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 5), max_size=3), max_size=10))
def test_the_members_are_those_of_the_last_news_that_had_any(news: list[dict[str, int]]) -> None:
    members, expected = RayMembers(), []
    for shown in news:
        members.update({id: {"url": f"http://x:{port}"} for id, port in shown.items()})
        expected = sorted({f"http://x:{port}" for port in shown.values()}) or expected
        assert urls(members._members) == expected
