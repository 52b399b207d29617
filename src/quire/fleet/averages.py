"""Averages: what a gateway expects of a request, by what came of those before it."""

from __future__ import annotations

from quire.fleet.score import Demand

MEMORY = 0.05  # weight of the latest request in what is expected of the next one


class Averages:
    """Moving averages, of which a request's Demand is made."""

    def __init__(self) -> None:
        self._new_tokens = 128.0  # that a request generates, on the average
        self._hit_rate = 0.5  # share of the prompts' tokens that were cached, lately

    def ended(self, num_tokens: int) -> None:
        """A sample has ended with so many tokens."""
        self._new_tokens += MEMORY * (num_tokens - self._new_tokens)

    def began(self, num_cached: int, num_prompt: int) -> None:
        """A replica has found so many of a prompt's tokens in its cache."""
        self._hit_rate += MEMORY * (num_cached / max(1, num_prompt) - self._hit_rate)

    def new_tokens(self, most: int | None) -> float:
        """Tokens that a sample is expected to generate. most: its max_tokens."""
        return self._new_tokens if most is None else min(most, self._new_tokens)

    def demand(self, name: str, num_tokens: int, new_tokens: float) -> Demand:
        """What a request needs. num_tokens, new_tokens: as Demand has them."""
        return Demand(request_id=name, num_tokens=num_tokens, new_tokens=new_tokens, hit_rate=self._hit_rate)
