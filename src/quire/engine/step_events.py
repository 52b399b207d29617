"""StepEvents: the events of a step. Tokens of requests that merely decode are kept as lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from quire.request import Event


class Drawn(NamedTuple):
    """Requests that got a token in a step and have nothing else to report."""

    ids: Sequence[str]
    tokens: Sequence[int]  # of each
    odd: dict[int, list[Event]]  # by place: the events instead of such a token


class StepEvents(Sequence[Event]):
    """The events of one step or several ones. As a sequence it has an `Event` for each token.

    Reading `parts` instead avoids that: it alternates between tokens of many requests and lists of other events.
    """

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self.parts: list[Drawn | list[Event]] = [list(events)] if events else []
        self._all: list[Event] | None = None

    def add(self, part: Drawn | list[Event]) -> None:
        """Append events."""
        if isinstance(part, Drawn) or part:
            self.parts.append(part)
            self._all = None

    def extend(self, more: Sequence[Event]) -> None:
        """Append the events of another step."""
        for part in more.parts if isinstance(more, StepEvents) else [list(more)]:
            self.add(part)

    def _events(self) -> list[Event]:
        if self._all is None:
            self._all = [event for part in self.parts for event in _expanded(part)]
        return self._all

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events())

    def __len__(self) -> int:
        return len(self._events())

    def __bool__(self) -> bool:
        return any(map(_has_events, self.parts))

    def __add__(self, other: Sequence[Event]) -> list[Event]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Event]) -> list[Event]:
        return [*other, *self]

    @overload
    def __getitem__(self, at: int) -> Event: ...
    @overload
    def __getitem__(self, at: slice) -> list[Event]: ...
    def __getitem__(self, at: int | slice) -> Event | list[Event]:
        return self._events()[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, tuple, StepEvents)) and self._events() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._events())


def _expanded(part: Drawn | list[Event]) -> Iterator[Event]:
    if isinstance(part, list):
        yield from part
        return
    for place, (request_id, token) in enumerate(zip(part.ids, part.tokens, strict=True)):
        if place in part.odd:
            yield from part.odd[place]
        else:
            yield Event(request_id, token)


def _has_events(part: Drawn | list[Event]) -> bool:
    if isinstance(part, list):
        return bool(part)
    return len(part.odd) < len(part.ids) or any(part.odd.values())
