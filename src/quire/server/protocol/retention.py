"""Fields that keep a prompt in the prefix cache: OpenAI's `prompt_cache_retention`, and Anthropic's `cache_control`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from typing_extensions import NotRequired

from quire.server.protocol.body import StrictItem

DEFAULT = "in_memory"  # the retention of a prompt_cache_key alone
# Seconds after the last use. The two spellings of the first are in OpenAI's reference and in its client.
RETENTION: Mapping[str, float] = MappingProxyType({"": 0.0, "in_memory": 600.0, "in-memory": 600.0, "24h": 86_400.0})
TTL: Mapping[str, float] = MappingProxyType({"5m": 300.0, "1h": 3_600.0})
CacheRetention = Literal["", "in_memory", "in-memory", "24h"] | None


class CacheControl(StrictItem):
    """A mark that keeps a prompt, and the answer, in the prefix cache. Blocks before the mark and after it are kept."""

    type: Literal["ephemeral"]
    ttl: NotRequired[Literal["5m", "1h"] | None]  # after the last use; None: 5m


def longest(marks: Iterable[CacheControl | None]) -> CacheControl | None:
    """Return the mark that keeps a prompt longest, or None if there is no mark."""
    return max((mark for mark in marks if mark), key=seconds_of, default=None)


def seconds_of(mark: CacheControl | None) -> float:
    """Return the seconds for which a mark keeps a prompt; 0 without a mark."""
    return TTL[mark.get("ttl") or "5m"] if mark else 0.0
