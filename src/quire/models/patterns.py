"""Regular expressions from untrusted files, matched in bounded time.

Adapters and checkpoints name modules by regular expressions. A backtracking matcher takes exponential time for some of
them. The package `regex` accepts Python's expressions and has a timeout. It expands counted repeats when it compiles,
so their number is limited here. It also has additional syntax, so each pattern must compile with `re` first.
"""

from __future__ import annotations

import math
import re
import time

import regex

from quire.errors import ModelError
from quire.models.hf_config import shown

MOST_SECONDS = 5.0  # thread time for all patterns of a file and all names, in addition to FREE_SECONDS per match
FREE_SECONDS = 20e-6  # patterns of real files take a quarter of it
LONGEST = 2**14  # characters of a pattern
MOST_REPEATS = 10_000  # product of all counts of a pattern
COUNT = re.compile(r"\{(\d*),?(\d*)\}")


class Patterns:
    """The patterns of one file, which share one time limit."""

    def __init__(self, where: str) -> None:
        """Start with the full time limit. where: the file or its part, for error messages."""
        self.where = where
        self._left = MOST_SECONDS

    def compiled(self, key: str, text: str, prefix: str = "", suffix: str = "") -> Pattern:
        """Return a pattern between a prefix and a suffix.

        Args:
            key: The key in the file, for error messages.
            text: A regular expression.
            prefix: A regular expression that precedes it.
            suffix: A regular expression that follows it.

        Raises:
            ModelError: If the text is not a regular expression, too long, or has too many counted repeats.
        """
        place = f"{self.where}: {key} has {shown(text)}"
        if len(text) > LONGEST:
            raise ModelError(f"{place}, a pattern of {len(text)} characters; it must have at most {LONGEST}")
        repeats = math.prod(max(1, *(float(n or 1) for n in counts)) for counts in COUNT.findall(text))
        if repeats > MOST_REPEATS:
            raise ModelError(f"{place}, whose counts multiply to {repeats:g}; it must be at most {MOST_REPEATS}")
        try:
            re.compile(text)
            return Pattern(self, regex.compile(f"{prefix}{text}{suffix}"))
        except (re.error, regex.error, OverflowError, RecursionError) as error:
            raise ModelError(f"{place}, which is no pattern: {error}") from error

    def begins(self, compiled: regex.Pattern[str], name: str) -> bool:
        """Return whether a pattern of the file matches the beginning of a name.

        Raises ModelError if the patterns of the file have used up their time.
        """
        start = time.thread_time()
        try:
            found = compiled.match(name, timeout=max(self._left, 1e-6)) is not None
        except (TimeoutError, MemoryError):
            raise ModelError(
                f"{self.where}: its patterns take more than {MOST_SECONDS:g} s to match; give names instead"
            ) from None
        self._left -= max(0.0, time.thread_time() - start - FREE_SECONDS)
        return found


class Pattern:
    """A regular expression of a file."""

    def __init__(self, patterns: Patterns, compiled: regex.Pattern[str]) -> None:
        self._patterns, self._compiled = patterns, compiled

    def begins(self, name: str) -> bool:
        """Return whether the pattern matches the beginning of a name, as `re.match` does. Raises ModelError."""
        return self._patterns.begins(self._compiled, name)
