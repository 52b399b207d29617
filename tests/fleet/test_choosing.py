"""Chooser: what replicas of windowed models say of their caches, and what changes while they are asked."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.errors import NoReplica
from quire.fleet.calls import Calls
from quire.fleet.choosing import Chooser
from quire.fleet.index import FleetIndex
from quire.fleet.link import Link
from quire.fleet.work import Work
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.request import Holder, Request, SamplingParams
from tests.fleet.states import state

PROMPT = [5, 6, 7] * 16  # three blocks
Answer = Callable[[], Any]


def has(cached: int, stored: int | None = None) -> Answer:
    """So many tokens in memory, and with the disk."""
    return lambda: {"cached": cached, "stored": cached if stored is None else stored}


class Listener:
    """Counts contradictions."""

    def __init__(self) -> None:
        self.contradictions: list[str] = []

    def contradicted(self, link: Link) -> None:
        self.contradictions.append(link.url)


class Asked(Link):
    """A replica of a windowed model that answers at once. The index knows of two blocks there."""

    def __init__(self, slot: int, fingerprint: str, listener: Listener, answer: Answer, seconds: float = 1e-3) -> None:
        super().__init__(slot, f"http://{slot}:1", "s", cast(Any, None), cast(Any, listener))
        self.hello = cast(Any, SimpleNamespace(salt="", block_size=16, has_windows=True))
        self.fingerprint = cast(Any, SimpleNamespace(digest=fingerprint))
        self.state = state(seconds_a_prompt_token=seconds)
        self.answer = answer

    async def post(self, path: str, message: Any) -> dict[str, Any]:
        assert path == "/fleet/match"
        await asyncio.sleep(0)
        return cast("dict[str, Any]", self.answer())


class Roster:
    """As many of them as a test wants."""

    def __init__(self, *links: Link) -> None:
        self.links = {link.url: link for link in links}
        held = {link.slot: 2 for link in links}
        self.index = SimpleNamespace(runs=lambda *_: held, held_runs=lambda *_: held)
        self.disk: tuple[int, ...] = ()

    def at(self, slot: int) -> Link | None:
        return next((link for link in self.links.values() if link.slot == slot), None)

    def is_fitting(self, link: Link) -> bool:
        return True


def work() -> Work:
    output = RequestOutput("a", "", PROMPT, [CompletionOutput(0)])
    request = Request("a", array("i", PROMPT), 20, SamplingParams(max_tokens=4, seed=1))
    return Work(cast(Any, None), output, [request], None)


def chooser_of(*links: Link) -> Chooser:
    return Chooser(cast(Any, Roster(*links)), "s", Calls(FleetIndex(), lambda _: None))


def chosen(one: Work, *links: Link) -> Any:
    """What it is given to, by the time that all were asked."""
    return asyncio.run(chooser_of(*links).for_work(one, [0], ()))


def test_what_a_replica_says_of_its_cache_counts() -> None:
    listener = Listener()
    links = [Asked(i, "f", listener, has(cached)) for i, cached in enumerate((16, 48, 0))]
    found = chosen(work(), *links)
    assert found.link is links[1]
    assert found.choice.best.candidate.num_blocks == 3
    assert not listener.contradictions


def test_what_a_replica_says_of_its_disk_counts() -> None:
    """Also of windows and states, of which the index does not know enough."""
    listener = Listener()
    links = [Asked(0, "f", listener, has(0, 48)), Asked(1, "f", listener, has(16, 16))]
    for link in links:
        assert link.state is not None
        link.state = replace(link.state, seconds_a_disk_block=1e-4)
    found = chosen(work(), *links)
    assert found.link is links[0]
    best = found.choice.best
    assert (best.candidate.num_blocks, best.candidate.num_disk_blocks, best.uncached_tokens) == (0, 3, 1)


def test_one_that_cannot_take_it_may_send_its_blocks() -> None:
    """Such as one that drains: what it computed goes on elsewhere, with its blocks."""
    listener = Listener()
    links = [Asked(0, "f", listener, has(48)), Asked(1, "f", listener, has(0)), Asked(2, "g", listener, has(0))]
    for link in links:
        assert link.state is not None
        link.state = replace(link.state, seconds_a_peer_block=1e-4)
    found = asyncio.run(chooser_of(*links).for_work(work(), [0], [links[0]]))
    assert found.link is links[1]
    assert found.choice.best.candidate.holder == Holder(links[0].url, 3)
    assert [one.candidate.holder for one in found.choice.ranking[1:]] == [None]  # it computes other bits


@pytest.mark.parametrize(
    "answer",
    [
        {},
        *[{"cached": wrong, "stored": 16} for wrong in (None, "16", -16, 10**9, 1.5, 32)],
        *[{"cached": 16, "stored": wrong} for wrong in (None, "16", -16, 10**9, 1.5)],
    ],
    ids=str,
)
def test_what_cannot_be_in_a_cache_counts_as_nothing(answer: dict[str, Any]) -> None:
    listener = Listener()
    liar, other = Asked(0, "f", listener, lambda: answer), Asked(1, "f", listener, has(16))
    found = chosen(work(), liar, other)
    assert found.link is other
    assert listener.contradictions == [liar.url]


def test_a_prompt_follows_the_one_of_its_stream_that_began_meanwhile() -> None:
    """Though another replica, of other bits, has more of it in its cache."""
    listener, one = Listener(), work()

    def pinned() -> dict[str, int]:
        one.wanted_fingerprint = "slow"  # as Fleet does when the other prompt is assigned
        return {"cached": 48, "stored": 48}

    fast = Asked(0, "fast", listener, pinned, seconds=1e-9)
    slow = Asked(1, "slow", listener, has(0))
    assert chosen(one, fast, slow).link is slow


def test_where_none_of_its_kind_is_left_it_waits() -> None:
    listener, one = Listener(), work()

    def pinned() -> dict[str, int]:
        one.wanted_fingerprint = "another"
        return {"cached": 48, "stored": 48}

    with pytest.raises(NoReplica):
        chosen(one, Asked(0, "f", listener, pinned))


def test_one_that_has_come_back_with_other_bits_is_another() -> None:
    listener, one = Listener(), work()

    def changed() -> dict[str, int]:
        first.fingerprint = cast(Any, SimpleNamespace(digest="g"))
        return {"cached": 48, "stored": 48}

    first, second = Asked(0, "f", listener, changed, seconds=1e-9), Asked(1, "f", listener, has(0))
    assert chosen(one, first, second).link is second
