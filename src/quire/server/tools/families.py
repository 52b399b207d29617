"""Parsers for the call syntax of each family of models.

Each syntax is a generator that reads an answer's text after its reasoning, from a Writer's reader, and writes pieces.
Text that looks like the beginning of a call but is not one stays text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.server.tools.parser import Writer
from quire.server.tools.reader import Ends, Take, Wait, drop
from quire.server.tools.values import escaped, json_of_literal, json_of_text

Read = Callable[[Writer], Wait[None]]
MAX_DEPTH = 100  # of nested values that are parsed recursively
HEADER = re.compile(r"to=(?:functions\.)?([\w.-]+)")  # of a harmony message to a function


# ------------------------------------------------------------------------------------------------- calls as JSON


def json_between(brackets: Mapping[str, tuple[str, ...]]) -> Read:
    """Return a parser for JSON objects, or an array of them, between a begin text and one of its end texts, if any."""
    begins = tuple(brackets)

    def read(to: Writer) -> Wait[None]:
        reader = to.reader
        begin = yield from reader.until(begins, to.say)
        while begin:
            reader.mark(len(begin))
            yield from reader.space()
            yield from reader.match("[")
            yield from reader.space()
            if not (yield from to.json_call()):
                to.say(reader.unmark())
                begin = yield from reader.until(begins, to.say)
                continue
            reader.unmark()
            while (yield from _another(to)):
                pass
            if ends := brackets[begin]:
                begin = yield from reader.until((*ends, *begins), drop)
                begin = begin if begin in begins else (yield from reader.until(begins, to.say))
            else:
                begin = yield from reader.until(begins, to.say)

    return read


def _another(to: Writer) -> Wait[bool]:
    """Read one more object of a list, or the list's end. Read nothing if neither comes next."""
    reader = to.reader
    reader.mark()
    yield from reader.space()
    if (yield from reader.match("]")):
        reader.unmark()
        return False
    yield from reader.match(",")
    yield from reader.space()
    is_call = yield from to.json_call()
    raw = reader.unmark()
    if not is_call:
        reader.rewind(raw)
    return is_call


def _skip(to: Writer, text: str) -> Wait[None]:
    """Read white space and a text if they come next, else nothing."""
    reader = to.reader
    reader.mark()
    yield from reader.space()
    found = yield from reader.match(text)
    raw = reader.unmark()
    if not found:
        reader.rewind(raw)


def json_anywhere(to: Writer) -> Wait[None]:
    """Parse Llama 3's calls: objects that name a function of the request, with semicolons between them."""
    reader = to.reader
    while found := (yield from reader.until(("<|python_tag|>", "{"), to.say)):
        if found != "{":
            continue
        reader.rewind(found)
        reader.mark()
        if (yield from to.json_call(to.functions)):
            reader.unmark()
            yield from _skip(to, ";")
        else:
            raw = reader.unmark()
            reader.rewind(raw[1:])
            to.say(raw[:1])


# ------------------------------------------------------------------------------------- a name, then JSON


def mistral(to: Writer) -> Wait[None]:
    """Parse Mistral's calls: [TOOL_CALLS] with an array of objects, or with a name, [ARGS] and an object."""
    reader = to.reader
    begin = ("[TOOL_CALLS]",)
    found = yield from reader.until(begin, to.say)
    while found:
        reader.mark(len(found))
        yield from reader.space()
        if (yield from reader.match("[")):
            yield from reader.space()
            is_call = yield from to.json_call()
            while is_call and (yield from _another(to)):
                pass
        else:
            is_call = bool(name := (yield from reader.word()))
            if is_call:
                if (yield from reader.match("[CALL_ID]")):
                    yield from reader.word()
                is_call = (yield from reader.match("[ARGS]")) or (yield from reader.peek()) == "{"
            if is_call:
                to.call(name)
                yield from reader.space()
                yield from reader.json_value(to.argue)
        raw = reader.unmark()
        if not is_call:
            to.say(raw)
        found = yield from reader.until(begin, to.say)


def deepseek(to: Writer) -> Wait[None]:
    """Parse DeepSeek's calls: in V3.1 a name and JSON, in V3 the word function, a name and a block of JSON."""
    reader = to.reader
    begins = ("<｜tool▁call▁begin｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    while begin := (yield from reader.until(begins, to.say)):
        if begin != begins[0]:
            continue
        reader.mark(len(begin))
        name, separator = yield from reader.collect(("<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))
        if separator != "<｜tool▁sep｜>":
            to.say(reader.unmark())
            continue
        name = name.strip()
        if name == "function":  # the type in V3, or a function's name
            yield from reader.space()
            if (yield from reader.peek()) != "{":
                name = yield from reader.word()
                name = name if (yield from reader.peek()) else ""  # at the end of the text it may be half a name
        raw = reader.unmark()
        if not name:
            to.say(raw)
            continue
        to.call(name)
        yield from reader.space()
        yield from reader.match("```json")
        yield from reader.space()
        yield from reader.json_value(to.argue)
        yield from reader.until(("<｜tool▁call▁end｜>",), drop)


def harmony(to: Writer) -> Wait[None]:
    """Parse gpt-oss's messages: reasoning on the channel analysis, calls to a function, all others are content."""
    reader = to.reader
    begun: set[Take] = set()
    while True:
        header, end = yield from reader.collect(("<|message|>",))
        if not end:
            if not header.lstrip().startswith(("<|", "assistant")):
                to.say(header)
            return
        ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
        recipient = HEADER.search(header)
        if recipient is not None:
            to.call(recipient[1])
            yield from reader.space()
            yield from reader.json_value(to.argue)
            yield from reader.until(ends, drop)
        else:
            take = to.think if "analysis" in header else to.say
            if take in begun:
                take("\n")
            begun.add(take)
            yield from reader.until(ends, take)


# ------------------------------------------------------------------------------------- arguments by name


def xml(wrapper: tuple[str, str]) -> Read:
    """Return a parser for <function=name> with a <parameter=key> for each argument: Qwen3-Coder, Qwen3.5, Seed-OSS."""
    opening, closing = wrapper

    def read(to: Writer) -> Wait[None]:
        reader = to.reader
        while begin := (yield from reader.until((opening, "<function="), to.say)):
            reader.mark(len(begin))
            if begin == opening:
                yield from reader.space()
                if not (yield from reader.match("<function=")):
                    to.say(reader.unmark())
                    continue
            name, end = yield from reader.collect((">", "\n"))
            raw = reader.unmark()
            if end != ">" or not name.strip():
                to.say(raw)
                continue
            after = (closing, opening, "<function=") if begin == opening else ("",)
            if (yield from _xml_call(to, name.strip().strip('"'), wrapper, after)) != closing:
                yield from _skip(to, closing)

    return read


def _xml_call(to: Writer, name: str, wrapper: tuple[str, str], after: tuple[str, ...]) -> Wait[str]:
    """Read the rest of a call. Return the text that ended it, or "" if it is cut off. Do not read the next call.

    after: the texts that must follow </function> for it to end a value without an end tag.
    """
    reader = to.reader
    opening, closing = wrapper
    to.call(name)
    is_first = True
    begins = ("<parameter=", "</function>", closing, opening, "<function=")
    strict: Ends = {"\n</parameter>": begins, "</parameter>": begins, "\n</function>": after}
    lax = (*begins, "<parameter", "</parameter>")  # replaced by `strict` after such a tag within the value
    ends: Ends = {**strict, "\n</parameter>": lax, "</parameter>": lax, "<parameter": strict}
    found = yield from reader.until(begins, drop)
    while found == "<parameter=":
        key, end = yield from reader.collect((">",))
        if not end:
            return ""
        to.key(key.strip().strip('"'), is_first=is_first)
        is_first = False
        yield from reader.match("\n")

        def convert(text: str, key: str = key.strip().strip('"')) -> str:
            return json_of_text(text, to.functions.get(name, {}), key)

        found = yield from to.text_argument(name, key.strip().strip('"'), ends, convert)
        if found and not found.endswith("</function>"):
            found = yield from reader.until(begins, drop)
    if found:  # not if the call is cut off: half an argument must not look complete
        to.argue("{}" if is_first else "}")
    if found in (opening, "<function="):
        reader.rewind(found)
    return found


def glm(to: Writer) -> Wait[None]:
    """Parse GLM's calls: <tool_call>name with an <arg_key> and an <arg_value> for each argument."""
    reader = to.reader
    begin = ("<tool_call>",)
    while (yield from reader.until(begin, to.say)):
        reader.mark(len(begin[0]))
        yield from reader.space()
        name = yield from reader.word()
        yield from reader.blanks()
        raw = reader.unmark()
        if not name or (yield from reader.peek()) not in ("\n", "<"):
            to.say(raw)
            continue
        to.call(name)
        is_first = True
        nexts = ("<arg_key>", "</tool_call>", *begin)
        while (found := (yield from reader.until(nexts, drop))) == "<arg_key>":
            key, _ = yield from reader.collect(("</arg_key>",))
            if not (yield from reader.until(("<arg_value>",), drop)):
                return
            to.key(key.strip(), is_first=is_first)
            is_first = False

            def convert(text: str, key: str = key.strip(), name: str = name) -> str:
                return json_of_text(text, to.functions.get(name, {}), key)

            yield from to.text_argument(name, key.strip(), {"</arg_value>": nexts}, convert)
        if found:
            to.argue("{}" if is_first else "}")
        if found in begin:
            reader.rewind(found)


def pythonic(brackets: Mapping[str, str]) -> Read:
    """Return a parser for calls in Python's syntax, between the family's brackets or in a list that begins the text."""
    begins = tuple(brackets)

    def read(to: Writer) -> Wait[None]:
        reader = to.reader
        reader.mark()
        yield from reader.space()
        if (yield from reader.match("[")) and (yield from _python_calls(to, to.functions)):
            yield from _skip(to, "]")
        else:
            reader.rewind(reader.unmark())
        while begin := (yield from reader.until(begins, to.say)):
            reader.mark(len(begin))
            yield from reader.space()
            yield from reader.match("[")
            if (yield from _python_calls(to, None)):
                yield from reader.until((brackets[begin],), drop)
            else:
                to.say(reader.unmark())

    return read


def _python_calls(to: Writer, names: Mapping[str, Any] | None) -> Wait[bool]:
    """Read calls separated by commas or lines, but nothing after the last. Return False if the first is not a call."""
    reader = to.reader
    has_any = False
    while True:
        yield from reader.space()
        name = yield from reader.word()
        if not name or (names is not None and name not in names) or not (yield from reader.match("(")):
            if has_any:
                reader.rewind(reader.unmark())
            return has_any
        has_any = True
        to.call(name)
        yield from _python_arguments(to, name)
        yield from _skip(to, ",")
        reader.mark()


def _python_arguments(to: Writer, name: str) -> Wait[None]:
    reader = to.reader
    known = list(to.functions.get(name, {}).get("properties") or {})
    count = 0
    while True:
        yield from reader.space()
        if (yield from reader.match(")")):
            to.argue("}" if count else "{}")
            return
        reader.mark()
        key = yield from reader.word()
        yield from reader.space()
        if key and (yield from reader.match("=")):
            reader.unmark()
        else:  # a positional argument
            reader.rewind(reader.unmark())
            key = known[count] if count < len(known) else f"argument_{count}"
        yield from reader.space()
        value = yield from reader.python_value()
        if not (end := (yield from reader.peek())):
            return
        to.key(key, is_first=count == 0)
        to.argue(json_of_literal(value))
        count += 1
        if end != ")":
            yield from reader.match(end)


def gemma(begin: str, end: str, quote: str) -> Read:
    """Return a parser for call:name{key:value} with dedicated tokens around strings: Gemma 4 and FunctionGemma."""

    def read(to: Writer) -> Wait[None]:
        reader = to.reader
        while (yield from reader.until((begin,), to.say)):
            reader.mark(len(begin))
            yield from reader.match("call:")
            name = yield from reader.word()
            is_call = bool(name) and (yield from reader.match("{"))
            raw = reader.unmark()
            if not is_call:
                to.say(raw)
                continue
            to.call(name)
            yield from members(to, 1)
            yield from reader.until((end,), drop)

    def members(to: Writer, depth: int) -> Wait[bool]:
        """Read the rest of an object. Return False if it is cut off."""
        reader = to.reader
        is_first = True
        while True:
            yield from reader.space()
            if (yield from reader.match("}")):
                to.argue("{}" if is_first else "}")
                return True
            if (yield from reader.match(quote)):
                key, _ = yield from reader.collect((quote,))
                yield from reader.until((":",), drop)
            else:
                key, _ = yield from reader.collect((":",))
            if not (yield from reader.peek()):
                return False
            to.key(key.strip(), is_first=is_first)
            is_first = False
            if not (yield from value(to, depth)):
                return False
            yield from reader.space()
            yield from reader.match(",")

    def value(to: Writer, depth: int) -> Wait[bool]:
        reader = to.reader
        yield from reader.space()
        if (yield from reader.match(quote)):
            to.argue('"')
            if not (yield from reader.until((quote,), lambda text: to.argue(escaped(text)))):
                return False
            to.argue('"')
        elif depth < MAX_DEPTH and (yield from reader.match("{")):
            return (yield from members(to, depth + 1))
        elif depth < MAX_DEPTH and (yield from reader.match("[")):
            return (yield from items(to, depth + 1))
        else:
            text = yield from reader.scalar(",}]")
            if not (yield from reader.peek()):
                return False
            to.argue(json_of_literal(text.strip()))
        return True

    def items(to: Writer, depth: int) -> Wait[bool]:
        reader = to.reader
        is_first = True
        while True:
            yield from reader.space()
            if (yield from reader.match("]")) or (yield from reader.peek()) in ("}", ""):
                to.argue("[]" if is_first else "]")
                return True
            to.argue("[" if is_first else ", ")
            is_first = False
            if not (yield from value(to, depth)):
                return False
            yield from reader.space()
            yield from reader.match(",")

    return read


def plain(to: Writer) -> Wait[None]:
    """Read a text without calls."""
    yield from to.reader.until((), to.say)
