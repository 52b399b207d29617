"""AnswerParser: splits a model's growing text into reasoning, content and tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import NamedTuple

from quire.server.tools.reader import Ends, Reader, Wait, as_json, drop, markers
from quire.server.tools.values import Schema, dumps, escaped, is_text


class Kind(Enum):
    """The kind of a piece of an answer."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"  # a call begins; the text is the function's name
    ARGUMENTS = "arguments"  # of the last call, as JSON


class Piece(NamedTuple):
    """A part of an answer."""

    kind: Kind
    text: str


class Writer:
    """The input and output of a family's syntax.

    White space around reasoning, and between calls and the beginning or end of an answer's text, belongs to the syntax;
    between two parts of the text it belongs to the text. So it is held until text of its kind follows.
    """

    def __init__(self, functions: Mapping[str, Schema]) -> None:
        """Create it. functions: the parameters of each function that may be called."""
        self.reader = Reader()
        self.functions = functions
        self.pieces: list[Piece] = []
        self._space: dict[Kind, str] = {}  # held, by the kind of text that it belongs to
        self._written: set[Kind] = set()  # kinds of pieces
        self._last: Kind | None = None  # of pieces

    def say(self, text: str) -> None:
        """Add to the answer's text."""
        self._text(Kind.CONTENT, text)

    def think(self, text: str) -> None:
        """Add to the reasoning."""
        self._text(Kind.REASONING, text)

    def call(self, name: str) -> None:
        """Begin a call."""
        self._write(Kind.CALL, name)

    def argue(self, text: str) -> None:
        """Add to the JSON of the last call's arguments."""
        if text:
            self.pieces.append(Piece(Kind.ARGUMENTS, text))

    def finish(self) -> None:
        """Finish the answer: white space at its end belongs to its text."""
        space = self._space.pop(Kind.CONTENT, "")
        if space and self._last in (None, Kind.CONTENT):
            self.pieces.append(Piece(Kind.CONTENT, space))

    def _text(self, kind: Kind, text: str) -> None:
        whole = self._space.get(kind, "") + text
        shown = whole.rstrip()
        self._space[kind] = whole[len(shown) :]
        if not shown:
            return
        if kind not in self._written and (self._written or kind is Kind.REASONING):
            shown = shown.lstrip()
        self._write(kind, shown)

    def _write(self, kind: Kind, text: str) -> None:
        self._written.add(kind)
        self._last = kind
        self.pieces.append(Piece(kind, text))

    # ------------------------------------------------------------------------------------------------- JSON

    def json_call(self, names: Collection[str] | None = None) -> Wait[bool]:
        """Read {"name": …, "arguments": {…}}. Return False, and write nothing, if it is not a call.

        names: the accepted functions, if other text may look like a call; then the name must come first.
        """
        reader = self.reader
        if not (yield from reader.match("{")):
            return False
        name, arguments = None, None
        while True:
            yield from reader.space()
            if (key := (yield from reader.json_string())) is None:
                break
            yield from reader.space()
            if not (yield from reader.match(":")):
                break
            yield from reader.space()
            if key == "name" and name is None:
                name = yield from reader.json_string()
                if not name or (names is not None and name not in names):
                    return False
                self.call(name)
                if arguments is not None:
                    self.argue(arguments)
            elif key in ("arguments", "parameters") and arguments is None and (names is None or name is not None):
                arguments = yield from self._json_arguments(is_shown=name is not None)
            elif names is not None and name is None:
                if key != "type" or (yield from reader.json_string()) is None:
                    return False
            else:
                yield from reader.json_value(drop)
            yield from reader.space()
            if not (yield from reader.match(",")):
                break
        if name is None:
            return False
        if arguments is None and (yield from reader.peek()):
            self.argue("{}")
        yield from reader.match("}")
        return True

    def _json_arguments(self, *, is_shown: bool) -> Wait[str]:
        """Read and return the arguments' JSON, and write it at once if `is_shown`."""
        parts: list[str] = []
        if (yield from self.reader.peek()) in ("{", "["):
            yield from self.reader.json_value(self.argue if is_shown else parts.append)
            return "".join(parts)
        yield from self.reader.json_value(parts.append)
        raw = "".join(parts)
        try:
            inner = json.loads(raw, strict=False)
        except ValueError:
            inner = None
        if isinstance(inner, str) and inner.lstrip().startswith("{"):  # JSON within a JSON string
            raw = as_json(inner.lstrip())
        elif raw == "null":  # means no arguments
            raw = "{}"
        if is_shown:
            self.argue(raw)
        return raw

    # ------------------------------------------------------------------------------------------------- by name

    def text_argument(self, name: str, key: str, ends: Ends, convert: Callable[[str], str]) -> Wait[str]:
        """Write one argument up to an end, and return that end. See `Reader.until_end`.

        Strings are written while they grow, other values when they are complete; `convert` makes JSON of those.
        """
        parameters = self.functions.get(name, {})
        if is_text(parameters, key):
            self.argue('"')
            end = yield from self.reader.until_end(ends, lambda text: self.argue(escaped(text)))
            if end:
                self.argue('"')
            return end
        parts: list[str] = []
        end = yield from self.reader.until_end(ends, parts.append)
        if end:
            self.argue(convert("".join(parts)))
        return end

    def key(self, key: str, *, is_first: bool) -> None:
        """Write the beginning of an argument."""
        self.argue(("{" if is_first else ", ") + dumps(key) + ": ")


class AnswerParser:
    """Reads one answer."""

    def __init__(self, writer: Writer, run: Wait[None], hidden: tuple[str, ...] = ()) -> None:
        """Create it. run: parses the writer's reader. hidden: texts of special tokens to leave out."""
        self._writer = writer
        self._run = run
        self._hidden = markers(hidden) if hidden else None
        self._held = ""  # may be the beginning of a hidden text
        self._go_on()

    def feed(self, text: str) -> list[Piece]:
        """Parse a text, and return the pieces that are certain now."""
        self._writer.reader.add(self._shown(text))
        self._go_on()
        return self._taken()

    def finish(self) -> list[Piece]:
        """End the text, and return the remaining pieces."""
        if self._held:
            self._writer.reader.add(self._held)
            self._held = ""
        self._writer.reader.end()
        self._go_on()
        self._writer.finish()
        return self._taken()

    def _go_on(self) -> None:
        next(self._run, None)

    def _shown(self, text: str) -> str:
        """Return the text without hidden texts, and hold back an end that may begin one."""
        if self._hidden is None:
            return text
        text, at, parts = self._held + text, 0, []
        while (found := self._hidden.find(text, at)) is not None:
            parts.append(text[at : found.start()])
            at = found.end()
        end = self._hidden.certain(text, at)
        self._held = text[end:]
        return "".join([*parts, text[at:end]])

    def _taken(self) -> list[Piece]:
        """Return the new pieces, and merge consecutive ones of the same kind."""
        found: list[Piece] = []
        for kind, text in self._writer.pieces:
            if found and found[-1].kind is kind is not Kind.CALL:
                found[-1] = Piece(kind, found[-1].text + text)
            else:
                found.append(Piece(kind, text))
        self._writer.pieces.clear()
        return found


class Call(NamedTuple):
    """A function call."""

    name: str
    arguments: str  # JSON, or empty if the model has written none


class Answer(NamedTuple):
    """A complete answer."""

    reasoning: str
    content: str
    calls: list[Call]


def gathered(pieces: list[Piece]) -> Answer:
    """Assemble an answer from its pieces."""
    reasoning, content, calls = "", "", list[Call]()
    for kind, text in pieces:
        if kind is Kind.REASONING:
            reasoning += text
        elif kind is Kind.CONTENT:
            content += text
        elif kind is Kind.CALL:
            calls.append(Call(text, ""))
        else:
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
    return Answer(reasoning, content, calls)
