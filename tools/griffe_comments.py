"""A griffe extension: the comment after a parameter or field, which has the shape, becomes its description."""

from __future__ import annotations

import io
import tokenize
from typing import Any

import griffe


class Comments(griffe.Extension):
    """Copies trailing comments of the source into docstrings."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Describe a field without a docstring."""
        if attr.docstring is None and not attr.is_private and attr.lineno is not None:
            text = _comments(attr.parent).get(attr.lineno) if attr.parent is not None else None
            if text:
                attr.docstring = griffe.Docstring(text, lineno=attr.lineno, endlineno=attr.lineno, parent=attr)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Describe the parameters of a function that has comments with their shapes."""
        if func.docstring is None or func.lineno is None or "Args:" in func.docstring.value:
            return
        lines = func.source.splitlines()
        found = {}
        for parameter in func.parameters:
            for offset, line in enumerate(lines):
                if line.strip().startswith((f"{parameter.name}:", f"{parameter.name} =", f"{parameter.name},")):
                    if text := _comments(func).get(func.lineno + offset):
                        found[parameter.name] = text
                    break
        if found:
            entries = "\n".join(f"    {name}: {text}" for name, text in found.items())
            func.docstring.value += f"\n\nArgs:\n{entries}"


def _comments(thing: griffe.Object | griffe.Alias) -> dict[int, str]:
    """Return the trailing comments of a class, function or module, by line number."""
    first = thing.lineno or 1
    source = thing.source if not thing.is_module else "\n".join(thing.lines)
    found = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and token.line.strip() != token.string:
                text = token.string.lstrip("# ")
                if not text.startswith(("fmt:", "type:", "noqa")):
                    word = text.split()[0]
                    found[first + token.start[0] - 1] = text[0].upper() + text[1:] if word.isalpha() else text
    except (tokenize.TokenError, IndentationError):
        return {}
    return found
