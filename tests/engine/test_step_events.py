"""A step's events as a sequence: the same as a list with an event for each token."""

from __future__ import annotations

import pytest

from quire.engine.step_events import Drawn, StepEvents
from quire.request import Event, FinishReason


def test_tokens_are_events_when_they_are_read_one_by_one() -> None:
    ended = Event("b", 5, finish_reason=FinishReason.STOP)
    events = StepEvents()
    assert not events
    assert events == []
    events.add([])
    assert not events
    events.add(Drawn(["a", "b", "c", "d"], [1, 5, 7, 9], {1: [ended, Event("b", 6)], 3: []}))
    events.add([Event("e", 2)])
    expected = [Event("a", 1), ended, Event("b", 6), Event("c", 7), Event("e", 2)]
    assert list(events) == expected
    assert events == expected
    assert events != expected[1:]
    assert (len(events), events[0], events[-1], events[1:3]) == (5, expected[0], expected[-1], expected[1:3])
    assert events + [Event("f", 3)] == [*expected, Event("f", 3)]  # noqa: RUF005
    assert [Event("f", 3)] + events == [Event("f", 3), *expected]  # noqa: RUF005
    assert events != "no events"
    nothing = StepEvents()
    nothing.add(Drawn(["a"], [1], {0: []}))
    assert not nothing
    with pytest.raises(IndexError):
        events[5]


def test_the_events_of_another_step_come_after() -> None:
    events = StepEvents([Event("a", 1)])
    assert len(events) == 1
    events.extend(StepEvents([Event("b", 2)]))
    events.extend([Event("c", 3)])
    events.extend([])
    assert events == [Event("a", 1), Event("b", 2), Event("c", 3)]
    assert all(isinstance(part, list) for part in events.parts)
