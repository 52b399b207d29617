"""Cache events, one typed stream for metrics, the inspector and the simulator.

Starting from an empty pool, the events suffice to rebuild every reference count and every request's blocks.
BlockStored, BlockRemoved and AllBlocksCleared are vLLM's KV events, with its fields and a few more. `time` is the
scheduler's clock, in seconds, at the step's start; `group` is the index of the cache group whose pool the block ids
belong to.

They are not frozen, because a frozen dataclass takes four times as long to create. Listeners must not change them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(slots=True)
class BlocksAllocated:
    """Free blocks were allocated to a request: one owner each."""

    time: float
    group: int
    request_id: str
    blocks: list[int]


@dataclass(slots=True)
class BlocksShared:
    """A request reuses these blocks as a part of its prefix: one more owner each."""

    time: float
    group: int
    request_id: str
    blocks: list[int]


@dataclass(slots=True)
class BlocksForked:
    """A request began as a copy of its parent and shares these blocks with it: one more owner each."""

    time: float
    group: int
    parent_id: str
    request_id: str
    blocks: list[int]


@dataclass(slots=True)
class BlockCopied:
    """A request is about to write to a shared block, and gets a free block with the same contents."""

    time: float
    group: int
    request_id: str
    src: int  # loses this owner
    dst: int


@dataclass(slots=True)
class BlocksFreed:
    """A request freed these blocks: one owner less each."""

    time: float
    group: int
    request_id: str
    blocks: list[int]


@dataclass(slots=True)
class BlocksSwappedOut:
    """A preempted request's blocks moved to the host: one owner less each, one more for the matching host block."""

    time: float
    group: int
    request_id: str
    blocks: list[int]
    host_blocks: list[int]


@dataclass(slots=True)
class BlocksSwappedIn:
    """A request was swapped in: one more owner for each block, one less for the matching host block."""

    time: float
    group: int
    request_id: str
    blocks: list[int]
    host_blocks: list[int]


@dataclass(slots=True)
class HostBlocksFreed:
    """A swapped-out request ended or restarts: one owner less for each host block."""

    time: float
    group: int
    request_id: str
    host_blocks: list[int]


@dataclass(slots=True)
class BlockStored:
    """Full blocks can be reused from now on by every request that begins with the same tokens under the same salt.

    They are consecutive blocks of a sequence.
    """

    time: float
    group: int
    request_id: str
    blocks: list[int]
    block_hashes: list[bytes]
    parent_block_hash: bytes | None  # of the block before the first one; None: the first one is a request's first block
    token_ids: list[int]
    block_size: int
    lora: str | None = None  # name of its request's adapter; blocks are shared only with requests of the same weights
    # For each block the images in it, see `ImageRows.lying_in`; None: no block has any. Their rows have placeholders.
    images: list[list[tuple[str, int]] | None] | None = None


@dataclass(slots=True)
class BlockRemoved:
    """Blocks can no longer be reused."""

    time: float
    group: int
    blocks: list[int]
    block_hashes: list[bytes]
    evicted: bool  # True: their memory was needed; False: states that their request passed, not kept for reuse


@dataclass(slots=True)
class AllBlocksCleared:
    """No block of the group can be reused any more."""

    time: float
    group: int


@dataclass(slots=True)
class DiskBlockStored:
    """A block was stored on the disk; it may also be elsewhere."""

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
