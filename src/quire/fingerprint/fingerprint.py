"""Fingerprint: all properties that determine the bits of a replica's answers.

A request moves only between replicas with the same fingerprint.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

from quire.errors import BadValue

# Raised by every change of Quire that changes bits, such as another order of a sum: two releases with the same number
# give the same answers. Differences between machines are detected by the probe.
BITS_VERSION = 2
DIGEST_SIZE = 8  # bytes of every digest here
DIGEST = re.compile(f"[0-9a-f]{{{2 * DIGEST_SIZE}}}")
MAX_PARTS = 256
MAX_PART = 1024  # characters of a part's name, and of its value


@dataclass(frozen=True)
class Fingerprint:
    """The properties of a replica, part by part: a digest of a large one, else the value itself."""

    parts: Mapping[str, str]

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits. Replicas with the same digest give a request the same tokens and logprobs."""
        found = blake2b(digest_size=DIGEST_SIZE, person=b"quire replica")
        for name, value in sorted(self.parts.items()):
            for text in (name, value):
                encoded = text.encode(errors="surrogatepass")
                found.update(len(encoded).to_bytes(8, "little") + encoded)
        return found.hexdigest()

    def difference(self, other: Fingerprint) -> tuple[str, ...]:
        """Return the names of the parts that differ or that only one of the two has, in order."""
        names = self.parts.keys() | other.parts.keys()
        return tuple(sorted(name for name in names if self.parts.get(name) != other.parts.get(name)))

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        return {"digest": self.digest, "parts": dict(sorted(self.parts.items()))}

    @classmethod
    def from_json(cls, data: object) -> Fingerprint:
        """Parse the fingerprint that another process has sent. Raises BadValue if it is not valid."""
        if not isinstance(data, Mapping):
            raise BadValue(f"a fingerprint is a {type(data).__name__}; it must be an object")
        if set(data) != {"digest", "parts"}:
            raise BadValue(f"a fingerprint has the keys {sorted(map(str, data))}; it must have digest and parts")
        digest, parts = data["digest"], data["parts"]
        if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
            raise BadValue(
                f"a fingerprint's digest is {_shown(digest)}; it must be {2 * DIGEST_SIZE} hexadecimal digits"
            )
        if not isinstance(parts, Mapping) or not 1 <= len(parts) <= MAX_PARTS:
            found = f"{len(parts)} parts" if isinstance(parts, Mapping) else f"parts of type {type(parts).__name__}"
            raise BadValue(f"a fingerprint has {found}; it must have an object of 1 to {MAX_PARTS}")
        for name, value in parts.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise BadValue(f"a fingerprint's part {_shown(name)} is {_shown(value)}; both must be texts")
            if max(len(name), len(value)) > MAX_PART:
                raise BadValue(
                    f"a fingerprint's part {_shown(name)} has {len(value)} characters; the most is {MAX_PART}"
                )
        fingerprint = cls(dict(parts))
        if fingerprint.digest != digest:
            raise BadValue(f"a fingerprint's digest is {digest}; its parts have {fingerprint.digest}")
        return fingerprint


def short_digest(data: bytes) -> str:
    """Return a digest of 16 hexadecimal digits."""
    return blake2b(data, digest_size=DIGEST_SIZE).hexdigest()


def _shown(value: object) -> str:
    return repr(value)[:80]
