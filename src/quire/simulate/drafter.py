"""SimulatedDrafter: draft tokens that are right with a given probability."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from quire.engine.speculation import Asked, Draft, Room
from quire.request import Request
from quire.simulate.decoders import NUM_FAKE_TOKENS, drawn_token


class SimulatedDrafter:
    """Proposes the tokens that requests will draw, each with the same probability, and others. It takes no time."""

    name = "simulated"

    def __init__(self, share: float, seed: int) -> None:
        """share: probability that a token is right."""
        self._share, self._random = share, random.Random(seed)

    def propose(self, asked: Sequence[Asked], _: Room) -> list[Draft]:
        """Return as many draft tokens as are wanted for each request."""
        return [array("i", [self._token(one, len(one.tokens) + k) for k in range(most)]) for one, most in asked]

    def judge(self, request: Request, num_drafts: int, num_right: int) -> None:
        """Ignore the numbers: the probability is given."""

    def _token(self, request: Request, position: int) -> int:
        right = drawn_token(request, position)
        return right if self._random.random() < self._share else (right + 1) % NUM_FAKE_TOKENS
