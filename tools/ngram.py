"""A byte n-gram with interpolated modified Kneser-Ney smoothing: the baseline for a language model.

Kneser and Ney, "Improved backing-off for m-gram language modeling", ICASSP 1995; the three discounts per order
and the interpolated form are those of Chen and Goodman, "An empirical study of smoothing techniques for
language modeling", Harvard TR-10-98, 1998. An n-gram is packed in one integer, nine bits per symbol, its last
(predicted) symbol lowest, so that shifting gives its history and masking gives the next shorter n-gram.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BITS = 9
START = 256  # precedes the first byte of a file; it is only part of histories
FALLBACK = (0.5, 1.0, 1.5)  # if a count of counts is zero, as is possible with 256 unigrams


@dataclass(frozen=True)
class Level:
    """The n-grams of one length, sorted, and their histories, sorted."""

    grams: Ints
    counts: Ints
    histories: Ints
    totals: Ints
    left_over: Floats  # the fraction of a history's mass for the next shorter n-gram
    discounts: Floats


def pack(files: Iterable[bytes], order: int) -> Ints:
    """Return one packed n-gram of length `order` per byte of the files."""
    keys = []
    for data in files:
        symbols = np.full(len(data) + order - 1, START, np.int64)
        symbols[order - 1 :] = np.frombuffer(data, np.uint8)
        key = np.zeros(len(data), np.int64)
        for offset in range(order):
            key = (key << BITS) | symbols[offset : offset + len(data)]
        keys.append(key)
    return np.concatenate(keys)


def shorten(keys: Ints, order: int) -> Ints:
    """Return the last `order` symbols of packed n-grams."""
    return keys & ((1 << (BITS * order)) - 1)


def make_level(grams: Ints, counts: Ints) -> Level:
    n1, n2, n3, n4 = (int((counts == n).sum()) for n in (1, 2, 3, 4))
    if min(n1, n2, n3, n4) > 0:
        y = n1 / (n1 + 2 * n2)
        by_count = (0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3)
    else:
        by_count = (0.0, *FALLBACK)
    discounts = np.array(by_count)
    histories, first = np.unique(grams >> BITS, return_index=True)
    totals = np.add.reduceat(counts, first)
    left_over = np.add.reduceat(discounts[np.minimum(counts, 3)], first) / totals
    return Level(grams, counts, histories, totals, left_over, discounts)


def fit(files: Iterable[bytes], order: int = 5) -> list[Level]:
    """Return levels of length 1 to `order`. The longest has plain counts, the others count left neighbours."""
    grams, counts = np.unique(pack(files, order), return_counts=True)
    levels = [make_level(grams, counts)]
    for length in range(order - 1, 0, -1):
        grams, counts = np.unique(shorten(grams, length), return_counts=True)
        levels.insert(0, make_level(grams, counts))
    return levels


def find(table: Ints, keys: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    where = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return where, table[where] == keys


def nats_per_byte(levels: list[Level], files: Iterable[bytes]) -> float:
    """Return the mean of -ln p(byte | the previous order-1 bytes, or fewer, of its file)."""
    keys = pack(files, len(levels))
    p = np.full(len(keys), 1 / 256)
    for length, level in enumerate(levels, start=1):
        key = shorten(keys, length)
        gram, seen = find(level.grams, key)
        history, known = find(level.histories, key >> BITS)
        counts = np.where(seen, level.counts[gram], 0)
        own = np.maximum(counts - level.discounts[np.minimum(counts, 3)], 0) / level.totals[history]
        p = np.where(known, own + level.left_over[history] * p, p)
    return float(-np.log(p).mean())
