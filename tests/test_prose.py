"""The checker of prose finds the phrases of docs/develop/style.md in every kind of file, and nothing in code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_prose import found_in, phrases

PYTHON = '''"""A module."""


def grow(who):  # so many blocks
    """Whether it grows, as the caller asked."""
    raise ValueError(f"the block {who} stands alone")  # `who` is code
'''
SCRIPT = """// nobody reads this
const who = "stands", url = "http://x", text = `the slot ${who} goes on`;
/* what
   follows */
"""
MARKDOWN = "# Title\n\nThe request goes\non; `who` waits.\n\n```py\nwho = 1  # what\n```\n\nIt is told.\n"
PAGE = "<p title='x'>The engine goes on.</p><script>who = 1;</script>"


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "a.py",
            PYTHON,
            {("source", 4, "so many"), ("source", 5, "Whether ... (first word)"), ("messages", 6, "stands")},
        ),
        ("a.js", SCRIPT, {("source", 1, "nobody"), ("source", 3, "what"), ("messages", 2, "goes on")}),
        ("a.md", MARKDOWN, {("documents", 3, "goes on"), ("documents", 10, "told")}),
        ("a.html", PAGE, {("messages", 1, "goes on")}),
    ],
)
def test_phrases_are_found(tmp_path: Path, name: str, text: str, expected: set[tuple[str, int, str]]) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert {(one.area, one.line, one.phrase) for one in found_in(path, phrases())} == expected
