"""Averages: the output length and the cache hit rate that a gateway expects, from earlier requests."""

from __future__ import annotations

from quire.fleet.score import Demand

MEMORY = 0.05  # weight of the latest request in the moving averages


class Averages:
    """Moving averages from which a request's Demand is computed."""

    def __init__(self) -> None:
        self._new_tokens = 128.0  # average number of tokens that a request generates
        self._hit_rate = 0.5  # recent share of prompt tokens that were cached

    def ended(self, num_tokens: int) -> None:
        """Record that a sample ended with `num_tokens` tokens."""
        self._new_tokens += MEMORY * (num_tokens - self._new_tokens)

    def began(self, num_cached: int, num_prompt: int) -> None:
        """Record that a replica found `num_cached` tokens of a prompt in its cache."""
        self._hit_rate += MEMORY * (num_cached / max(1, num_prompt) - self._hit_rate)

    def new_tokens(self, most: int | None) -> float:
        """Return the number of tokens that a sample is expected to generate. most: its max_tokens."""
        return self._new_tokens if most is None else min(most, self._new_tokens)

    def demand(self, name: str, num_tokens: int, new_tokens: float) -> Demand:
        """Return the demand of a request. num_tokens, new_tokens: see Demand."""
        return Demand(request_id=name, num_tokens=num_tokens, new_tokens=new_tokens, hit_rate=self._hit_rate)
