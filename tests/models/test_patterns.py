"""Patterns of strangers, compared with what `re` finds."""

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


def test_they_match_as_those_of_re(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "FEW", 0)  # `re` is not asked
    draw = random.Random(0)
    for _ in range(250):
        text = drawn(draw)
        ours, whole = Patterns("x").compiled("k", text), Patterns("x").compiled("k", text, "(?:", r")\Z")
        for _ in range(5):
            name = "".join(draw.choices("ab.c1\n", k=draw.randint(1, 9)))
            assert ours.begins(name) == (re.match(text, name) is not None), (text, name)
            assert whole.begins(name) == (re.fullmatch(text, name) is not None), (text, name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("(a|a)*b", False),
        ("(a+)+$", True),
        ("(?:a?){300}a{300}b", False),
        ("(.*)*(.*)*(.*)*(.*)*b", False),
        ("(?=(?=(?=.*a).*a).*a).*b", False),
        ("a" * 200 + "(.*a){20}b", False),
    ],
)
def test_what_takes_re_forever(text: str, found: bool) -> None:
    assert Patterns("x").compiled("k", text).begins("a" * 300) is found


@pytest.mark.parametrize("text", ["((a{1,99}){1,99}){1,99}b", "x"])
def test_steps_are_counted(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all names and patterns of a file together, whoever takes them."""
    monkeypatch.setattr(patterns, "MOST_STEPS", 10_000)
    one = Patterns("config.json: x").compiled("k", text)
    with pytest.raises(ModelError, match=r"config.json: x: its patterns take more than 10000 steps to match"):
        [one.begins("a" * 99) for _ in range(20_000)]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("(", r"f: k has '\(', which is no pattern: missing \)"),
        ("a)|(b", "which is no pattern: unbalanced"),
        ("a{99999999999}", "which is no pattern"),
        ("(" * 50 + ")" * 50, "more than 40 groups within one another"),
        ("(" * 5000 + ")" * 5000, "which is no pattern: maximum recursion depth|more than 40 groups"),
        ("a" * 20_000, "a pattern of 20000 characters; it must have at most 16384"),
        (r"(a)\1", "a pattern with groupref, which is not served"),
        ("(?i)a", "a pattern with flags"),
        ("(?i:a)", "a pattern with subpattern, which is not served"),
    ],
)
def test_what_is_no_pattern(text: str, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        Patterns("f").compiled("k", text)
