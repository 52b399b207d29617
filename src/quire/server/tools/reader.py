"""Reader: a text that comes in pieces, read as if all of it were there.

A parser is a generator that reads with `yield from`. Where the text so far does not decide, it waits for more. No
decision depends on where a piece ends, so any split of a text is read alike.
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
Take = Callable[[str], None]  # is given a text in pieces
Ends = Mapping[str, "tuple[str, ...] | Ends"]  # of a value, as `Reader.until_end` reads them

WORD = re.compile(r"[\w.-]*")
MAX_WORD = 256  # characters of a function's name or an argument's
ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{4}')  # what may follow a backslash in a JSON string


def drop(_: str) -> None:
    """Take a text that says nothing."""


class Markers:
    """Texts to look for, none of which is the beginning of another one."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._beginnings = {text[:size] for text in texts for size in range(1, len(text))}
        self._longest = max(map(len, texts), default=1) - 1

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first of them in a text from a place on."""
        return self._pattern.search(text, at)

    def certain(self, text: str, at: int) -> int:
        """Where the end of a text, which has none of them from `at` on, may be the beginning of one."""
        first = max(at, len(text) - self._longest)
        return next((i for i in range(first, len(text)) if text[i:] in self._beginnings), len(text))


markers = lru_cache(maxsize=256)(Markers)


class Reader:
    """The text, as far as it has come."""

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
        """No piece comes any more."""
        self._has_ended = True

    def mark(self, back: int = 0) -> None:
        """Remember this place, or one that many characters back, which were read last."""
        self._mark = self._at - back

    def unmark(self) -> str:
        """What was read since the marked place."""
        text = self._text[self._mark : self._at]
        self._mark = None
        return text

    def rewind(self, text: str) -> None:
        """Read a text again, which was read last."""
        self._at -= len(text)

    # ------------------------------------------------------------------------------------------------- reading

    def peek(self, size: int = 1) -> Wait[str]:
        """The next characters, which are not read yet; fewer at the end."""
        while len(self._text) - self._at < size and not self._has_ended:
            yield
        return self._text[self._at : self._at + size]

    def space(self) -> Wait[None]:
        """Read white space."""
        while (letter := (yield from self.peek())) and letter.isspace():
            self._at += 1

    def blanks(self) -> Wait[None]:
        """Read the blanks of a line."""
        while (yield from self.peek()) in (" ", "\t"):
            self._at += 1

    def match(self, text: str) -> Wait[bool]:
        """Whether this text comes next; it is read then."""
        found = yield from self.comes(text)
        self._at += len(text) if found else 0
        return found

    def comes(self, text: str) -> Wait[bool]:
        """Return whether this text comes next; it is not read."""
        for size in range(1, len(text) + 1):  # not all at once: what differs early needs no more text
            if (yield from self.peek(size)) != text[:size]:
                return False
        return True

    def word(self) -> Wait[str]:
        """A name, which may be empty."""
        found = ""
        while (letter := (yield from self.peek())) and WORD.fullmatch(letter) and len(found) < MAX_WORD:
            found += letter
            self._at += 1
        return found

    def scalar(self, ends: str) -> Wait[str]:
        """What comes before one of these letters."""
        found = ""
        while (letter := (yield from self.peek())) and letter not in ends:
            found += letter
            self._at += 1
        return found

    def until(self, texts: tuple[str, ...], take: Take) -> Wait[str]:
        """Give away what comes before the first of these texts, which is read too; empty: the end came first."""
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
        """What comes before the first of these texts, and which one it is, as for `until`."""
        parts: list[str] = []
        end = yield from self.until(texts, parts.append)
        return "".join(parts), end

    def until_end(self, ends: Ends, take: Take) -> Wait[str]:
        """As `until`, but an end counts only where one of its followers comes next, or nothing does.

        White space and commas before a follower are skipped; the follower is not read. An end without a follower is a
        part of the value, as in a document with the same tags. So is a text that maps to other ends, which hold from
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
        """A JSON string's text; None where there is none, of which nothing is read."""
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
        """Give away one JSON value as it is written. Only brackets and quotes are looked at.

        A letter of a string that JSON wants escaped is escaped: models write texts with line breaks, and backslashes
        that escape nothing.
        """
        depth, is_quoted, is_escaped = 0, False, False
        while True:
            text, start = self._text, self._at
            end = len(text)
            for at in range(start, end):
                letter = text[at]
                if is_quoted:
                    if is_escaped and letter == "u" and end - at < 5 and not self._has_ended:
                        end = at  # the digits are to come
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
                        return self._give(at + depth, take)  # one that closes nothing is not the value's
                    depth -= 1
                elif depth == 0 and (letter in ",;<" or letter.isspace()):
                    return self._give(at, take)
            self._give(end, take)
            if self._has_ended:
                return None
            yield

    def python_value(self) -> Wait[str]:
        """A value as Python writes it, up to a comma or bracket that is not its own."""
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
        """The rest of a Python string, its quote included."""
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
    """The JSON value that a whole text begins with, as `Reader.json_value` gives it."""
    reader = Reader()
    reader.add(text)
    reader.end()
    parts: list[str] = []
    for _ in reader.json_value(parts.append):
        pass
    return "".join(parts)
