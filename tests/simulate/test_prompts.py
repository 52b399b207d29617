"""Tokens by names: what their blocks are called."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.simulate.prompts import NamedTokens, part_name

ROOT = b"root".ljust(16)
SIZE = 16


def tokens_of(names: list[str], ends: list[int], length: int) -> NamedTokens:
    return NamedTokens([part_name(name) for name in names], ends, length)


def digests_of(tokens: NamedTokens, *counts: int) -> list[bytes]:
    found = [ROOT]
    for count in counts:
        tokens.extend_digests(found, count, SIZE)
    return found[1:]


ENDS = st.lists(st.integers(1, 200), max_size=4, unique=True).map(sorted)


@given(ENDS, st.lists(st.integers(0, 30), max_size=4).map(sorted))
def test_blocks_are_named_alike_at_once_and_one_after_the_other(ends: list[int], counts: list[int]) -> None:
    tokens = tokens_of(list("abcde")[: len(ends) + 1], ends, 500)
    whole = digests_of(tokens, 30)
    assert len(set(whole)) == 30
    assert digests_of(tokens, *counts, 30) == whole


@given(ENDS, st.integers(1, 480), st.data())
def test_two_have_the_blocks_in_common_that_begin_alike(ends: list[int], parted: int, data: st.DataObject) -> None:
    """The second one goes on otherwise from a token on, which may be one that the first one generates."""
    names = list("abcde")[: len(ends) + 1]
    one = tokens_of(names, ends, data.draw(st.integers(1, 480)))
    kept = [end for end in ends if end < parted]
    other = tokens_of([*names[: len(kept) + 1], "other"], [*kept, parted], 480)
    pairs = zip(digests_of(one, 30), digests_of(other, 30), strict=True)
    assert [a == b for a, b in pairs] == [(i + 1) * SIZE <= parted for i in range(30)]


def test_a_part_says_how_many_tokens_it_has() -> None:
    tokens = tokens_of(["a", "b"], [20], 40)
    assert len(tokens[16:32].tolist()) == 16
    assert len(tokens[32:48].tolist()) == 8
    assert tokens[16:32].tobytes() != tokens_of(["a", "c"], [20], 40)[16:32].tobytes()
