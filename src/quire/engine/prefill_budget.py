"""Pace: the number of tokens that a step may compute while other sequences wait for their next token."""

from __future__ import annotations

LONGEST_STEP = 0.5  # seconds, roughly: a longer step looks like a pause to a reader
LEAST = 64  # prompt tokens; below, reading the weights takes most of a step
WEIGHT = 0.25  # of the newest step


class PrefillBudget:
    """Bounds the steps that compute prompts while sequences decode, from the durations of earlier steps.

    It affects only how prompts are chunked, and with a reproducible backend that changes no answer.
    """

    def __init__(self, seconds_a_token: float) -> None:
        """seconds_a_token: duration of a prompt token, as estimated before the first prompt was computed."""
        self._seconds_a_token = seconds_a_token
        self._is_measured = False

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record that a step of `num_tokens` tokens took `seconds`.

        All of the time counts as the tokens', because whole steps are bounded.
        """
        if num_tokens < LEAST:
            return
        found = seconds / num_tokens
        weight = WEIGHT if self._is_measured else 1.0
        self._seconds_a_token += (found - self._seconds_a_token) * weight
        self._is_measured = True

    def most(self, num_decoding: int) -> int:
        """Return the token limit of a step in which `num_decoding` sequences decode."""
        return max(int(LONGEST_STEP / max(self._seconds_a_token, 1e-9)), num_decoding + LEAST)
