"""A guide for reasoning: it lets a model reason, up to a number of tokens, before a grammar begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Inner(Protocol):
    """The guide of the text after the reasoning; see `quire.request.Guide`."""

    def allowed(self) -> NDArray[np.int32]: ...
    def accept(self, token: int) -> None: ...
    @property
    def done(self) -> bool: ...
    def forced(self) -> Sequence[int]: ...
    def copy(self) -> Inner: ...
    def for_drafts(self) -> Inner | None: ...


@dataclass(frozen=True)
class Thinking:
    """The delimiters of reasoning, in token ids, and its maximum length."""

    begin: tuple[int, ...]  # must be a single token before a grammar, whose text could otherwise begin the same way
    end: tuple[int, ...]
    has_begun: bool  # the prompt ends within the reasoning
    limit: int | None = None  # tokens


class ThinkingGuide:
    """A `Guide` for reasoning, if the model begins with it, and then the inner guide's text, or any.

    After `limit` tokens of reasoning only its end may follow. The state depends only on the tokens.
    """

    def __init__(
        self,
        thinking: Thinking,
        inner: Inner | None,
        drawable: NDArray[np.int32],
        ends: Sequence[int],
        bytes_of: Callable[[list[int]], bytes],
    ) -> None:
        """drawable: a bit for each token that the model may draw, in the format of `allowed`. ends: its end tokens.

        bytes_of: returns the bytes of tokens. An end of several tokens may be tokenized differently, so bytes are
        compared.
        """
        self.source = ("", "")  # kind and text of its Spec; set by Grammars
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
        self._is_open = not thinking.has_begun  # it may still begin to reason
        self._num_begun = 0  # tokens of the beginning so far
        self._num_thinking_tokens = 0
        self._num_forced = 0  # tokens of the end that were forced after the limit
        self._tail = b""
        self._end_bytes = bytes_of(list(thinking.end)) if len(thinking.end) > 1 else b""

    def allowed(self) -> NDArray[np.int32]:
        """Return the mask of the tokens that may come next."""
        if self._is_thinking:
            if self._thinking.limit is not None and self._num_thinking_tokens >= self._thinking.limit:
                return self._only(self._thinking.end[self._num_forced])
            return self._going_on
        if self._inner is None:
            return self._any
        allowed = self._inner.allowed()
        return allowed | self._only(self._thinking.begin[0]) if self._is_open else allowed

    def accept(self, token: int) -> None:
        """Advance by a token. Raises the errors of the inner guide."""
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

    def forced(self) -> Sequence[int]:
        """Return the rest of the end of reasoning that is too long, or the tokens that the inner guide forces."""
        if self._is_thinking:
            is_over = self._thinking.limit is not None and self._num_thinking_tokens >= self._thinking.limit
            return self._thinking.end[self._num_forced :] if is_over else ()
        return () if self._is_open or self._inner is None else self._inner.forced()

    @property
    def done(self) -> bool:
        """True if the text is complete."""
        return not self._is_thinking and self._inner is not None and self._inner.done

    def copy(self) -> ThinkingGuide:
        """Return a copy in the same state, to be continued differently."""
        return self._with(None if self._inner is None else self._inner.copy())

    def for_drafts(self) -> ThinkingGuide | None:
        """Return a copy for draft tokens; None if the inner guide is too slow at present."""
        inner = None if self._inner is None else self._inner.for_drafts()
        return None if inner is None and self._inner is not None else self._with(inner)

    def _with(self, inner: Inner | None) -> ThinkingGuide:
        other = copy(self)
        other._inner = inner
        return other

    def _think(self, token: int) -> None:
        thinking = self._thinking
        if thinking.limit is not None and self._num_thinking_tokens >= thinking.limit:
            self._num_forced += 1
            self._is_thinking = self._num_forced < len(thinking.end)
            return
        self._num_thinking_tokens += 1
        if len(thinking.end) == 1:
            self._is_thinking = token != thinking.end[0]
        else:
            self._tail = (self._tail + self._bytes_of([token]))[-2 * len(self._end_bytes) :]
            self._is_thinking = self._end_bytes not in self._tail

    def _may_lead(self, token: int) -> bool:
        """Return whether a token is white space before reasoning, which readers of the answer ignore."""
        if not self._is_open or self._num_begun or self._inner is not None:
            return False
        return self._bytes_of([token]).isspace()

    def _only(self, token: int) -> NDArray[np.int32]:
        mask = np.zeros_like(self._any)
        mask[token // 32] = _bit(token)
        return mask


def _bit(token: int) -> Any:
    return np.array(1 << token % 32, np.uint32).view(np.int32)[()]
