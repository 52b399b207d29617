"""Placement: a record of the replica that samples of a prompt went to, and of the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from quire.fleet.score import PlacementChoice

# Descriptions of the parts of a cost for the inspector, in the order of ScoreParts.
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "queue": "the work before it",
        "step": "the step of its first token",
        "compute": "its tokens that are not cached",
        "delay": "the delay of other requests",
        "disk": "reading from the disk",
        "peer": "reading from another replica",
        "decode": "its new tokens",
        "room": "waiting for a slot and blocks",
        "evict": "the blocks evicted for it",
    }
)


class Cause(NamedTuple):
    """The reason why samples need a replica."""

    reason: str  # "new": they had no replica before; otherwise theirs was "lost", "failed" or "drained"
    replica: str | None  # the URL of the previous replica


NEW = Cause("new", None)


@dataclass(eq=False)
class Placement:
    """Samples that a replica accepted."""

    time: float  # s since 1970
    request: str  # the name of the request
    samples: tuple[int, ...]  # empty for a beam search, which is placed as a whole
    num_delivered: int  # tokens of the first sample that were delivered before
    cause: Cause
    choice: PlacementChoice
    # Time from the last token before it, or from the request's arrival, to the first token after it; set by Fleet.
    seconds: float | None = None

    @property
    def replica(self) -> str:
        """The URL of the replica."""
        return self.choice.best.candidate.name


def reason_of(choice: PlacementChoice) -> str:
    """Return a readable reason why the request went to the first replica of the ranking."""
    best, *others = choice.ranking
    if not others:
        return "it is the only replica that can take the request"
    if choice.num_tied > 1:
        tied, count = choice.ranking[1 : choice.num_tied], f"{choice.num_tied} replicas cost the same within 3 %"
        if all(one.uncached_tokens > best.uncached_tokens for one in tied):
            return f"{count}; it has the fewest tokens to compute, {best.uncached_tokens}"
        tied = tuple(one for one in tied if one.uncached_tokens == best.uncached_tokens)
        if all(one.candidate.state.held_blocks > best.candidate.state.held_blocks for one in tied):
            return f"{count}; of those with the fewest tokens to compute it holds the fewest blocks"
        return f"{count}; the request's name decides"
    second = others[0]
    costs, less = second.parts._asdict(), best.parts._asdict()
    part = max(PARTS, key=lambda name: costs[name] - less[name])
    saved = second.parts.total - best.parts.total
    return f"it costs {1000 * saved:.1f} ms less than the next one, most of it for {PARTS[part]}"
