"""A session: when a gateway is sent a replica's state, and how it ends."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

import pytest

from quire.fingerprint.fingerprint import Fingerprint
from quire.fleet.membership import StaticMembers
from quire.fleet.roster import Roster
from quire.fleet.session import MAX_UNSENT, Session
from quire.fleet.state import ReplicaState
from quire.fleet.wire import Frame, Hello, check_blocks, dumps
from tests.fleet.states import state
from tests.fleet.test_wire import HELLO
from tests.patches import set_in_this_thread


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    set_in_this_thread(monkeypatch, time, "monotonic", lambda: clock[0])
    return clock


def begun(first: ReplicaState) -> Session:
    """A session that has sent its first state."""

    def hello(name: str) -> Hello:
        raise AssertionError(name)

    made = Session("s", hello)
    made.begin([], [], 0, first)
    assert sent(made)["state"]["num_running"] == first.num_running
    return made


def sent(one: Session) -> dict[str, Any]:
    """What is sent when the session is woken; nothing where it is not."""
    if not one._news.is_set():
        return {}
    one._news.clear()
    return dict(json.loads(dumps(one._message())))


@pytest.mark.parametrize(
    "change", [{"num_running": 3}, {"num_running": 1}, {"waiting_tokens": 40}, {"num_waiting": 1}], ids=str
)
def test_another_load_is_sent_at_once(now: list[float], change: dict[str, int]) -> None:
    """A gateway that took an answer for running, or a prompt for waiting, would send others to a busier replica."""
    one = begun(state(num_running=2, waiting_tokens=100))
    now[0] += 0.001
    one.add([], state(**{"num_running": 2, "waiting_tokens": 100} | change), [])
    message = sent(one)
    assert {name: message["state"][name] for name in change} == change


def test_steps_that_only_decode_send_a_state_now_and_then(now: list[float]) -> None:
    one = begun(state(num_running=2, free_blocks=900))
    states = []
    for i in range(40):
        now[0] += 1 / 128  # seven of these are 50 ms and a little
        one.add([["+", i]], state(num_running=2, free_blocks=900 - i), [])
        message = sent(one)
        assert message["events"] == [["+", i]]
        if "state" in message:
            states.append(message["state"]["free_blocks"])
    assert states == [900 - i for i in (6, 13, 20, 27, 34)]


def test_calls_that_a_state_counts_come_with_it(now: list[float]) -> None:
    one = begun(state())
    now[0] += 0.001
    one.add([], state(num_running=1), [7])
    assert sent(one)["started"] == [7]
    now[0] += 0.001
    one.add([], state(num_running=1), [])
    assert sent(one) == {}


END = Frame(1, 0, 5, [9], 3, "end", None, ["stop", None, None])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["events", "long events", "frames"])
def test_a_gateway_that_reads_too_slowly_is_dropped(kind: str) -> None:
    """Whatever it leaves unread: else it takes a replica's memory."""
    one = Session("s", lambda _: HELLO)
    one.begin([], [], 0, state())
    for _ in range(2):
        if kind == "events":
            one.add([["+", i] for i in range(MAX_UNSENT + 1)], state(), [])
        elif kind == "long events":
            one.add([["+", *range(MAX_UNSENT // 2)]] * 2, state(), [])
        else:
            one.report([END] * (MAX_UNSENT + 1))

    async def main() -> list[bytes]:
        return [line async for line in one.lines()]

    assert len(asyncio.run(asyncio.wait_for(main(), 20))) == 1  # what it is, and nothing of the blocks
    assert not one._events
    assert not one._frames


def test_what_comes_while_the_last_line_is_sent_is_sent_too() -> None:
    async def main() -> list[Any]:
        one = Session("s", lambda _: HELLO)
        one.begin([], [], 0, state())
        one.flows[1] = None  # type: ignore[assignment]
        lines = one.lines()
        await anext(lines)
        await anext(lines)
        one.draining = one.closing = True
        one.wake()
        await anext(lines)
        one.report([END])
        del one.flows[1]
        return [json.loads(line) async for line in lines]

    assert [line["frames"] for line in asyncio.run(main())] == [[list(END)]]


def test_what_is_on_the_disk_comes_with_the_snapshot() -> None:
    def hello(name: str) -> Hello:
        raise AssertionError(name)

    one, roster = Session("s", hello), Roster(StaticMembers(["http://127.0.0.1:1"]), Fingerprint({"a": "b"}), "s", "i")
    one.begin([1, 2], [2, 3], 7, state())
    link = SimpleNamespace(slot=4)
    roster.disk.store(4, [9])  # of the incarnation before
    message = one._message()
    check_blocks(message["snapshot"], message["events"])
    roster.blocks(link, message["snapshot"], message["events"])
    assert roster.index.runs([1, 2, 3]) == {4: 2}
    assert roster.index.runs([1, 2, 3], roster.disk) == {4: 3}
    assert roster.disk.num_held(4) == 2
    one.add([["d-", 3], ["d+", 5], ["0"]], state(), [])
    message = one._message()
    assert message["event"] == 7
    roster.blocks(link, None, message["events"])
    assert (roster.index.num_held(4), roster.disk.num_held(4)) == (0, 2)
    assert roster.disk.runs([5]) == {4: 1}
