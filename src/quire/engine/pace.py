"""Pace: how many tokens a step may compute while other sequences wait for their next one."""

from __future__ import annotations

LONGEST_STEP = 0.5  # seconds, about: a longer one looks like a pause to a reader
LEAST = 64  # tokens of prompts; below, reading the weights takes most of a step
WEIGHT = 0.25  # of the newest step


class Pace:
    """Bounds the steps that compute prompts while sequences decode, by what steps took.

    Only how prompts are cut depends on it, and with a reproducible backend no answer does.
    """

    def __init__(self, seconds_a_token: float) -> None:
        """seconds_a_token: of a prompt, as far as that is known before the first one."""
        self._seconds_a_token = seconds_a_token
        self._is_measured = False

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long. All of that counts as theirs: it is whole steps that are bounded."""
        if num_tokens < LEAST:
            return
        found = seconds / num_tokens
        weight = WEIGHT if self._is_measured else 1.0
        self._seconds_a_token += (found - self._seconds_a_token) * weight
        self._is_measured = True

    def most(self, num_decoding: int) -> int:
        """Tokens of a step in which so many sequences decode."""
        return max(int(LONGEST_STEP / max(self._seconds_a_token, 1e-9)), num_decoding + LEAST)
