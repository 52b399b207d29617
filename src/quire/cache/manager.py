"""BlockManager: from a request's tokens to its blocks."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from quire.cache import events
from quire.cache.events import CacheEvent, Listener
from quire.cache.pool import BlockPool
from quire.cache.prefix import HitCounts, PrefixIndex, block_digest, root_digest
from quire.errors import BadValue
from quire.request import Miss, PrefixReport, Request

log = logging.getLogger("quire")

NONE = -1  # instead of a block


@dataclass(frozen=True)
class Heads:
    """The heads of a layer's attention: they decide how much memory a token takes there."""

    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    latent: int | None = None  # V is the first so many numbers of K, and not stored again; None: V is as wide as K


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose requests share one block table: with the same window and heads. Most models have a single group."""

    layers: tuple[int, ...]  # those with memory: a layer may read another one's, and then is not here
    window: int | None = None  # keys that a row of these layers sees, its own included; None: all before it
    heads: Heads = Heads(1, 1, 1)  # nothing here depends on them


@dataclass(frozen=True)
class Match:
    """The blocks in which a waiting request would find the beginning of its tokens."""

    num_blocks: int  # full blocks that it need not compute
    first: list[int]  # of each group, the first of them that a later row can see
    blocks: list[array[int]]  # of each group, blocks first..num_blocks


@dataclass(frozen=True)
class Move:
    """One block's contents go from src to dst, both in pools of that group."""

    group: int
    src: int
    dst: int


def most_blocks(num_tokens: int, growth: int, window: int | None, block_size: int) -> int:
    """Blocks that a request owns at most in a group of that window, on its way to num_tokens, `growth` at a time."""
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    # What the first row of a step sees before itself, then the step's tokens; both ends may cut a block.
    return min(whole, -(-(window - 1 + growth) // block_size) + 1)


class BlockManager:
    """Hands blocks to requests as they grow and takes them back. Knows ids, counts and tokens, no tensors.

    A request owns, in every group, the blocks that its computed and planned tokens need; full ones may be shared with
    any request that begins with the same tokens, the last one only with siblings, until one of them writes into it.
    In a group with a window a request frees the blocks that no later row can see; their entries stay at the
    front of its table, where nobody reads them.

    Whatever raises here (OutOfBlocks) has taken nothing.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        block_size: int,
        max_growth: int,
        *,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        salt: str = "",
    ) -> None:
        """num_blocks: N of each group; num_host_blocks: the same on the host, for requests that are swapped out.

        max_growth: tokens that a request grows by in one step at most. enable_prefix_caching: without it only siblings
        share. salt: what, besides a request's own salt, makes K and V of the same tokens differ, such as their dtype.
        """
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_growth = max_growth
        self.enable_prefix_caching = enable_prefix_caching
        self.salt = salt
        self.pools = tuple(BlockPool(num_blocks) for _ in groups)
        self.host_pools = tuple(BlockPool(num_host_blocks) for _ in groups)
        self.indexes = tuple(PrefixIndex(num_blocks) for _ in groups)
        self.hits = HitCounts()
        self.now = 0.0  # seconds; set by Scheduler at the start of a step
        self.listeners: list[Listener] = []
        self.has_windows = any(group.window is not None for group in groups)  # requests free blocks as they go on

    def _tell(self, event: CacheEvent) -> None:
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed and is not called again")
                self.listeners.remove(listener)

    # --------------------------------------------------------------------------------------------- counting

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens take in one group."""
        return -(-num_tokens // self.block_size)

    def most_blocks(self, num_tokens: int, growth: int, group: CacheGroup) -> int:
        """Blocks of the group that a request owns at most on its way to this many tokens, `growth` at a time."""
        return most_blocks(num_tokens, min(growth, self.max_growth), group.window, self.block_size)

    def has_free(self, counts: Sequence[int]) -> bool:
        """Whether each group has that many free blocks."""
        return all(count <= pool.num_free for count, pool in zip(counts, self.pools, strict=True))

    def lacking(self, request: Request) -> list[int]:
        """Blocks of each group that a running request still lacks to compute all tokens that it has."""
        return [
            max(0, self.most_blocks(len(request.tokens), request.num_missing, group) - len(self.owned(request, g)))
            for g, group in enumerate(self.groups)
        ]

    def owned(self, request: Request, group: int) -> array[int]:
        """The blocks that the request owns in the group of that index."""
        return request.cache.block_ids[group][request.cache.num_freed[group] :]

    # ------------------------------------------------------------------------------------------ prefix cache

    def digest(self, request: Request, index: int) -> bytes:
        """The digest of the request's full block of that index."""
        self._know_digests(request, index + 1)
        return request.cache.digests[index + 1]

    def _know_digests(self, request: Request, count: int) -> None:
        """Extend the request's digests to its first `count` blocks."""
        digests, size = request.cache.digests, self.block_size
        if not digests:
            salt = f"{self.salt}\0{request.cache_salt}"
            if not self.enable_prefix_caching:  # a salt that nobody but its siblings has
                salt += f"\0{request.schedule.rank[1]}"
            digests.append(root_digest(salt))
        for i in range(len(digests) - 1, count):
            digests.append(block_digest(digests[i], request.tokens[i * size : (i + 1) * size].tobytes()))

    def shares(self, request: Request) -> bool:
        """Whether others, or without a prefix cache its siblings, may use the request's full blocks, and it theirs."""
        return self.enable_prefix_caching or request.group is not None

    def num_reusable(self, request: Request) -> int:
        """Full blocks of the request that may be taken from the cache."""
        if not self.shares(request):
            return 0
        usable = len(request.tokens)
        if request.sampling.prompt_logprobs is not None and request.next_prompt_logprob < request.num_prompt - 1:
            usable = request.next_prompt_logprob
        return usable // self.block_size

    def _first_seen(self, num_tokens: int, window: int | None) -> int:
        """The first block that the row after num_tokens tokens sees."""
        return 0 if window is None else max(0, num_tokens - window + 1) // self.block_size

    def match(self, request: Request) -> Match:
        """Find the longest prefix of the request's tokens of which every block that is needed stands in every group."""
        count, last = self.num_reusable(request), len(request.tokens) - 1
        self._know_digests(request, count)
        found: list[array[int]] = [array("i")] * len(self.groups)
        starts: dict[int, list[int]] = {}  # of a windowed group, for each count, where the blocks begin that lead to it
        for g in sorted(range(len(self.groups)), key=lambda g: self.groups[g].window is not None):
            if self.groups[g].window is None:
                found[g] = array("i", takewhile(lambda block: block != NONE, self._find(request, g, count)))
                count = len(found[g])
            else:
                found[g] = array("i", self._find(request, g, count))
                starts[g] = [0]
                for i, block in enumerate(found[g]):
                    starts[g].append(i + 1 if block == NONE else starts[g][i])

        def seen(g: int) -> int:
            return self._first_seen(min(count * self.block_size, last), self.groups[g].window)

        while count > 0 and any(starts[g][count] > seen(g) for g in starts):
            count -= 1
        first = [min(count, seen(g)) for g in range(len(self.groups))]
        return Match(count, first, [blocks[start:count] for blocks, start in zip(found, first, strict=True)])

    def _find(self, request: Request, group: int, count: int) -> Iterator[int]:
        """The cached blocks with the request's first tokens, one by one; NONE for one that is not there."""
        size, tokens, digests, find = self.block_size, request.tokens, request.cache.digests, self.indexes[group].find
        for i in range(count):
            block = find(digests[i + 1], digests[i], tokens[i * size : (i + 1) * size].tobytes())
            yield NONE if block is None else block

    def needed(self, request: Request, match: Match) -> list[int]:
        """Free blocks of each group that a waiting request takes to compute all of its tokens."""
        growth = len(request.tokens) - match.num_blocks * self.block_size
        counts = []
        for group, pool, blocks in zip(self.groups, self.pools, match.blocks, strict=True):
            idle = sum(pool.ref_counts[block] == 0 for block in blocks)  # leave the free order
            most = self.most_blocks(len(request.tokens), growth, group)
            counts.append(max(0, most - len(blocks)) + idle)
        return counts

    def admit(self, request: Request, match: Match) -> None:
        """Give a waiting request the blocks that it was found to share. Its last token is always computed."""
        if request.cache.prefix_report is None:
            request.cache.prefix_report = self._explain(request, match)
            self.hits.count(request.cache.prefix_report)
        request.cache.block_ids = [
            array("i", bytes(4 * first)) + blocks for first, blocks in zip(match.first, match.blocks, strict=True)
        ]
        request.cache.num_freed = list(match.first)
        request.cache.num_cached = match.num_blocks * self.block_size
        request.cache.num_computed = min(request.cache.num_cached, len(request.tokens) - 1)
        request.cache.num_published = match.num_blocks
        for g, (pool, blocks) in enumerate(zip(self.pools, match.blocks, strict=True)):
            pool.share(blocks)
            if self.listeners and blocks:
                self._tell(events.BlocksShared(self.now, g, request.id, blocks.tolist()))

    def _explain(self, request: Request, match: Match) -> PrefixReport:
        size, at = self.block_size, match.num_blocks
        full = request.num_prompt // size
        reason, first_difference, seconds_ago = None, None, None
        if at >= full:
            reason = Miss.SHORT if full == 0 else None
        elif not self.enable_prefix_caching:
            reason = Miss.DISABLED
        elif at >= self.num_reusable(request):
            reason = Miss.PROMPT_LOGPROBS
        else:
            tokens = request.tokens[at * size : (at + 1) * size].tobytes()
            parent, digest = request.cache.digests[at], request.cache.digests[at + 1]
            index = next((index for index in self.indexes if digest not in index), self.indexes[0])
            evicted_at, common = index.evicted_at(digest), index.nearest(parent, tokens)
            if evicted_at is not None:
                reason, seconds_ago = Miss.EVICTED, self.now - evicted_at
            elif at == 0 and index.known_under_another_root(tokens, parent):
                reason = Miss.SALT
            elif common is None or at == common == 0:
                reason = Miss.UNSEEN
            else:
                reason, first_difference = Miss.DIFFERS, at * size + common
        return PrefixReport(request.num_prompt, min(at, full) * size, size, reason, first_difference, seconds_ago)

    def _publish(self, request: Request) -> None:
        """Offer the request's full blocks for reuse, those of them that were not offered before.

        From the first position on whose K or V is not finite, none is offered.
        """
        size, full = self.block_size, request.cache.num_computed // self.block_size
        if request.cache.nonfinite_at is not None:
            full = min(full, request.cache.nonfinite_at // size)
        self._know_digests(request, full)
        for i in range(request.cache.num_published, full):
            tokens = request.tokens[i * size : (i + 1) * size]
            parent, digest = request.cache.digests[i], request.cache.digests[i + 1]
            for g, index in enumerate(self.indexes):
                block = request.cache.block_ids[g][i]
                if i >= request.cache.num_freed[g] and block not in index.by_block:
                    new = index.publish(block, digest, parent, tokens.tobytes(), first=i == 0)
                    if new and self.listeners:
                        names = ([block], [digest], parent if i else None)
                        self._tell(events.BlockStored(self.now, g, request.id, *names, tokens.tolist(), size))
        request.cache.num_published = full

    def reset_prefix_cache(self) -> None:
        """Forget all reusable blocks. Running requests keep theirs."""
        for g, (pool, index) in enumerate(zip(self.pools, self.indexes, strict=True)):
            pool.drop([block for block in index.by_block if pool.ref_counts[block] == 0])
            index.clear()
            if self.listeners:
                self._tell(events.AllBlocksCleared(self.now, g))

    # ---------------------------------------------------------------------------------------------- growing

    def most_taken(self, request: Request, num_tokens: int) -> int:
        """Blocks of each group that `grow` takes at most: only siblings share a block that is partly filled."""
        return max(0, self.blocks_for(num_tokens) - len(request.cache.block_ids[0])) + (request.group is not None)

    def grow(self, request: Request, num_tokens: int, copies: list[Move]) -> bool:
        """Give a running request room for its first num_tokens tokens. False, with nothing taken, if blocks are short.

        If the first of them falls into a block that others share, it gets a copy of its own: the copy is added to
        `copies`, to be made before anything is written.
        """
        tables, size = request.cache.block_ids, self.block_size
        count = -(-num_tokens // size) - len(tables[0])
        written = (
            request.cache.num_computed
            if request.cache.num_computed > request.cache.num_cached
            else request.cache.num_cached
        )
        at = written // size  # the block that is written first, if it is partly filled
        is_shared = False
        if written % size and written < num_tokens:
            for pool, table in zip(self.pools, tables, strict=True):
                is_shared = is_shared or pool.ref_counts[table[at]] > 1
        if count <= 0 and not is_shared:
            return True
        copied = [is_shared and pool.ref_counts[t[at]] > 1 for pool, t in zip(self.pools, tables, strict=True)]
        wanted = [max(0, count) + own for own in copied]
        if not self.has_free(wanted):
            return False
        for g, blocks in enumerate(self._take(wanted)):
            if copied[g]:
                move = Move(g, tables[g][at], blocks.pop())
                tables[g][at] = move.dst
                self.pools[g].release([move.src])  # it has other owners
                copies.append(move)
                if self.listeners:
                    self._tell(events.BlockCopied(self.now, g, request.id, move.src, move.dst))
            tables[g].extend(blocks)
            if self.listeners and blocks:
                self._tell(events.BlocksAllocated(self.now, g, request.id, blocks.tolist()))
        return True

    def _take(self, counts: Sequence[int]) -> list[array[int]]:
        """Free blocks of each group; what they held is evicted."""
        taken: list[array[int]] = []
        try:
            for count, pool in zip(counts, self.pools, strict=True):
                taken.append(pool.allocate(count))
        except BaseException:
            for g, blocks in enumerate(taken):
                self.pools[g].release(blocks, self.indexes[g].by_block)
            raise
        for g, (index, blocks) in enumerate(zip(self.indexes, taken, strict=True)):
            for block in blocks:
                if block in index.by_block:
                    cached = index.evict(block, self.now)
                    if self.listeners:
                        self._tell(events.BlockRemoved(self.now, g, [block], [cached.digest]))
        return taken

    def advance(self, request: Request, num_new: int) -> None:
        """The request's next `num_new` tokens are computed: full blocks are published, unseen ones freed."""
        request.cache.num_computed += num_new
        full = request.cache.num_computed // self.block_size
        if full > request.cache.num_published and self.shares(request):
            self._publish(request)
        if self.has_windows:
            self._trim(request)

    def _trim(self, request: Request) -> None:
        """Free what lies wholly below the window of the request's next row."""
        for g, group in enumerate(self.groups):
            first = self._first_seen(request.cache.num_computed, group.window)
            self._free(request, g, request.cache.block_ids[g][request.cache.num_freed[g] : first])
            request.cache.num_freed[g] = max(first, request.cache.num_freed[g])

    def _free(self, request: Request, group: int, blocks: Sequence[int]) -> None:
        """Take these blocks back; the last ones are freed first, so that tails are evicted before heads."""
        if blocks:
            self.pools[group].release(reversed(blocks), self.indexes[group].by_block)
            if self.listeners:
                self._tell(events.BlocksFreed(self.now, group, request.id, list(blocks)))

    def release(self, request: Request) -> None:
        """Free all blocks of the request, on the host too. What it had computed is forgotten."""
        for g in range(len(request.cache.block_ids)):
            self._free(request, g, self.owned(request, g))
        for g, hosts in enumerate(request.cache.host_block_ids):
            self.host_pools[g].release(hosts)
            if self.listeners and hosts:
                self._tell(events.HostBlocksFreed(self.now, g, request.id, hosts.tolist()))
        request.cache.block_ids, request.cache.host_block_ids, request.cache.num_freed = [], [], []
        request.cache.num_computed = request.cache.num_cached = request.cache.num_published = 0
        request.cache.nonfinite_at = None

    def forget_tokens(self, request: Request) -> None:
        """The request, which owns nothing, gets other tokens: their blocks have other digests."""
        request.cache.digests = []

    def mark_nonfinite(self, request: Request, position: int) -> None:
        """K or V of that position are not finite: no block from it on is published."""
        if request.cache.nonfinite_at is None:
            request.cache.nonfinite_at = position

    def forget_uncomputed(self, request: Request) -> None:
        """Drop a mark beyond what is computed: that row was a guess that was wrong."""
        cache = request.cache
        if cache.nonfinite_at is not None and cache.nonfinite_at >= cache.num_computed:
            cache.nonfinite_at = None

    def fork(self, parent: Request, child: Request) -> None:
        """Let the child, which owns nothing, share the parent's blocks. Its tokens begin with those of the parent.

        Nothing is copied until one of them writes. Raises BadValue where the child would see what the parent freed.
        """
        num_computed = min(len(parent.tokens), len(child.tokens) - 1)
        for g, group in enumerate(self.groups):
            if self._first_seen(num_computed, group.window) < parent.cache.num_freed[g]:
                raise BadValue(f"{child.id} needs blocks of {parent.id} that it freed; give it one more token")
        child.cache.block_ids = [array("i", table) for table in parent.cache.block_ids]
        child.cache.num_freed = list(parent.cache.num_freed)
        child.cache.num_cached = min(len(parent.tokens), len(child.tokens))
        child.cache.num_computed = num_computed
        child.cache.prefix_report = child.cache.prefix_report or parent.cache.prefix_report
        child.cache.digests = parent.cache.digests[: child.cache.num_cached // self.block_size + 1]
        child.cache.num_published = min(parent.cache.num_published, child.cache.num_cached // self.block_size)
        child.cache.nonfinite_at = parent.cache.nonfinite_at
        for g, pool in enumerate(self.pools):
            blocks = self.owned(parent, g)
            pool.share(blocks)
            if self.listeners and blocks:
                self._tell(events.BlocksForked(self.now, g, parent.id, child.id, blocks.tolist()))
        self._trim(child)

    # --------------------------------------------------------------------------------------------- swapping

    def swap_out(self, requests: Sequence[Request]) -> list[Move] | None:
        """Move the requests' blocks to the host; what they share stays shared. None, with nothing done, if it is full.

        The moves are to be made before anything is written to the blocks.
        """
        distinct = [dict.fromkeys(b for r in requests for b in self.owned(r, g)) for g in range(len(self.groups))]
        if any(len(those) > pool.num_free for those, pool in zip(distinct, self.host_pools, strict=True)):
            return None
        hosts: list[dict[int, int]] = []
        try:
            for those, pool in zip(distinct, self.host_pools, strict=True):
                hosts.append(dict(zip(those, pool.allocate(len(those)), strict=True)))
        except BaseException:
            for g, taken in enumerate(hosts):
                self.host_pools[g].release(taken.values())
            raise
        seen: set[tuple[int, int]] = set()
        for request in requests:
            request.cache.host_block_ids = []
            for g, host_of in enumerate(hosts):
                blocks = self.owned(request, g)
                own = array("i", (host_of[block] for block in blocks))
                self.host_pools[g].share(host for host in own if (g, host) in seen)  # the first owner has it already
                seen.update((g, host) for host in own)
                request.cache.host_block_ids.append(own)
                self.pools[g].release(reversed(blocks), self.indexes[g].by_block)
                if self.listeners:
                    shown = events.BlocksSwappedOut(self.now, g, request.id, blocks.tolist(), own.tolist())
                    self._tell(shown)
            request.cache.block_ids = []
        return [Move(g, block, host) for g, host_of in enumerate(hosts) for block, host in host_of.items()]

    def needed_to_swap_in(self, requests: Sequence[Request]) -> list[int]:
        """Free blocks of each group that these swapped requests take to come back and compute all of their tokens."""
        counts = []
        for g, pool in enumerate(self.pools):
            still = self._still_cached(requests, g)
            back = len({host for request in requests for host in request.cache.host_block_ids[g]})
            in_use = sum(pool.ref_counts[block] > 0 for block in still.values())
            growth = sum(
                max(
                    0,
                    self.most_blocks(len(r.tokens), r.num_missing, self.groups[g]) - len(r.cache.host_block_ids[g]),
                    # whoever writes into a block that he shares takes one more
                    int(r.num_missing > 0 and r.cache.num_computed % self.block_size > 0 and len(requests) > 1),
                )
                for r in requests
            )
            counts.append(back - in_use + growth)
        return counts

    def _still_cached(self, requests: Sequence[Request], group: int) -> dict[int, int]:
        """Host blocks whose contents still stand in the prefix cache: host block -> block."""
        found: dict[int, int] = {}
        for request in requests:
            start = request.cache.num_freed[group]
            blocks = islice(self._find(request, group, request.cache.num_published), start, None)
            pairs = zip(request.cache.host_block_ids[group], blocks, strict=False)
            found |= {host: block for host, block in pairs if block != NONE}
        return found

    def swap_in(self, requests: Sequence[Request]) -> list[Move]:
        """Bring swapped requests back. Blocks that still stand in the prefix cache are shared; the others are moved."""
        still = [self._still_cached(requests, g) for g in range(len(self.groups))]
        missing = [
            list(dict.fromkeys(h for r in requests for h in r.cache.host_block_ids[g] if h not in still[g]))
            for g in range(len(self.groups))
        ]
        for pool, found in zip(self.pools, still, strict=True):
            pool.share(found.values())  # before anything is taken, so that it is not evicted
        try:
            taken = self._take([len(hosts) for hosts in missing])
        except BaseException:
            for g, (pool, found) in enumerate(zip(self.pools, still, strict=True)):
                pool.release(reversed(found.values()), self.indexes[g].by_block)
            raise
        block_of = [
            found | dict(zip(hosts, blocks, strict=True))
            for found, hosts, blocks in zip(still, missing, taken, strict=True)
        ]
        seen: set[tuple[int, int]] = set()
        for request in requests:
            request.cache.block_ids = []
            for g, hosts in enumerate(request.cache.host_block_ids):
                blocks = array("i", (block_of[g][host] for host in hosts))
                self.pools[g].share(block_of[g][host] for host in hosts if (g, host) in seen)
                seen.update((g, host) for host in hosts)
                request.cache.block_ids.append(array("i", bytes(4 * request.cache.num_freed[g])) + blocks)
                self.host_pools[g].release(hosts)
                if self.listeners:
                    shown = events.BlocksSwappedIn(self.now, g, request.id, blocks.tolist(), hosts.tolist())
                    self._tell(shown)
            request.cache.host_block_ids = []
            request.cache.num_published = 0  # what was moved may be offered again
        return [Move(g, host, block_of[g][host]) for g, hosts in enumerate(missing) for host in hosts]
