"""Thoughts: a guide that lets a model think, for so many tokens at most, before a grammar begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Inner(Protocol):
    """The guide of what comes after the thoughts; see `quire.request.Guide`."""

    def allowed(self) -> NDArray[np.int32]: ...
    def accept(self, token: int) -> None: ...
    @property
    def done(self) -> bool: ...
    def copy(self) -> Inner: ...


@dataclass(frozen=True)
class Thinking:
    """Where thoughts stand, in token ids, and how long they may be."""

    begin: tuple[int, ...]  # a single one where a grammar comes after them, whose own beginning it might else be
    end: tuple[int, ...]
    has_begun: bool  # the prompt ends within them
    limit: int | None = None  # tokens


class ThinkingGuide:
    """A `Guide`: thoughts, if the model begins with them, then the inner guide's text, or any.

    After `limit` tokens of thoughts only their end may follow. It depends on nothing but the tokens.
    """

    def __init__(
        self,
        thinking: Thinking,
        inner: Inner | None,
        drawable: NDArray[np.int32],
        ends: Sequence[int],
        bytes_of: Callable[[list[int]], bytes],
    ) -> None:
        """drawable: a bit for each token that the model may draw, as `allowed` gives them. ends: its end tokens.

        bytes_of: the bytes of tokens. An end of several tokens may come in others, so it is looked for in these.
        """
        self._thinking = thinking
        self._inner = inner
        self._any = drawable
        self._bytes_of = bytes_of
        self._going_on = drawable  # while a grammar is still to come, the text must not end
        if inner is not None:
            self._going_on = drawable.copy()
            for token in ends:
                self._going_on[token // 32] &= ~_bit(token)
        self._is_thinking = thinking.has_begun
        self._is_open = not thinking.has_begun  # it may yet begin to think
        self._num_begun = 0  # tokens of the beginning that have come
        self._num_thoughts = 0
        self._num_forced = 0  # tokens of the end that have come after the limit
        self._tail = b""
        self._end_bytes = bytes_of(list(thinking.end)) if len(thinking.end) > 1 else b""

    def allowed(self) -> NDArray[np.int32]:
        """The tokens that may come next, a bit each."""
        if self._is_thinking:
            if self._thinking.limit is not None and self._num_thoughts >= self._thinking.limit:
                return self._only(self._thinking.end[self._num_forced])
            return self._going_on
        if self._inner is None:
            return self._any
        allowed = self._inner.allowed()
        return allowed | self._only(self._thinking.begin[0]) if self._is_open else allowed

    def accept(self, token: int) -> None:
        """Go on after a token. Raises what the inner guide raises."""
        if self._is_thinking:
            self._think(token)
        elif self._is_open and token == self._thinking.begin[self._num_begun]:
            self._num_begun += 1
            if self._num_begun == len(self._thinking.begin):
                self._is_open, self._is_thinking = False, True
        elif self._may_lead(token):
            pass
        else:
            self._is_open = False
            if self._inner is not None:
                self._inner.accept(token)

    @property
    def done(self) -> bool:
        """Whether the text is complete."""
        return not self._is_thinking and self._inner is not None and self._inner.done

    def copy(self) -> ThinkingGuide:
        """The same way, to be continued differently."""
        other = copy(self)
        other._inner = None if self._inner is None else self._inner.copy()
        return other

    def _think(self, token: int) -> None:
        thinking = self._thinking
        if thinking.limit is not None and self._num_thoughts >= thinking.limit:
            self._num_forced += 1
            self._is_thinking = self._num_forced < len(thinking.end)
            return
        self._num_thoughts += 1
        if len(thinking.end) == 1:
            self._is_thinking = token != thinking.end[0]
        else:
            self._tail = (self._tail + self._bytes_of([token]))[-2 * len(self._end_bytes) :]
            self._is_thinking = self._end_bytes not in self._tail

    def _may_lead(self, token: int) -> bool:
        """Whether a token is white space before thoughts, as those who read the answer take it."""
        if not self._is_open or self._num_begun or self._inner is not None:
            return False
        return self._bytes_of([token]).isspace()

    def _only(self, token: int) -> NDArray[np.int32]:
        mask = np.zeros_like(self._any)
        mask[token // 32] = _bit(token)
        return mask


def _bit(token: int) -> Any:
    return np.array(1 << token % 32, np.uint32).view(np.int32)[()]
