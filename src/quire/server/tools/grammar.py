"""Grammars of calls: they guarantee that a call names a function of the request and has its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.server.tools.dialect import ANALYSIS, Dialect, Layout
from quire.server.tools.values import Schema, referred

MAX_DEPTH = 32  # of nested objects, if their syntax is not JSON
PLAIN = {"type", "properties", "required", "description", "title", "$defs", "definitions", "$schema"}
MAX_RULES = 4096
ANY = r"/(?s:.*)/"
# Python arguments up to the closing bracket: anything but brackets and quotes, and quoted strings.
PYTHON = r"""/([^()"'\\]|"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*')*/"""
# As in quire.sandbox.grammar: a model that may write white space anywhere can do so without end.
SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
# Fields that may be in the schema of a string without restricting its text.
NOTES = {"type", "description", "title", "default", "examples", "enum", "const", "$defs", "definitions", "nullable"}


class Function(NamedTuple):
    """A function of a request."""

    name: str
    parameters: Schema
    is_strict: bool
    path: str  # of the parameters in the request's body


class Property(NamedTuple):
    """A member of an object."""

    key: str
    schema: Schema
    path: str
    is_required: bool


@dataclass(frozen=True)
class Demand:
    """The calls that a grammar allows."""

    functions: tuple[Function, ...]
    is_required: bool  # the answer consists of calls only
    has_many: bool  # more than one call is allowed
    instead: Schema | None = None  # schema of JSON that is allowed instead of calls; other text is not


def grammar_of(dialect: Dialect, demand: Demand, tokens: Mapping[str, int]) -> str:
    """Return a grammar in llguidance's variant of Lark's syntax.

    tokens: the ids of added tokens, by their texts. Raises RequestError for parameters that the syntax cannot
    guarantee.
    """
    if dialect.syntax is None:
        raise RequestError("the model's call syntax is not known", "tools")
    layout = dialect.syntax.layout
    rules = _Rules(layout, tokens, dialect.syntax.marks)
    if layout.between is None:
        demand = replace(demand, has_many=False)
    if dialect.reasoning is ANALYSIS:
        start = _harmony(rules, demand)
    elif demand.instead is not None:
        start = (
            f"{rules.required(demand)} | {rules.json(demand.instead)}"
            if demand.functions
            else rules.json(demand.instead)
        )
    else:
        start = rules.required(demand) if demand.is_required else rules.free(demand)
    return "\n".join([f"start: {start}", f"TEXT: {ANY}", *rules.lines])


def _harmony(rules: _Rules, demand: Demand) -> str:
    """Return the start rule of gpt-oss: optional reasoning, then calls or a last message."""
    reasoning = f"{rules.literal('<|channel|>analysis<|message|>')} TEXT {rules.literal('<|end|><|start|>assistant')}"
    endings = [rules.required(demand)] if demand.functions else []
    final = rules.literal("<|channel|>final<|message|>")
    if demand.instead is not None:
        endings.append(f"{final} {rules.json(demand.instead)}")
    elif not demand.is_required:
        endings.append(f"{final} TEXT")
    return f"({reasoning})? ({' | '.join(endings)})"


class _Rules:
    """The rules of a grammar."""

    def __init__(self, layout: Layout, tokens: Mapping[str, int], marks: Sequence[str]) -> None:
        self.lines: list[str] = []
        self._marks = marks
        self._layout = layout
        self._tokens = tokens
        arguments: dict[str, Callable[[Function], str]] = {
            "json": lambda one: self.json(_closed(one.parameters)),
            "xml": lambda one: self._tagged(one, "<parameter=", ">\n", "\n</parameter>\n"),
            "glm": lambda one: self._tagged(one, "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            "python": lambda one: self._members(one, self._python, "="),
            "gemma": lambda one: self._members(one, self._gemma, ":"),
        }
        self._arguments = arguments[layout.arguments]

    def required(self, demand: Demand) -> str:
        """Return a rule for calls and nothing else."""
        layout, call = self._layout, self._calls(demand, "")
        parts = [self.literal(layout.begin), call, self.literal(layout.end)]
        if demand.has_many:
            parts.insert(2, f"({self.literal(layout.between or '')} {call})*")
        return " ".join(filter(None, parts))

    def free(self, demand: Demand) -> str:
        """Return a rule for any text in which each begun call is completed. If one is allowed, it ends the answer."""
        layout = self._layout
        if not layout.trigger:  # a list that begins the answer
            other = self._add(r"/[^\[\s](?s:.*)/")
            return f"({self.required(demand)} | {other})?"
        if layout.begin:
            calls = self._calls(demand, "")
            more = f"({self.literal(layout.between or '')} {calls})*" if demand.has_many else ""
            begin, end = self.literal(layout.begin.removeprefix(layout.trigger)), self.literal(layout.end)
            rest = f"{begin} {calls} {more} {end}"
        else:
            rest = self._calls(demand, layout.trigger)
        until = f"TEXT {found}" if (found := self._token(layout.trigger)) else self._until(layout.trigger)
        return f"({until} {rest})* TEXT" if demand.has_many else f"({until} {rest}) | TEXT"

    def _calls(self, demand: Demand, trigger: str) -> str:
        """Return a rule for one call of any function, without the trigger at its beginning."""
        layout = self._layout
        head, options = layout.head.removeprefix(trigger), []
        for one in demand.functions:
            name = self.literal(head + one.name + layout.middle)
            arguments = (
                f"{self._arguments(one)} {self.literal(layout.tail)}" if one.is_strict else self._any_arguments()
            )
            options.append(f"{name} {arguments}")
        return self._add(" | ".join(options))

    def _any_arguments(self) -> str:
        """Return a rule for arbitrary arguments and the tail of their call."""
        layout = self._layout
        if layout.arguments == "json":
            return f"{self.json({'type': 'object'})} {self.literal(layout.tail)}"
        if layout.arguments == "python":
            return f"{self._add(PYTHON)} {self.literal(layout.tail)}"
        within = [one for one in self._marks if one in self._tokens and one not in layout.head + layout.tail]
        more = f"(TEXT ({' | '.join(map(self.literal, within))}))* " if within else ""
        return more + self._until(layout.tail.removeprefix("}"))  # nested objects end with "}" as well

    # ------------------------------------------------------------------------------------------------- parts

    def literal(self, text: str) -> str:
        """Return a rule for a fixed text, with added tokens as token ids."""
        parts, plain, at = [], "", 0
        known = sorted((one for one in self._tokens if one in text), key=len, reverse=True) if text else []
        while at < len(text):
            token = next((one for one in known if text.startswith(one, at)), None)
            if token is None:
                plain += text[at]
                at += 1
                continue
            parts += [json.dumps(plain)] if plain else []
            parts.append(f"<[{self._tokens[token]}]>")
            plain, at = "", at + len(token)
        return " ".join([*parts, json.dumps(plain)] if plain else parts)

    def json(self, schema: Schema) -> str:
        """Return a rule for JSON of a schema."""
        text = json.dumps({"x-guidance": SPACING} | _bare(schema), ensure_ascii=False, allow_nan=False)
        return self._add(f"%json {text}")

    def _token(self, text: str) -> str:
        return f"<[{self._tokens[text]}]>" if text in self._tokens else ""

    def _add(self, body: str, options: str = "") -> str:
        if len(self.lines) == MAX_RULES:  # bounded, because references may multiply the rules
            raise RequestError(f"tools need more than {MAX_RULES} rules of a grammar", "tools")
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def _until(self, end: str) -> str:
        """Return a rule for any text up to and including `end`."""
        first = next((one for one in sorted(self._tokens, key=len, reverse=True) if end.startswith(one)), None)
        if first is not None:
            return f"TEXT {self.literal(end)}"
        cut = min((at for one in self._tokens if (at := end.find(one)) > 0), default=len(end))
        return f"{self._add(f'TEXT {json.dumps(end[:cut])}', '[lazy]')} {self.literal(end[cut:])}".strip()

    # ------------------------------------------------------------------------------------- arguments by name

    def _properties(self, schema: Schema, path: str, one: Function) -> list[Property]:
        """Return the members of an object."""
        found, required = schema.get("properties") or {}, schema.get("required") or ()
        if not isinstance(found, Mapping) or not isinstance(required, Sequence):
            raise RequestError(f"{path} has properties or required of another type than JSON Schema's", "tools")
        members = []
        for key, value in found.items():
            at = f"{path}.properties.{key}"
            if not key or any(letter in '<>{}[]()=:,"\n' or letter.isspace() for letter in key):
                raise RequestError(f"{at} has a name that this model's call syntax cannot write; use a word", "tools")
            members.append(Property(key, self._resolved(value, at, one), at, key in required))
        return members

    def _tagged(self, one: Function, opening: str, middle: str, closing: str) -> str:
        """Return a rule for arguments between tags: strings without quotes, other values as JSON."""
        parts = []
        for key, schema, path, is_required in self._properties(one.parameters, one.path, one):
            body = f"{self.literal(opening + key + middle)} {self._unquoted(schema, path, closing, one)}"
            parts.append(body if is_required else f"({body})?")
        return self._add(" ".join(parts)) if parts else ""

    def _unquoted(self, schema: Schema, path: str, closing: str, one: Function) -> str:
        if (options := _options(schema)) is not None:
            texts = (option if isinstance(option, str) else json.dumps(option) for option in options)
            return f"({' | '.join(self.literal(text) for text in texts)}) {self.literal(closing)}"
        if schema.get("type") == "string":
            _check_text(schema, path)
            return self._until(closing)
        return f"{self.json(self._with_definitions(schema, one))} {self.literal(closing)}"

    def _members(self, one: Function, value: Callable[[Schema, str, Function, int], str], equals: str) -> str:
        return self._object(self._properties(one.parameters, one.path, one), value, equals, one, 0)

    def _object(
        self,
        properties: Sequence[Property],
        value: Callable[[Schema, str, Function, int], str],
        equals: str,
        one: Function,
        depth: int,
    ) -> str:
        """Return a rule for arguments with commas between them, some of which are optional."""
        first, others = "", ""  # the rest of the rule before the first argument, and after one
        for key, schema, path, is_required in reversed(properties):
            body = f"{self.literal(key + equals)} {value(schema, path, one, depth + 1)}"
            comma = self.literal(", " if equals == "=" else ",")
            begun = f"{body} {others}"
            first = begun if is_required else f"({begun} | {first})" if first else f"({begun})?"
            first = self._add(first)
            others = self._add(f"{comma} {body} {others}" if is_required else f"({comma} {body})? {others}")
        return first

    def _python(self, schema: Schema, path: str, one: Function, depth: int) -> str:
        if schema.get("type") == "boolean" and _options(schema) is None:
            return '("True" | "False")'
        return self.json(self._with_definitions(schema, one))

    def _gemma(self, schema: Schema, path: str, one: Function, depth: int) -> str:
        """Return a rule for a value in Gemma's own syntax."""
        if depth > MAX_DEPTH:
            raise RequestError(f"{path} is nested more than {MAX_DEPTH} levels deep", "tools")
        schema = self._resolved(schema, path, one)
        quote = '<|"|>' if "<|" in self._layout.head else "<escape>"
        if (options := _options(schema)) is not None:
            texts = (f"{quote}{one}{quote}" if isinstance(one, str) else json.dumps(one) for one in options)
            return f"({' | '.join(map(self.literal, texts))})"
        kind = schema.get("type")
        if kind == "string":
            _check_text(schema, path)
            return f"{self.literal(quote)} {self._until(quote)}"
        if kind in ("integer", "number", "boolean", "null"):
            return self.json(schema)
        if kind == "array" and isinstance(items := schema.get("items", {"type": "string"}), Mapping):
            item = self._add(self._gemma(items, f"{path}.items", one, depth + 1))
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            members = self._object(self._properties(schema, path, one), self._gemma, ":", one, depth + 1)
            return f'"{{" {members} "}}"'
        raise RequestError(
            f"{path} has no single type, which this model's call syntax cannot guarantee; give it one", "tools"
        )

    def _resolved(self, schema: Any, path: str, one: Function) -> Schema:
        """Resolve a reference at the top of a schema."""
        for _ in range(MAX_DEPTH):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                break
            schema = referred(one.parameters, schema["$ref"]) or None
        if isinstance(schema, Mapping) and "$ref" not in schema:
            return schema
        raise RequestError(f"{path} is not a schema, or refers to none", "tools")

    @staticmethod
    def _with_definitions(schema: Schema, one: Function) -> Schema:
        return {key: one.parameters[key] for key in ("$defs", "definitions") if key in one.parameters} | dict(schema)


def _options(schema: Schema) -> Sequence[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    options = schema.get("enum")
    return options if isinstance(options, list) and options else None


def _check_text(schema: Schema, path: str) -> None:
    """Raise RequestError if a string that is written without quotes has constraints."""
    if more := sorted(set(schema) - NOTES):
        raise RequestError(
            f"{path} has {', '.join(more)}, which this model's call syntax cannot guarantee for a text; leave it out",
            "tools",
        )


def _closed(parameters: Schema) -> Schema:
    """Forbid arguments that the parameters do not name, unless they specify otherwise."""
    is_plain = "properties" in parameters and PLAIN.issuperset(parameters)
    return {**parameters, "additionalProperties": False} if is_plain else parameters


def _bare(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema without its descriptions, which may be most of it."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("description", "title", "$comment") and isinstance(value, str):
            continue
        if key in ("properties", "$defs", "definitions", "patternProperties") and isinstance(value, Mapping):
            found[key] = {name: _bare(one) if isinstance(one, Mapping) else one for name, one in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, Mapping):
            found[key] = _bare(value)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            found[key] = [_bare(one) if isinstance(one, Mapping) else one for one in value]
        else:
            found[key] = value
    return found
