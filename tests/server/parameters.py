"""docs/parameters.md: what becomes of every field of every body, as the protocol's classes have it.

`python -m tests.server.parameters` writes the page.
"""

from __future__ import annotations

import json
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from typing_extensions import NotRequired, is_typeddict

from quire.server.http.body import BodyRoute
from quire.server.protocol.body import Body
from quire.server.protocol.sampling import Sampling
from quire.server.protocol.unknown import ALSO_CALLED, BOOKKEEPING, DEPENDENT, NEUTRAL, NOT_HERE
from quire.server.run import build_parts
from quire.server.server_config import ServerConfig
from tests.server.serving import SMALL

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"
BOUNDS = ("minimum", "maximum")
LONGEST = 6  # choices of a field that are shown

HEAD = """# Parameters

Every field of every route's body, generated from the classes that read them (`python -m tests.server.parameters`; a
test compares). *Honoured* fields follow their protocol, within the bounds shown here. *Refused* ones raise the error
shown here, unless they are null or empty, or have a value that this page lists as accepted. Those *without effect*
are accepted, since clients send them, and ignored. All fields but those in **bold** are optional, and null counts as
left out.

A field that is in no table is an [unknown field](serving.md#compatibility-with-clients). The last two lists contain
known names.
"""
NAMES = """
## Accepted everywhere, without effect

Fields that clients use for their own records or for a proxy, and those that request the existing behaviour:
{bookkeeping}. Where text is generated, also fields of a way of sampling that another field requests, which is refused:
{dependent}.

## Refused by name where text is generated

Names of other servers, or of other routes, for options that change the text. They are refused if the table of a route
has no such field, unless they are null or empty, or have a value that is listed as accepted: one that requests the
behaviour here, or the default of the other server.

| field | why |
|---|---|
{others}
"""


class Fate(Enum):
    """What becomes of a field."""

    HONOURED = "honoured"
    REFUSED = "refused"
    WITHOUT_EFFECT = "without effect"


class Parameter(NamedTuple):
    """A field of a body, or of an object in it."""

    path: str  # "messages[].content"
    is_required: bool
    kind: str  # of its values
    fate: Fate
    why: str  # of a refusal


def bodies(routes: list[Any]) -> dict[type[Body], list[str]]:
    """Each kind of body, with the paths that take it. routes: of the application."""
    found: dict[type[Body], list[str]] = {}
    flat = [one for route in routes for one in getattr(getattr(route, "original_router", None), "routes", [route])]
    for route in flat:
        if isinstance(route, BodyRoute):
            kind = get_type_hints(route.endpoint).get("body")
            if kind is not None:
                found.setdefault(kind, []).append(route.path)
    return found


def parameters(kind: type[Any], path: str = "", above: tuple[type[Any], ...] = ()) -> Iterator[Parameter]:
    """The fields of a kind of objects, and of the objects in these."""
    if is_typeddict(kind):
        schema = TypeAdapter(kind).json_schema()
        for name, hint in get_type_hints(kind, include_extras=True).items():
            is_free = hint is Any or get_args(hint) == (Any,)  # nothing is asked of it, since nothing comes of it
            fate = Fate.WITHOUT_EFFECT if is_free else Fate.HONOURED
            values = _kind(schema["properties"][name], schema.get("$defs", {}))
            yield Parameter(path + name, name in schema.get("required", ()), values, fate, "")
            yield from _within(hint, path + name, (*above, kind))
        return
    schema = kind.model_json_schema()
    for own, field in kind.model_fields.items():
        name = field.alias or own
        fate, why = fate_of(kind, own)
        yield Parameter(
            path + name, field.is_required(), _kind(schema["properties"][name], schema.get("$defs", {})), fate, why
        )
        if fate is Fate.HONOURED:
            yield from _within(field.annotation, path + name, (*above, kind))


def fate_of(kind: type[Body], name: str) -> tuple[Fate, str]:
    """What becomes of a field, and why."""
    if name in kind.IGNORED:
        return Fate.WITHOUT_EFFECT, ""
    if (refused := kind.REFUSED.get(name)) is None:
        return Fate.HONOURED, ""
    return Fate.REFUSED, refused.why + _accepted(refused.neutral)


def _accepted(neutral: Sequence[Any]) -> str:
    allowed = " or ".join(f"`{json.dumps(value)}`" for value in neutral)
    return f"; {allowed} is accepted" if allowed else ""


def _within(hint: Any, path: str, above: tuple[type[Any], ...]) -> Iterator[Parameter]:
    """The fields of the objects that a field may have, each once."""
    seen: set[str] = set()
    for inner, suffix in _objects(hint, ""):
        if inner not in above:
            for one in parameters(inner, f"{path}{suffix}.", above):
                if one.path not in seen:
                    seen.add(one.path)
                    yield one


def _objects(hint: Any, suffix: str) -> Iterator[tuple[type[Any], str]]:
    if isinstance(hint, type) and (is_typeddict(hint) or (get_origin(hint) is None and issubclass(hint, Body))):
        yield hint, suffix
        return
    origin = get_origin(hint)
    if origin is list:
        yield from _objects(get_args(hint)[0], suffix + "[]")
    elif origin in (Annotated, NotRequired):
        yield from _objects(get_args(hint)[0], suffix)
    elif origin in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _objects(part, suffix)
    elif origin not in (None, Literal, dict):
        raise TypeError(f"{hint!r} is of a kind that this page cannot show")


def _kind(schema: dict[str, Any], shared: dict[str, Any]) -> str:
    """A JSON schema in a few words. shared: those that it refers to."""
    if "$ref" in schema:
        schema = shared[schema["$ref"].rpartition("/")[2]]
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        kinds = [_kind(one, shared) for one in options if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(filter(None, kinds)))
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        shown = [f"`{json.dumps(one)}`" for one in choices[:LONGEST]] + ["…"] * (len(choices) > LONGEST)
        return ", ".join(shown)
    named = schema.get("type")
    if named == "array":
        inner = _kind(schema.get("items", {}), shared)
        return f"list of {inner}" if inner else "list"
    words = {"string": "text", "boolean": "true or false", "object": "object", "null": "null"}.get(named, named or "")
    low, high = (None if (one := schema.get(key)) is None else f"{one}".removesuffix(".0") for key in BOUNDS)
    if low is None and high is None:
        return words
    return f"{words}, {low} to {high}" if None not in (low, high) else f"{words} from {low}"


def page(found: dict[type[Body], list[str]]) -> str:
    """docs/parameters.md."""
    parts = [HEAD]
    for kind, paths in found.items():
        rows = list(parameters(kind))
        counts = Counter(one.fate for one in rows)
        parts.append(f"\n## {', '.join(f'`{path}`' for path in paths)}\n")
        parts.append(f"{', '.join(f'{counts[fate]} {fate.value}' for fate in Fate)}.\n")
        parts.append("| field | values | |\n|---|---|---|")
        parts += [_row(one) for one in rows]
    others = {name: f"use {use}" for name, use in ALSO_CALLED.items()} | NOT_HERE
    others = {name: why + _accepted(NEUTRAL.get(name, ())) for name, why in others.items()}
    known = {name for kind in found if issubclass(kind, Sampling) for name in kind.model_fields}
    parts.append(
        NAMES.format(
            bookkeeping=", ".join(f"`{name}`" for name in sorted(BOOKKEEPING)),
            dependent=", ".join(f"`{name}`" for name in sorted(DEPENDENT)),
            others="\n".join(f"| `{name}` | {why} |" for name, why in sorted(others.items()) if name not in known),
        ).rstrip("\n")
    )
    return "\n".join(parts) + "\n"


def _row(one: Parameter) -> str:
    name = f"**`{one.path}`**" if one.is_required else f"`{one.path}`"
    fate = one.fate.value + (f": {one.why}" if one.why else "")
    values = "" if one.fate is Fate.REFUSED else one.kind
    return f"| {name} | {values} | {fate} |".replace("|  |", "| |")


def routes() -> list[Any]:
    """Of an application that has all of them."""
    config = ServerConfig(port=0, ollama=True, allow_lora_loading=True)
    return build_parts(SMALL, config).app().routes


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(bodies(routes())), encoding="utf-8")


if __name__ == "__main__":
    main()
