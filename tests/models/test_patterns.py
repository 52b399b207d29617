"""Patterns of strangers: as `re` has them, in bounded time."""

from __future__ import annotations

import random
import re

import pytest

from quire.errors import ModelError
from quire.models import patterns
from quire.models.patterns import Patterns

ATOMS = ("a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "[a-c1]", r"\b", "^", "$", r"\Z", r"(?<=a)", "(?<!b)")
COUNTS = ("*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}?", "{2,}")


def drawn(draw: random.Random, depth: int = 0) -> str:
    """A pattern of any shape."""
    shape = draw.random() if depth < 4 else 0.0
    if shape < 0.35:
        return draw.choice(ATOMS)
    parts = [drawn(draw, depth + 1) for _ in range(draw.randint(1, 3))]
    if shape < 0.6:
        return "".join(parts)
    if shape < 0.75:
        return f"({'|'.join(parts)})"
    return f"(?:{parts[0]}){draw.choice(COUNTS)}" if shape < 0.95 else f"{draw.choice(('(?=', '(?!'))}{parts[0]})"


def test_they_match_as_those_of_re() -> None:
    draw = random.Random(0)
    for _ in range(250):
        text = drawn(draw)
        ours, whole = Patterns("x").compiled("k", text), Patterns("x").compiled("k", text, "(?:", r")\Z")
        for _ in range(5):
            name = "".join(draw.choices("ab.c1\n", k=draw.randint(1, 9)))
            assert ours.begins(name) == (re.match(text, name) is not None), (text, name)
            assert whole.begins(name) == (re.fullmatch(text, name) is not None), (text, name)


@pytest.mark.parametrize("text", ["((a{1,20}){1,20}){1,20}b", "(?:(?:a|aa)+)+b"])
def test_what_takes_for_ever_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MOST_SECONDS", 0.02)
    with pytest.raises(ModelError, match=r"config.json: x: its patterns take more than 0.02 s to match; give names"):
        Patterns("config.json: x").compiled("k", text).begins("a" * 300)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("(", r"f: k has '\(', which is no pattern: missing \)"),
        ("a)|(b", "which is no pattern: unbalanced"),
        ("a{99999999999}", r"whose counts multiply to 1e\+11"),
        ("(a{2000}){2000}", r"whose counts multiply to 4e\+06; it must be at most 10000"),
        ("a{,30000000}", r"whose counts multiply to 3e\+07"),
        ("x|(?R)x", "which is no pattern: unknown extension"),
        ("(" * 5000 + ")" * 5000, "which is no pattern: maximum recursion depth"),
        ("a" * 20_000, "a pattern of 20000 characters; it must have at most 16384"),
    ],
)
def test_what_is_no_pattern(text: str, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        Patterns("f").compiled("k", text)
