"""PrefixIndex: the full blocks that can be reused, and the reasons for misses."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, Protocol

from quire.errors import BadValue
from quire.request import Miss, PrefixReport

DIGEST_SIZE = 16  # bytes
TOKEN_SIZE = 4  # bytes
MAX_CHILDREN = 4096  # of one parent, among which the nearest is searched


def root_digest(salt: str) -> bytes:
    """Return the digest that precedes the first block. It depends on the salt, so nothing is shared between salts."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=DIGEST_SIZE, person=b"quire root").digest()


def root_salt(salt: str, cache_salt: str, lora_digest: str) -> str:
    """Return the salt of a request's blocks: the cache's, and everything but tokens that its K and V depend on.

    No cache_salt, which clients choose, can imitate an adapter.
    """
    return f"{salt} with {lora_digest}\0{cache_salt}" if lora_digest else f"{salt}\0{cache_salt}"


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """Return a block's name: a digest of its tokens and, through the parent's name, of all tokens before it."""
    return blake2b(parent + tokens, digest_size=DIGEST_SIZE).digest()


class Blocks(Protocol):
    """Tokens that are not in an array, but have the bytes of their blocks."""

    def blocks(self, first: int, stop: int, size: int) -> list[bytes]:
        """Return the bytes of each of these full blocks of `size` tokens."""


def block_tokens(tokens: array[int] | Blocks, first: int, stop: int, size: int) -> list[bytes]:
    """Return the bytes of each of these full blocks of `size` tokens."""
    if not isinstance(tokens, array):
        return tokens.blocks(first, stop, size)
    data, width = tokens[first * size : stop * size].tobytes(), size * TOKEN_SIZE
    return [data[at : at + width] for at in range(0, len(data), width)]


class CachedBlock(NamedTuple):
    """A full block whose K and V can be reused."""

    block: int
    digest: bytes
    parent: bytes  # digest of the block before it
    tokens: bytes  # its B token ids, int32


_made = partial(tuple.__new__, CachedBlock)  # equivalent to CachedBlock, in half of the time


class PrefixIndex:
    """The reusable blocks of one pool, by digest and by id.

    A digest finds a block, but is not trusted: the tokens are compared too. The index also remembers the digests that
    it lost, up to the number of blocks, so that a miss can be explained.
    """

    def __init__(self, num_blocks: int) -> None:
        self.by_block: dict[int, CachedBlock] = {}
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._children: dict[bytes, list[bytes]] = {}  # digest -> tokens of the blocks after it, sorted
        self._roots: dict[bytes, set[bytes]] = {}  # tokens of a first block -> its parents, one for each salt
        self._evicted: OrderedDict[bytes, float] = OrderedDict()  # digest -> time of eviction, oldest first
        # Of blocks that were kept for a key, now or when they were evicted: the reason why they no longer were.
        self.ended: dict[bytes, Miss] = {}
        self._num_remembered = num_blocks

    def __len__(self) -> int:
        return len(self.by_block)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._by_digest

    def block_of(self, digest: bytes) -> int | None:
        """Return the block with that digest, or None."""
        found = self._by_digest.get(digest)
        return None if found is None else found.block

    def block_before(self, block: int) -> int | None:
        """Return the block that precedes this one. None: it is a first block, or the other one was evicted."""
        return self.block_of(self.by_block[block].parent)

    def find(self, digest: bytes, parent: bytes, tokens: bytes) -> int | None:
        """Return the block with these tokens after that parent, or None."""
        found = self.entry(digest, parent, tokens)
        return None if found is None else found.block

    def entry(self, digest: bytes, parent: bytes, tokens: bytes) -> CachedBlock | None:
        """Return the entry of the block with these tokens after that parent, a new one after each publication."""
        found = self._by_digest.get(digest)
        return found if found is not None and found.tokens == tokens and found.parent == parent else None

    def publish(self, block: int, digest: bytes, parent: bytes, tokens: bytes, *, first: bool) -> bool:
        """Offer a full block for reuse. Return False, and change nothing, if another block has that digest."""
        if digest in self._by_digest:
            return False
        if block in self.by_block:
            raise BadValue(f"block {block} is published twice, with different tokens")
        cached = CachedBlock(block, digest, parent, tokens)
        self._by_digest[digest] = self.by_block[block] = cached
        self._add_child(parent, tokens, first=first)
        self._evicted.pop(digest, None)
        self.ended.pop(digest, None)
        return True

    def _add_child(self, parent: bytes, tokens: bytes, *, first: bool) -> None:
        children = self._children.setdefault(parent, [])
        if len(children) < MAX_CHILDREN:
            insort(children, tokens)
        if first:
            self._roots.setdefault(tokens, set()).add(parent)

    def publish_new(self, blocks: Sequence[int], digests: list[bytes], tokens: list[bytes], *, first: bool) -> bool:
        """Publish consecutive blocks at once. Return False, and change nothing, if any of them is already known.

        digests: of the block before them, then theirs. first: whether the first of them is a request's first block.
        """
        parents, own = digests[:-1], digests[1:]
        is_new = len({*own}) == len(own) and self._by_digest.keys().isdisjoint(own)
        if not is_new or not (self.by_block.keys().isdisjoint(blocks) and self._children.keys().isdisjoint(own)):
            return False
        cached = list(map(_made, zip(blocks, own, parents, tokens, strict=True)))
        self._by_digest.update(zip(own, cached, strict=True))
        self.by_block.update(zip(blocks, cached, strict=True))
        self._add_child(parents[0], tokens[0], first=first)
        self._children.update(zip(parents[1:], [[those] for those in tokens[1:]], strict=True))
        if not self._evicted.keys().isdisjoint(own):
            for digest in own:
                self._evicted.pop(digest, None)
                self.ended.pop(digest, None)
        return True

    def evict(self, blocks: Iterable[int], times: Iterable[float]) -> list[CachedBlock]:
        """Remove these blocks, whose memory is needed at these times, and return the removed entries."""
        evicted, lost = self._evicted, []
        for block, time in zip(blocks, times, strict=False):
            cached = self.by_block.pop(block, None)
            if cached is not None:
                self._unlink(cached)
                evicted[cached.digest] = time
                lost.append(cached)
        for _ in range(len(evicted) - self._num_remembered):
            self.ended.pop(evicted.popitem(last=False)[0], None)
        return lost

    def withdraw(self, block: int) -> CachedBlock:
        """Remove a block."""
        cached = self.by_block.pop(block)
        self._unlink(cached)
        self.ended.pop(cached.digest, None)
        return cached

    def _unlink(self, cached: CachedBlock) -> None:
        """Remove a block from the other tables."""
        del self._by_digest[cached.digest]
        siblings = self._children.get(cached.parent)
        if siblings == [cached.tokens]:  # the common case
            del self._children[cached.parent]
        elif siblings is not None:
            at = bisect_left(siblings, cached.tokens)
            if siblings[at : at + 1] == [cached.tokens]:
                del siblings[at]
        roots = self._roots.get(cached.tokens)
        if roots is not None:
            roots.discard(cached.parent)
            if not roots:
                del self._roots[cached.tokens]

    def clear(self) -> None:
        """Clear the index, including the evicted digests."""
        for table in (self.by_block, self._by_digest, self._children, self._roots, self._evicted, self.ended):
            table.clear()

    # --------------------------------------------------------------------------------------- why there is no block

    def evicted_at(self, digest: bytes) -> float | None:
        """Return the time when the block of that digest was evicted, if known."""
        return self._evicted.get(digest)

    def known_under_another_root(self, tokens: bytes, parent: bytes) -> bool:
        """Return whether these first tokens are cached under another salt."""
        return any(root != parent for root in self._roots.get(tokens, ()))

    def nearest(self, parent: bytes, tokens: bytes) -> int | None:
        """Return the longest common prefix, in tokens, of these tokens and any block after that parent.

        None if no block follows the parent. In sorted order the nearest one is adjacent to the position of these
        tokens. Of a parent with more than MAX_CHILDREN blocks after it, only that many are compared.
        """
        siblings = self._children.get(parent, [])
        at = bisect_left(siblings, tokens)
        return max((_common_tokens(other, tokens) for other in siblings[max(0, at - 1) : at + 1]), default=None)

    def audit(self) -> None:
        """Verify that all tables agree. Raises BadValue if they do not."""
        if self.by_block.keys() != {cached.block for cached in self._by_digest.values()}:
            raise BadValue("the prefix index has different blocks by id than by digest")
        for block, cached in self.by_block.items():
            if cached.block != block or self._by_digest.get(cached.digest) is not cached:
                raise BadValue(f"block {block} is in the prefix index under another id or digest")
        children: dict[bytes, set[bytes]] = {}
        for cached in self.by_block.values():
            children.setdefault(cached.parent, set()).add(cached.tokens)
        listed = {parent: set(tokens) for parent, tokens in self._children.items()}
        if self._num_remembered <= MAX_CHILDREN and listed != children:  # else some were not listed for lack of room
            raise BadValue("the prefix index has different blocks by parent than by id")
        if not self.ended.keys() <= self._by_digest.keys() | self._evicted.keys():
            raise BadValue("the prefix index knows why blocks are no longer kept that it does not know")


def _common_tokens(a: bytes, b: bytes) -> int:
    """Return the number of tokens before the first difference of two blocks of the same size."""
    different = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    if different == 0:
        return len(a) // TOKEN_SIZE
    return ((different & -different).bit_length() - 1) // (8 * TOKEN_SIZE)


def why_missing(index: PrefixIndex, parent: bytes, digest: bytes, tokens: bytes, is_first: bool) -> tuple[Miss, float]:
    """Return the reason why a block is missing.

    With DIFFERS, also return the number of tokens that it has in common with the nearest block, with EVICTED, EXPIRED
    and BUDGET the time of the eviction.
    """
    evicted_at, common = index.evicted_at(digest), index.nearest(parent, tokens)
    if evicted_at is not None:
        return index.ended.get(digest, Miss.EVICTED), evicted_at
    if is_first and index.known_under_another_root(tokens, parent):
        return Miss.SALT, 0
    if common is None or (is_first and common == 0):
        return Miss.UNSEEN, 0
    return Miss.DIFFERS, common


@dataclass
class HitCounts:
    """Counters of the prefix cache's hits for requests when they first ran."""

    hits: int = 0  # every full block of the prompt was cached
    partial_hits: int = 0
    misses: int = 0  # nothing was cached, or the prompt has no full block
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def count(self, report: PrefixReport) -> None:
        """Count one request."""
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
        """Share of the prompt tokens that were cached."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
