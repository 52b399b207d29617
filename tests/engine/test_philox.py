"""Philox4x32-10 against the known answers that its authors publish (Random123, kat_vectors)."""

import numpy as np
import pytest

from quire.engine.philox import philox, uniforms

KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16) for word in text.split()]], np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    assert philox(words(counter), words(key)).tolist() == words(expected).tolist()


def test_rows_are_independent_of_each_other() -> None:
    keys, counters = np.concatenate([words(k) for _, k, _ in KNOWN]), np.concatenate([words(c) for c, _, _ in KNOWN])
    assert philox(counters, keys).tolist() == [words(expected)[0].tolist() for _, _, expected in KNOWN]


def test_uniforms_are_uniform_and_depend_on_every_argument() -> None:
    n = 100_000
    positions = np.arange(n, dtype=np.uint64)
    zeros = np.zeros(n, np.uint64)
    numbers = uniforms(zeros, positions, zeros)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.bincount((numbers * 100).astype(int), minlength=100)
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 160  # chi², 99 degrees of freedom: p ≈ 1e-4
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    for others in (uniforms(zeros + np.uint64(1), positions, zeros), uniforms(zeros, positions, zeros + np.uint64(1)),
                   uniforms(zeros + np.uint64(2**40), positions, zeros)):  # fmt: skip
        assert abs(np.corrcoef(numbers, others)[0, 1]) < 0.02
