"""Reader: a text that arrives in pieces, parsed as if it were complete.

A parser is a generator that reads with `yield from`. If the text so far is ambiguous, it waits for more. No decision
depends on where a piece ends, so every split of a text gives the same result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from typing import TypeVar

from quire.server.tools.values import escaped

T = TypeVar("T")
Wait = Generator[None, None, T]  # yields while it needs more text
Take = Callable[[str], None]  # is called with the pieces of a text
Ends = Mapping[str, "tuple[str, ...] | Ends"]  # end texts of a value; see `Reader.until_end`

WORD = re.compile(r"[\w.-]*")
MAX_WORD = 256  # characters of the name of a function or an argument
ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{4}')  # valid characters after a backslash in a JSON string


def drop(_: str) -> None:
    """Ignore a text."""


class Markers:
    """Texts to search for. None is the beginning of another one."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=1) - 1

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """Return the match of the first of them in a text, from a position on."""
        return self._pattern.search(text, at)

    def certain(self, text: str, at: int) -> int:
        """Return the position from which the text's end may be the beginning of one, given that none is after `at`."""
        first = max(at, len(text) - self._longest)
        return next((i for i in range(first, len(text)) if text[i:] in self._beginnings), len(text))


markers = lru_cache(maxsize=256)(Markers)


class Reader:
    """The text so far, and the position in it."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark: int | None = None
        self._has_ended = False

    def add(self, text: str) -> None:
        """Add a piece."""
        start = self._at if self._mark is None else self._mark
        self._text = self._text[start:] + text
        self._at -= start
        self._mark = None if self._mark is None else 0

    def end(self) -> None:
        """Mark the text as complete."""
        self._has_ended = True

    def mark(self, back: int = 0) -> None:
        """Mark the current position, or the one `back` characters earlier."""
        self._mark = self._at - back

    def unmark(self) -> str:
        """Return the text since the marked position, and remove the mark."""
        text = self._text[self._mark : self._at]
        self._mark = None
        return text

    def rewind(self, text: str) -> None:
        """Move back by a text that was read last."""
        self._at -= len(text)

    # ------------------------------------------------------------------------------------------------- reading

    def peek(self, size: int = 1) -> Wait[str]:
        """Return the next characters without reading them; fewer at the end."""
        while len(self._text) - self._at < size and not self._has_ended:
            yield
        return self._text[self._at : self._at + size]

    def space(self) -> Wait[None]:
        """Read white space."""
        while (letter := (yield from self.peek())) and letter.isspace():
            self._at += 1

    def blanks(self) -> Wait[None]:
        """Read blanks and tabs."""
        while (yield from self.peek()) in (" ", "\t"):
            self._at += 1

    def match(self, text: str) -> Wait[bool]:
        """Read this text if it comes next. Return whether it does."""
        found = yield from self.comes(text)
        self._at += len(text) if found else 0
        return found

    def comes(self, text: str) -> Wait[bool]:
        """Return whether this text comes next, without reading it."""
        for size in range(1, len(text) + 1):  # step by step: an early difference needs no more text
            if (yield from self.peek(size)) != text[:size]:
                return False
        return True

    def word(self) -> Wait[str]:
        """Read a name, which may be empty."""
        found = ""
        while (letter := (yield from self.peek())) and WORD.fullmatch(letter) and len(found) < MAX_WORD:
            found += letter
            self._at += 1
        return found

    def scalar(self, ends: str) -> Wait[str]:
        """Read the text before one of these characters."""
        found = ""
        while (letter := (yield from self.peek())) and letter not in ends:
            found += letter
            self._at += 1
        return found

    def until(self, texts: tuple[str, ...], take: Take) -> Wait[str]:
        """Pass on the text before the first of these, and read that one too. Return it, or "" if none comes."""
        sought = markers(texts)
        while True:
            if (found := sought.find(self._text, self._at)) is not None:
                self._give(found.start(), take)
                self._at = found.end()
                return found[0]
            self._give(len(self._text) if self._has_ended else sought.certain(self._text, self._at), take)
            if self._has_ended:
                return ""
            yield

    def collect(self, texts: tuple[str, ...]) -> Wait[tuple[str, str]]:
        """Return the text before the first of these, and that one, as `until` does."""
        parts: list[str] = []
        end = yield from self.until(texts, parts.append)
        return "".join(parts), end

    def until_end(self, ends: Ends, take: Take) -> Wait[str]:
        """Read like `until`, but accept an end only if one of its followers, or nothing, comes next.

        White space and commas before a follower are skipped; the follower is not read. An end without a follower is
        part of the value, as in a document with the same tags. So is a text that maps to other ends, which apply from
        there on.
        """
        while end := (yield from self.until(tuple(ends), take)):
            followers = ends[end]
            if isinstance(followers, Mapping):
                ends = followers
                take(end)
                continue
            self.mark()
            while (letter := (yield from self.peek())) and (letter.isspace() or letter == ","):
                self._at += 1
            is_end = not letter
            for follower in followers:
                is_end = is_end or (yield from self.comes(follower))
            self.rewind(self.unmark())
            if is_end:
                return end
            take(end)
        return ""

    def json_string(self) -> Wait[str | None]:
        """Read a JSON string, and return its text. Return None, and read nothing, if none comes next."""
        if (yield from self.peek()) != '"':
            return None
        parts: list[str] = []
        yield from self.json_value(parts.append)
        try:
            text = json.loads("".join(parts), strict=False)
        except ValueError:
            return None
        return str(text)

    def json_value(self, take: Take) -> Wait[None]:
        """Pass on one JSON value unchanged. Only brackets and quotes are examined.

        Characters of a string that JSON requires to be escaped are escaped: models write texts with line breaks and
        with backslashes that escape nothing.
        """
        depth, is_quoted, is_escaped = 0, False, False
        while True:
            text, start = self._text, self._at
            end = len(text)
            for at in range(start, end):
                letter = text[at]
                if is_quoted:
                    if is_escaped and letter == "u" and end - at < 5 and not self._has_ended:
                        end = at  # wait for the digits
                        break
                    if is_escaped and not ESCAPE.match(text, at):
                        self._give(at, take)
                        take("\\")
                    if letter < " ":
                        self._give(at, take)
                        self._at += 1
                        take(escaped(letter))
                    if is_escaped:
                        is_escaped = False
                    elif letter == "\\":
                        is_escaped = True
                    elif letter == '"':
                        is_quoted = False
                        if depth == 0:
                            return self._give(at + 1, take)
                elif letter == '"':
                    is_quoted = True
                elif letter in "{[":
                    depth += 1
                elif letter in "}]":
                    if depth <= 1:
                        return self._give(at + depth, take)  # an unmatched bracket does not belong to the value
                    depth -= 1
                elif depth == 0 and (letter in ",;<" or letter.isspace()):
                    return self._give(at, take)
            self._give(end, take)
            if self._has_ended:
                return None
            yield

    def python_value(self) -> Wait[str]:
        """Read a value in Python's syntax, up to a comma or bracket that does not belong to it."""
        parts: list[str] = []
        depth = 0
        while letter := (yield from self.peek()):
            if letter in "'\"":
                triple = letter * 3
                quote = triple if (yield from self.match(triple)) else letter
                if quote == letter:
                    self._at += 1
                parts.append(quote + (yield from self._quoted(quote)))
                continue
            if depth == 0 and letter in ",)]}":
                break
            depth += (letter in "([{") - (letter in ")]}")
            parts.append(letter)
            self._at += 1
        return "".join(parts).strip()

    def _quoted(self, quote: str) -> Wait[str]:
        """Read the rest of a Python string, including its closing quote."""
        parts: list[str] = []
        while letter := (yield from self.peek()):
            if letter == "\\":
                parts.append((yield from self.peek(2)))
                self._at += len(parts[-1])
            elif (yield from self.match(quote)):
                parts.append(quote)
                break
            else:
                parts.append(letter)
                self._at += 1
        return "".join(parts)

    def _give(self, end: int, take: Take) -> None:
        if end > self._at:
            take(self._text[self._at : end])
            self._at = end


def as_json(text: str) -> str:
    """Return the JSON value at the beginning of a complete text, as `Reader.json_value` passes it on."""
    reader = Reader()
    reader.add(text)
    reader.end()
    parts: list[str] = []
    for _ in reader.json_value(parts.append):
        pass
    return "".join(parts)
