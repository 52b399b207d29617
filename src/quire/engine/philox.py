"""Random numbers that depend on (seed, position, sample) only.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), a counter-based generator: drawing
the number of a position needs no state of earlier draws, so a preempted request draws the same numbers again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
ROUNDS = 10
LOW = np.uint64(0xFFFFFFFF)
SHIFT = np.uint64(32)


def philox(counter: NDArray[np.uint64], key: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the four 32-bit words for each counter [R, 4] and key [R, 2], all words stored in uint64: [R, 4]."""
    c0, c1, c2, c3 = counter.T
    k0, k1 = key.T
    for _ in range(ROUNDS):
        p0, p1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> SHIFT) ^ c1 ^ k0, p1 & LOW, (p0 >> SHIFT) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return np.stack([c0, c1, c2, c3], axis=1)


def uniforms(
    seeds: NDArray[np.uint64], positions: NDArray[np.uint64], samples: NDArray[np.uint64]
) -> NDArray[np.float64]:
    """Return a number in [0, 1) with 53 random bits for each seed, position and sample index, all [R]."""
    zeros = np.zeros_like(seeds)
    words = philox(
        np.stack([positions, samples, zeros, zeros], axis=1), np.stack([seeds & LOW, seeds >> SHIFT], axis=1)
    )
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    numbers: NDArray[np.float64] = (high * 2.0**26 + low) / 2.0**53
    return numbers
