"""Tally: the distinct tokens of a request, which penalties need in every step."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.request import Request


class Tally:
    """The distinct tokens of a request and how often it generated each. It grows with the request."""

    def __init__(self, request: Request) -> None:
        tokens = np.frombuffer(request.tokens, np.int32)
        tokens = tokens[tokens >= 0]  # without the rows of images, all of which are in the prompt
        distinct, inverse = np.unique(tokens, return_inverse=True)
        counts = np.bincount(inverse[len(tokens) - request.num_generated :], minlength=len(distinct))
        self._given = request.tokens
        self._num_seen = len(request.tokens)
        self._tokens = array("i", distinct.tolist())
        self._counts = array("f", counts.tolist())
        self._place = {token: place for place, token in enumerate(self._tokens)}

    def follows(self, request: Request) -> bool:
        """Count the tokens that were generated since. Return False if the request has other tokens now."""
        tokens, seen = request.tokens, self._num_seen
        if tokens is not self._given or len(tokens) < seen:
            return False
        for token in tokens[seen:]:
            place = self._place.get(token)
            if place is None:
                self._place[token] = len(self._tokens)
                self._tokens.append(token)
                self._counts.append(1.0)
            else:
                self._counts[place] += 1.0
        self._num_seen = len(tokens)
        return True

    def numbers(self, drafts: Sequence[int] = ()) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the distinct tokens, and the number of times that each was generated.

        drafts: tokens to count in addition, this time only.
        """
        tokens, counts = np.array(self._tokens), np.array(self._counts)
        if not drafts:
            return tokens, counts
        more: dict[int, int] = {}  # places of draft tokens that are new
        for token in drafts:
            place = self._place.get(token)
            if place is None:
                place = more.setdefault(token, len(counts))
                if place == len(counts):
                    counts = np.append(counts, np.float32(0))
            counts[place] += 1
        return np.append(tokens, np.array(list(more), np.int32)), counts
