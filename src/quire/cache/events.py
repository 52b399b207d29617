"""What happens to blocks, as one typed stream: metrics, the inspector and the simulator read it.

From an empty pool on, the events alone rebuild every reference count and every request's blocks. BlockStored,
BlockRemoved and AllBlocksCleared are vLLM's KV events, with its fields and a few more. `time` is the scheduler's clock,
in seconds, at the step's start; `group` is the index of the cache group whose pool the block ids belong to.

They are not frozen, since a frozen one takes four times as long to make. Whoever hears one leaves it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(slots=True)
class BlocksAllocated:
    """Free blocks went to a request: one owner each."""

    time: float
    group: int
    request_id: str
    blocks: list[int]


@dataclass(slots=True)
class BlocksShared:
    """A request found a part of its prefix in these blocks: one owner more each."""

    time: float
    group: int
    request_id: str
    blocks: list[int]


@dataclass(slots=True)
class BlocksForked:
    """A request began as a copy of its parent and shares these blocks with it: one owner more each."""

    time: float
    group: int
    parent_id: str
    request_id: str
    blocks: list[int]


@dataclass(slots=True)
class BlockCopied:
    """A request is about to write into a block that others share, and gets a free one with the same contents."""

    time: float
    group: int
    request_id: str
    src: int  # loses this owner
    dst: int


@dataclass(slots=True)
class BlocksFreed:
    """A request gave these blocks back: one owner less each."""

    time: float
    group: int
    request_id: str
    blocks: list[int]


@dataclass(slots=True)
class BlocksSwappedOut:
    """A preempted request's blocks moved to the host: one owner less each, one more for the host block beside it."""

    time: float
    group: int
    request_id: str
    blocks: list[int]
    host_blocks: list[int]


@dataclass(slots=True)
class BlocksSwappedIn:
    """A request came back from the host: one owner more for each block, one less for the host block beside it."""

    time: float
    group: int
    request_id: str
    blocks: list[int]
    host_blocks: list[int]


@dataclass(slots=True)
class HostBlocksFreed:
    """A request that had been swapped out ended, or starts anew: one owner less for each host block."""

    time: float
    group: int
    request_id: str
    host_blocks: list[int]


@dataclass(slots=True)
class BlockStored:
    """Full blocks can be reused from now on by every request that begins with the same tokens under the same salt.

    Each but the first one stands after the one before it.
    """

    time: float
    group: int
    request_id: str
    blocks: list[int]
    block_hashes: list[bytes]
    parent_block_hash: bytes | None  # of the block before the first one; None: that one is a request's first
    token_ids: list[int]
    block_size: int
    lora: str | None = None  # the name of its request's adapter; only blocks of that one's weights are shared


@dataclass(slots=True)
class BlockRemoved:
    """Blocks can no longer be reused."""

    time: float
    group: int
    blocks: list[int]
    block_hashes: list[bytes]
    evicted: bool  # their memory was needed; else states that their request passed and that are not kept for others


@dataclass(slots=True)
class AllBlocksCleared:
    """No block of the group can be reused any more."""

    time: float
    group: int


@dataclass(slots=True)
class DiskBlockStored:
    """A block is on the disk from now on, wherever else it is."""

    time: float
    group: int
    block_hashes: list[bytes]


@dataclass(slots=True)
class DiskBlockRemoved:
    """A block is no longer on the disk."""

    time: float
    group: int
    block_hashes: list[bytes]


CacheEvent: TypeAlias = (
    BlocksAllocated
    | BlocksShared
    | BlocksForked
    | BlockCopied
    | BlocksFreed
    | BlocksSwappedOut
    | BlocksSwappedIn
    | HostBlocksFreed
    | BlockStored
    | BlockRemoved
    | AllBlocksCleared
    | DiskBlockStored
    | DiskBlockRemoved
)
Listener: TypeAlias = Callable[[CacheEvent], None]
