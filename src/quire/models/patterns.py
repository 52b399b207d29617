"""Regular expressions from files of strangers, matched in bounded time.

Adapters and checkpoints name modules by regular expressions. For some expressions a matcher that tries one way after
the other tries exponentially many. The package `regex` takes Python's expressions, and a time after which it gives up.
"""

from __future__ import annotations

import time

import regex

from quire.errors import ModelError
from quire.models.hf_config import shown

MOST_SECONDS = 5.0  # for all patterns of a file and all names; those of real files take milliseconds
LONGEST = 2**14  # characters of a pattern


class Patterns:
    """The patterns of one file, which share the time that they may take."""

    def __init__(self, where: str) -> None:
        """where: the file or its part, for errors."""
        self.where = where
        self._left = MOST_SECONDS

    def compiled(self, key: str, text: str, prefix: str = "", suffix: str = "") -> Pattern:
        """Return a pattern between a prefix and a suffix.

        Args:
            key: Where it is in the file.
            text: A regular expression.
            prefix: A regular expression that comes before it.
            suffix: One that comes after it.

        Raises:
            ModelError: It is no regular expression, or too long.
        """
        place = f"{self.where}: {key} has {shown(text)}"
        if len(text) > LONGEST:
            raise ModelError(f"{place}, a pattern of {len(text)} characters; it must have at most {LONGEST}")
        try:
            regex.compile(text)  # "a)|(b" is one only between parentheses
            return Pattern(self, regex.compile(f"{prefix}{text}{suffix}"))
        except (regex.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{place}, which is no pattern: {error}") from error

    def begins(self, compiled: regex.Pattern[str], name: str) -> bool:
        """Return whether a name begins with what a pattern of the file matches.

        Raises ModelError when the patterns of the file have taken too much time.
        """
        start = time.monotonic()
        try:
            found = compiled.match(name, timeout=max(self._left, 1e-6)) is not None
        except TimeoutError:
            raise ModelError(
                f"{self.where}: its patterns take more than {MOST_SECONDS:g} s to match; give names instead"
            ) from None
        self._left -= time.monotonic() - start
        return found


class Pattern:
    """A regular expression of a file."""

    def __init__(self, patterns: Patterns, compiled: regex.Pattern[str]) -> None:
        self._patterns, self._compiled = patterns, compiled

    def begins(self, name: str) -> bool:
        """Return whether a name begins with what the pattern matches, as `re.match` does. Raises ModelError."""
        return self._patterns.begins(self._compiled, name)
