"""Calls: who has which samples, without a replica and without an event loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.fleet.calls import Calls
from quire.fleet.index import FleetIndex
from quire.fleet.link import Link
from quire.fleet.resume import MOST_LOST, why_to_end
from quire.fleet.work import Assignment


class Up(Link):
    """A replica that can be called."""

    is_up = True  # type: ignore[assignment]


class Book:
    """Calls of one prompt at replicas that are named by their slots."""

    def __init__(self) -> None:
        self.index = FleetIndex()
        self.aborted: list[int] = []
        self.calls = Calls(self.index, lambda one: self.aborted.append(one.flow))
        self.links = [Up(slot, f"http://{slot}:1", "s", cast(Any, None), cast(Any, None)) for slot in range(3)]
        self.work = cast(Any, SimpleNamespace(assigned={}, is_admitted=False))

    def send(self, slot: int, *samples: int) -> Assignment:
        best = SimpleNamespace(uncached_tokens=10)
        placement = cast(Any, SimpleNamespace(choice=SimpleNamespace(best=best)))
        before = {sample: self.work.assigned[sample] for sample in samples if sample in self.work.assigned}
        expected = self.index.expect(slot, [7])
        made = Assignment(
            self.calls.next_flow(),
            self.work,
            self.links[slot],
            set(samples),
            expected,
            placement,
            None,
            before,
            sent=slot,
        )
        self.calls.add(made)
        return made


def test_a_call_belongs_to_its_replica_until_it_is_forgotten() -> None:
    book = Book()
    one, two = book.send(0, 0, 1), book.send(1, 2)
    assert (one.flow, two.flow) == (0, 1)
    assert book.calls.of(book.links[0], 0) is one
    assert book.calls.of(book.links[1], 0) is None
    assert book.index.runs([7]) == {0: 1, 1: 1}
    assert book.calls.forget(one, "finished")
    assert not book.calls.forget(one, "finished")
    assert not book.calls.is_open(one)
    assert book.work.assigned == {2: two}
    assert book.index.runs([7]) == {1: 1}
    assert book.aborted == []


def test_a_call_that_is_accepted_takes_samples_from_others() -> None:
    book = Book()
    first = book.send(0, 0, 1)
    book.calls.accept(first)
    moved = book.send(1, 0)
    assert book.work.assigned == {0: moved, 1: first}
    assert book.calls.is_open(first)  # until another replica has accepted all of it
    book.calls.accept(moved)
    assert (first.samples, book.aborted) == ({1}, [])
    book.calls.accept(book.send(1, 1))
    assert book.aborted == [0]
    assert book.calls.accepted_by(book.links[0]) == []


@pytest.mark.parametrize("is_over", [False, True])
def test_a_call_that_is_refused_gives_its_samples_back(is_over: bool) -> None:
    book = Book()
    first = book.send(0, 0)
    book.calls.accept(first)
    other = book.send(1, 0)
    book.calls.refuse(other, {0: first}, is_over=is_over)
    assert book.work.assigned == ({} if is_over else {0: first})
    assert book.aborted == ([1, 0] if is_over else [1])


def test_what_leaves_a_draining_replica_leaves_once() -> None:
    book = Book()
    accepted, waiting = book.send(0, 0), book.send(0, 1)
    book.calls.accept(accepted)
    assert book.calls.movable(book.links[0]) == [accepted]
    assert book.calls.movable(book.links[0]) == []
    book.calls.accept(waiting)
    assert book.calls.movable(book.links[0]) == [waiting]


def test_what_a_state_does_not_count_is_load() -> None:
    book = Book()
    book.send(1, 0, 1)
    later = book.send(1, 2)
    later.sent = 9.0
    book.send(2, 3)
    book.calls.seen(book.links[1], [0, 2, 99])  # of which one is another replica's, and one is unknown
    assert book.calls.unseen() == {book.links[1]: (10, 1, 9.0), book.links[2]: (10, 1, 2)}


def test_what_survives_a_loss() -> None:
    assert why_to_end("exact", 1, "it", "http://a:1") is None
    assert why_to_end("any", MOST_LOST, "it", "http://a:1") is None
    assert why_to_end("never", 1, "it", "http://a:1") == "http://a:1 was lost, and --resume is 'never'"
    assert why_to_end("exact", MOST_LOST + 1, "it", "http://a:1") == (
        "9 replicas in a row were lost with it, the last one at http://a:1"
    )
