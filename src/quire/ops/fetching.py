"""Prefetching of weights, keys and values into the CPU's caches.

The best kind depends on the core, not on the instruction set, and changes no bit. Known cores are listed in a table;
others are measured when the library is loaded, in a few milliseconds. The option `prefetch` overrides both.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

from quire.errors import ConfigError

# The kinds by number, as in cpu/csrc/fetching.h: past the larger caches, into all, into all except the first.
KINDS = ("nta", "t0", "t1")
PROBED = 2**19  # bytes
MARGIN = 1.2  # required speed relative to "nta", which does not evict other data from the caches


@dataclass(frozen=True)
class Fetching:
    """The kinds of prefetch, and the distance."""

    weights: str  # of KINDS: for weights, in products with few rows
    ahead: int  # distance in bytes in each strip of the weight
    keys: str  # of KINDS: for keys and values
    source: str  # the origin of these values, for display

    def __str__(self) -> str:
        return f"weights {self.weights}, {self.ahead} bytes ahead, keys and values {self.keys} ({self.source})"


# Measured on Granite Rapids, where PREFETCHNTA reaches a third of the rate, and on Zen 5, where it does not evict the
# data of the next step from the caches.
KNOWN = {
    "GenuineIntel": Fetching("t0", 2560, "t1", "known of Intel"),
    "AuthenticAMD": Fetching("nta", 6 << 10, "t0", "known of AMD"),
}


def choose(library: ctypes.CDLL) -> Fetching:
    """Choose the prefetching for this CPU."""
    vendor = ctypes.create_string_buffer(13)
    library.quire_vendor(vendor)
    return KNOWN.get(vendor.value.decode()) or _probe(library)


def parse(wanted: str) -> Fetching:
    """Parse a value like `t0:2560:t1`: the kind and the distance for weights, and the kind for keys and values.

    Raises ConfigError for any other form.
    """
    weights, _, rest = wanted.partition(":")
    ahead, _, keys = rest.partition(":")
    if (
        weights not in KINDS
        or keys not in KINDS
        or not re.fullmatch(r"\d{1,5}", ahead)
        or not 64 <= int(ahead) <= 65536
    ):
        raise ConfigError(
            f"prefetch is {wanted!r}; it must be KIND:BYTES:KIND as in 't0:2560:t1', for weights and for keys and "
            f"values, each kind one of {', '.join(KINDS)}, and 64 to 65536 bytes"
        )
    return Fetching(weights, int(ahead), keys, "as asked for")


def apply(library: ctypes.CDLL, chosen: Fetching) -> None:
    """Set the prefetching of the library's kernels."""
    library.quire_set_fetching(KINDS.index(chosen.weights), chosen.ahead, KINDS.index(chosen.keys))


def _probe(library: ctypes.CDLL) -> Fetching:
    """Measure the kinds. Return the fastest one, or "nta" if it is nearly as fast."""
    memory = (ctypes.c_char * PROBED)()
    ctypes.memset(memory, 1, PROBED)  # otherwise all of its pages are the same zero page
    measure = library.quire_time_fetching
    measure.restype, measure.argtypes = (
        ctypes.c_int64,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32),
    )
    took = {kind: min(measure(memory, PROBED, number, 4 << 10) for _ in range(2)) for number, kind in enumerate(KINDS)}
    cached = min(("t0", "t1"), key=took.__getitem__)
    weights = cached if took[cached] * MARGIN < took["nta"] else "nta"
    return Fetching(weights, (6 if weights == "nta" else 3) << 10, cached, "measured")
