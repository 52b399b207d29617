"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a table, or its head."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def markdown_rule(columns: int) -> str:
    """What stands between a table's head and its rows."""
    return "|" + "---|" * columns
