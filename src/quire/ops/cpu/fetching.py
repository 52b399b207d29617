"""How weights, keys and values are brought into the caches before they are used.

It is a property of the core, not of the instruction set, and changes no bit. Cores that are known have a row in a
table; another one is measured when the library is loaded, in a few milliseconds. The option `prefetch` overrides both.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

from quire.errors import ConfigError

# The kinds by number, as csrc/fetching.h has them: past the larger caches, into all, into all but the first.
KINDS = ("nta", "t0", "t1")
PROBED = 2**19  # bytes
MARGIN = 1.2  # times as fast as past the caches: what else is in them is worth something, too


@dataclass(frozen=True)
class Fetching:
    """Kinds of prefetch, and how far ahead."""

    weights: str  # of KINDS: of a weight that only few rows are multiplied with
    ahead: int  # bytes of each strip of the weight
    keys: str  # of KINDS: of keys and values
    source: str  # what decided it

    def __str__(self) -> str:
        return f"weights {self.weights}, {self.ahead} bytes ahead, keys and values {self.keys} ({self.source})"


# Measured on a Granite Rapids and on Zen 5: PREFETCHNTA leaves a third of the rate on the one, and keeps what the next
# step needs in the caches on the other.
KNOWN = {
    "GenuineIntel": Fetching("t0", 2560, "t1", "known of Intel"),
    "AuthenticAMD": Fetching("nta", 6 << 10, "t0", "known of AMD"),
}


def choose(library: ctypes.CDLL) -> Fetching:
    """What is best here."""
    vendor = ctypes.create_string_buffer(13)
    library.quire_vendor(vendor)
    return KNOWN.get(vendor.value.decode()) or _probe(library)


def parse(wanted: str) -> Fetching:
    """As in `t0:2560:t1`: the kind and the distance of weights, and the kind of keys and values.

    Raises ConfigError where it is something else.
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
    """Let the kernels of this library fetch like that."""
    library.quire_set_fetching(KINDS.index(chosen.weights), chosen.ahead, KINDS.index(chosen.keys))


def _probe(library: ctypes.CDLL) -> Fetching:
    """What reads memory fastest, past the caches where that is nearly as fast."""
    memory = (ctypes.c_char * PROBED)()
    ctypes.memset(memory, 1, PROBED)  # else all of its pages are the same one
    measure = library.quire_time_fetching
    measure.restype, measure.argtypes = (
        ctypes.c_int64,
        (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32),
    )
    took = {kind: min(measure(memory, PROBED, number, 4 << 10) for _ in range(2)) for number, kind in enumerate(KINDS)}
    cached = min(("t0", "t1"), key=took.__getitem__)
    weights = cached if took[cached] * MARGIN < took["nta"] else "nta"
    return Fetching(weights, (6 if weights == "nta" else 3) << 10, cached, "measured")
