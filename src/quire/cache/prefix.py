"""PrefixIndex: which full blocks can be reused, and why one could not."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

from quire.errors import BadValue
from quire.request import Miss, PrefixReport

DIGEST_SIZE = 16  # bytes
TOKEN_SIZE = 4  # bytes
MAX_CHILDREN = 4096  # of one parent, among which the nearest is looked for


def root_digest(salt: str) -> bytes:
    """What stands before the first block. Another salt gives another root, so nothing is shared between salts."""
    return blake2b(salt.encode(errors="surrogatepass"), digest_size=DIGEST_SIZE, person=b"quire root").digest()


def root_salt(salt: str, cache_salt: str, lora_digest: str) -> str:
    """The salt of a request's blocks: the cache's own, and what the request's K and V depend on besides tokens.

    Nothing in a cache_salt, which clients choose, can stand for an adapter.
    """
    return f"{salt} with {lora_digest}\0{cache_salt}" if lora_digest else f"{salt}\0{cache_salt}"


def block_digest(parent: bytes, tokens: bytes) -> bytes:
    """A block's name: its own tokens and, by the parent's name, all those before it."""
    return blake2b(parent + tokens, digest_size=DIGEST_SIZE).digest()


class CachedBlock(NamedTuple):
    """A full block whose K and V can be reused."""

    block: int
    digest: bytes
    parent: bytes  # digest of the block before it
    tokens: bytes  # its B token ids, int32


_made = partial(tuple.__new__, CachedBlock)  # as CachedBlock, in half of the time


class PrefixIndex:
    """The reusable blocks of one pool, by digest and by id.

    A digest finds a block, but is not believed: the tokens are compared too. The index also remembers what it lost,
    as many digests as it can hold blocks, so that a miss can be explained.
    """

    def __init__(self, num_blocks: int) -> None:
        self.by_block: dict[int, CachedBlock] = {}
        self._by_digest: dict[bytes, CachedBlock] = {}
        self._children: dict[bytes, list[bytes]] = {}  # digest -> tokens of the blocks after it, sorted
        self._roots: dict[bytes, set[bytes]] = {}  # a first block's tokens -> its parents, one for each salt
        self._evicted: OrderedDict[bytes, float] = OrderedDict()  # digest -> when, oldest first
        self._num_remembered = num_blocks

    def __len__(self) -> int:
        return len(self.by_block)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._by_digest

    def block_of(self, digest: bytes) -> int | None:
        """The block with that digest."""
        found = self._by_digest.get(digest)
        return None if found is None else found.block

    def block_before(self, block: int) -> int | None:
        """The block whose tokens stand before this one's. None: it is a first block, or that one is gone."""
        return self.block_of(self.by_block[block].parent)

    def find(self, digest: bytes, parent: bytes, tokens: bytes) -> int | None:
        """The block with these tokens after that parent."""
        found = self.entry(digest, parent, tokens)
        return None if found is None else found.block

    def entry(self, digest: bytes, parent: bytes, tokens: bytes) -> CachedBlock | None:
        """The entry of the block with these tokens after that parent: another one each time that it is published."""
        found = self._by_digest.get(digest)
        return found if found is not None and found.tokens == tokens and found.parent == parent else None

    def publish(self, block: int, digest: bytes, parent: bytes, tokens: bytes, *, first: bool) -> bool:
        """Offer a full block for reuse. False, and nothing changes, where another one has that digest."""
        if digest in self._by_digest:
            return False
        if block in self.by_block:
            raise BadValue(f"block {block} is published twice, with different tokens")
        cached = CachedBlock(block, digest, parent, tokens)
        self._by_digest[digest] = self.by_block[block] = cached
        self._add_child(parent, tokens, first=first)
        self._evicted.pop(digest, None)
        return True

    def _add_child(self, parent: bytes, tokens: bytes, *, first: bool) -> None:
        children = self._children.setdefault(parent, [])
        if len(children) < MAX_CHILDREN:
            insort(children, tokens)
        if first:
            self._roots.setdefault(tokens, set()).add(parent)

    def publish_new(self, blocks: Sequence[int], digests: list[bytes], tokens: list[bytes], *, first: bool) -> bool:
        """As `publish` of blocks one after the other. False, and nothing changes, where one of them is known already.

        digests: of the block before them, then theirs. first: whether the first of them is a request's first one.
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
        return True

    def evict(self, blocks: Iterable[int], now: float) -> list[CachedBlock]:
        """Forget what these blocks hold, whose memory is needed, and remember when that was. What it was."""
        evicted, lost = self._evicted, []
        for block in blocks:
            cached = self.by_block.pop(block, None)
            if cached is None:
                continue
            self._unlink(cached)
            if len(evicted) >= self._num_remembered:
                evicted.popitem(last=False)
            evicted[cached.digest] = now
            lost.append(cached)
        return lost

    def withdraw(self, block: int) -> CachedBlock:
        """Forget a block."""
        cached = self.by_block.pop(block)
        self._unlink(cached)
        return cached

    def _unlink(self, cached: CachedBlock) -> None:
        """Let no other table have a block that is forgotten."""
        del self._by_digest[cached.digest]
        siblings = self._children.get(cached.parent)
        if siblings == [cached.tokens]:  # as most are
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
        """Forget everything, also what was lost."""
        for table in (self.by_block, self._by_digest, self._children, self._roots, self._evicted):
            table.clear()

    # --------------------------------------------------------------------------------------- why there is no block

    def evicted_at(self, digest: bytes) -> float | None:
        """When the block of that digest was evicted, if that is remembered."""
        return self._evicted.get(digest)

    def known_under_another_root(self, tokens: bytes, parent: bytes) -> bool:
        """Whether these first tokens are cached, but under another salt."""
        return any(root != parent for root in self._roots.get(tokens, ()))

    def nearest(self, parent: bytes, tokens: bytes) -> int | None:
        """How many tokens the blocks after that parent have in common with these at most; None: there are none.

        In sorted order the nearest one stands beside the place of these tokens. Of a parent with more than MAX_CHILDREN
        blocks after it, as many are compared.
        """
        siblings = self._children.get(parent, [])
        at = bisect_left(siblings, tokens)
        return max((_common_tokens(other, tokens) for other in siblings[max(0, at - 1) : at + 1]), default=None)

    def audit(self) -> None:
        """Prove that all tables say the same. Raises BadValue where they do not."""
        if self.by_block.keys() != {cached.block for cached in self._by_digest.values()}:
            raise BadValue("the prefix index knows other blocks by id than by digest")
        for block, cached in self.by_block.items():
            if cached.block != block or self._by_digest.get(cached.digest) is not cached:
                raise BadValue(f"block {block} is in the prefix index under another id or digest")
        children: dict[bytes, set[bytes]] = {}
        for cached in self.by_block.values():
            children.setdefault(cached.parent, set()).add(cached.tokens)
        listed = {parent: set(tokens) for parent, tokens in self._children.items()}
        if self._num_remembered <= MAX_CHILDREN and listed != children:  # else some may have found no room there
            raise BadValue("the prefix index knows other blocks after their parents than by id")


def _common_tokens(a: bytes, b: bytes) -> int:
    """Tokens before the first difference of two blocks of the same size."""
    different = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    if different == 0:
        return len(a) // TOKEN_SIZE
    return ((different & -different).bit_length() - 1) // (8 * TOKEN_SIZE)


def why_missing(index: PrefixIndex, parent: bytes, digest: bytes, tokens: bytes, is_first: bool) -> tuple[Miss, float]:
    """Why a block does not stand there: with DIFFERS the tokens that it has in common with the nearest one, with
    EVICTED when that was.
    """
    evicted_at, common = index.evicted_at(digest), index.nearest(parent, tokens)
    if evicted_at is not None:
        return Miss.EVICTED, evicted_at
    if is_first and index.known_under_another_root(tokens, parent):
        return Miss.SALT, 0
    if common is None or (is_first and common == 0):
        return Miss.UNSEEN, 0
    return Miss.DIFFERS, common


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
