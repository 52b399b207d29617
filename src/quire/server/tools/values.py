"""Conversion of arguments that are not written as JSON to JSON of the types in a schema."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
MAX_OPTIONS = 256  # schemas that are examined for the types of one value
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "object": (dict,),
    "array": (list,),
}


def dumps(value: Any) -> str:
    """Encode a value as JSON. Values that JSON does not have become strings."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=str)
    except (ValueError, TypeError, RecursionError):
        return json.dumps(str(value), ensure_ascii=False)


def escaped(text: str) -> str:
    """Escape a part of a text for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def property_of(parameters: Schema, name: str) -> Schema:
    """Return the schema of an argument, or an empty one if it is unknown."""
    found = parameters.get("properties")
    schema = found.get(name) if isinstance(found, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Schema, root: Schema) -> frozenset[str]:
    """Return the names of the types that a value may have; empty if the schema does not restrict them."""
    found: set[str] = set()
    left, budget = [schema], MAX_OPTIONS
    while left:
        one, budget = left.pop(), budget - 1
        if budget < 0:
            return frozenset()
        named, options = one.get("type"), one.get("anyOf") or one.get("oneOf")
        if (reference := one.get("$ref")) is not None:
            left.append(referred(root, reference))
        elif isinstance(named, str):
            found.add(named)
        elif isinstance(named, list) and named and all(isinstance(each, str) for each in named):
            found.update(named)
        elif isinstance(options, list) and options and all(isinstance(each, Mapping) for each in options):
            left += options
        elif isinstance(values := one.get("enum"), list) and values and all(isinstance(each, str) for each in values):
            found.add("string")
        else:
            return frozenset()
    return frozenset(found)


def referred(root: Schema, reference: Any) -> Schema:
    """Return the schema that a reference names, or an empty one if it names nothing."""
    found: Any = root if isinstance(reference, str) and reference.startswith("#") else None
    for part in reference[2:].split("/") if found is not None and len(reference) > 1 else ():
        found = found.get(part) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def is_text(parameters: Schema, name: str) -> bool:
    """Return whether an argument can only be a string."""
    return types_of(property_of(parameters, name), parameters) == {"string"}


def json_of_text(text: str, parameters: Schema, name: str) -> str:
    """Return the JSON of an argument that a model wrote without quotes, as in XML-like syntaxes.

    A text that is not a value of the schema's types stays a string. Without types, a text that can be parsed as a list
    or an object becomes one.
    """
    types = types_of(property_of(parameters, name), parameters)
    if types == {"string"}:
        return dumps(text)
    value = literal(text)
    if value is None and text.strip() not in ("null", "None"):
        return dumps(text)
    if types and not any(_is_a(value, one) for one in types):
        return dumps(text)
    if not types and not isinstance(value, (dict, list)):
        return dumps(text)
    return dumps(value)


def literal(text: str) -> Any:
    """Return the value of a JSON or Python literal, or None if it is neither."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return {"true": True, "false": False}.get(text.strip().lower())


def json_of_literal(text: str) -> str:
    """Return the JSON of a Python literal. Any other text becomes a string."""
    value = literal(text)
    return dumps(text if value is None and text not in ("null", "None") else value)


def _is_a(value: Any, name: str) -> bool:
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    if name in ("integer", "number") and isinstance(value, bool):
        return False
    return isinstance(value, PYTHON_TYPES.get(name, ()))
