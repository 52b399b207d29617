"""How the cache is used: what is reserved, owned, shared and wasted, and how often a prefix was found."""

from __future__ import annotations

from dataclasses import dataclass

from quire.request import PrefixReport


@dataclass(frozen=True)
class CacheUsage:
    """How the blocks of all groups are used at one moment."""

    block_size: int  # B
    num_blocks: int  # reserved: in the pools
    used_blocks: int  # owned by at least one request
    logical_blocks: int  # entries of all block tables: what would be owned if nothing were shared
    cached_blocks: int  # owned by nobody, but still reusable
    filled_slots: int  # slots of the owned blocks that hold a token
    host_blocks: int = 0  # owned by requests that are swapped out

    @property
    def reserved_slots(self) -> int:
        """Slots of all blocks there are."""
        return self.num_blocks * self.block_size

    @property
    def used_slots(self) -> int:
        """Slots of the owned blocks."""
        return self.used_blocks * self.block_size

    @property
    def shared_slots(self) -> int:
        """Slots that sharing saves: what would be owned besides if every request had its own blocks."""
        return (self.logical_blocks - self.used_blocks) * self.block_size

    @property
    def wasted_slots(self) -> int:
        """Owned slots that hold nothing: the open ends of partly filled blocks."""
        return self.used_slots - self.filled_slots


@dataclass
class HitCounts:
    """What requests found in the prefix cache when they first ran."""

    hits: int = 0  # every full block of the prompt was there
    partial_hits: int = 0
    misses: int = 0  # nothing was there, or the prompt has no full block
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def count(self, report: PrefixReport) -> None:
        """Take in one request."""
        self.prompt_tokens += report.num_prompt
        self.cached_tokens += report.num_cached
        if report.num_cached == 0:
            self.misses += 1
        elif report.miss is None:
            self.hits += 1
        else:
            self.partial_hits += 1

    @property
    def rate(self) -> float:
        """Share of the prompt tokens that need not be computed."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
