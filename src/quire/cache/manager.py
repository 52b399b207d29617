"""BlockManager: assign blocks to requests' tokens."""

from __future__ import annotations

import logging
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from quire.cache import events
from quire.cache.disk.tier import DiskTier
from quire.cache.events import CacheEvent, Listener
from quire.cache.groups import (
    NEVER,
    NO_STATES,
    AnyGroup,
    CacheGroup,
    RowGroup,
    StateGroup,
    StatePools,
    check_pieces,
    has_states,
)
from quire.cache.incoming import BlockMemory, Name, Read
from quire.cache.lookup import Match, PrefixLookup
from quire.cache.pool import NONE, BlockPool
from quire.cache.prefix import CachedBlock, HitCounts, PrefixIndex, block_tokens
from quire.cache.retention import Retained
from quire.cache.scores import RECORD, ScoredMemory, Scores, write
from quire.errors import BadValue
from quire.request import Miss, Request, TokenLogprobs

log = logging.getLogger("quire")


def present(blocks: array[int]) -> array[int]:
    """Return these blocks without NONE."""
    return array("i", (block for block in blocks if block != NONE)) if NONE in blocks else blocks


@dataclass(frozen=True)
class Move:
    """A copy of one block from src to dst, both in pools of that group."""

    group: int
    src: int
    dst: int


class BlockManager:
    """Allocates blocks to requests as they grow, and frees them. It knows ids, counts and tokens, but no tensors.

    In every group, a request owns the blocks that its computed and planned tokens need. Full blocks may be shared with
    any request that begins with the same tokens, the last one only with siblings, until one of them writes into it. A
    request frees the blocks that no later row needs: those that left a window, states before the last one, the rows of
    full pieces. Their entries stay at the front of its table, which is not read. A step stores only its last state, and
    those that other requests are likely to begin at; the entries of the others are `NONE`.

    If a method raises (OutOfBlocks), it has allocated nothing.
    """

    def __init__(
        self,
        groups: Sequence[AnyGroup],
        num_blocks: int,
        block_size: int,
        max_growth: int,
        *,
        num_host_blocks: int = 0,
        state_pools: StatePools = NO_STATES,
        state_snapshot_interval: int = 512,
        enable_prefix_caching: bool = True,
        salt: str = "",
        retained_share: float = 0.5,
    ) -> None:
        """num_blocks: N of each attention group; num_host_blocks: the same on the host, for swapped-out requests.

        state_pools: N of the other groups. state_snapshot_interval: tokens between two states that are kept for reuse;
        some others are kept, too: see `_is_kept`. max_growth: maximum number of tokens that a request grows by in one
        step. enable_prefix_caching: without it only siblings share. salt: everything except a request's own salt that
        makes K and V of the same tokens differ, such as their dtype. retained_share: share of the blocks that a key
        keeps, see `Retention`. Raises ConfigError if block_size or state_snapshot_interval do not suit layers that keep
        a state.
        """
        check_pieces(groups, block_size, state_snapshot_interval)
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_growth = max_growth
        self.enable_prefix_caching = enable_prefix_caching
        self.state_snapshot_interval = state_snapshot_interval
        self.state_pools = state_pools
        sizes = {CacheGroup: num_blocks, StateGroup: state_pools.states, RowGroup: state_pools.rows}
        hosts = {CacheGroup: num_host_blocks, StateGroup: state_pools.hosts, RowGroup: state_pools.hosts}
        self.pools = tuple(BlockPool(sizes[type(group)]) for group in groups)
        self.host_pools = tuple(BlockPool(hosts[type(group)]) for group in groups)
        self.indexes = tuple(PrefixIndex(sizes[type(group)]) for group in groups)
        # A state includes the last cached row, which some requests for logprobs compute again.
        full = [g for g, group in enumerate(groups) if isinstance(group, CacheGroup) and group.window is None]
        self.scores = Scores(None if not full or has_states(groups) else full[0], block_size)
        self.lookup = PrefixLookup(
            groups,
            self.indexes,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            salt=salt,
            scores=self.scores,
        )
        self.spans, self.unit = self.lookup.spans, self.lookup.unit
        self.attention_groups, self.state_groups = self.lookup.attention_groups, self.lookup.state_groups
        reusable = [g for g, group in enumerate(groups) if group.is_reusable]
        self._published = [(g, self.spans[g], self.indexes[g]) for g in reusable]
        # Of each group, the reserved digests and their numbers of reservations.
        self.reserved: tuple[Counter[bytes], ...] = tuple(Counter() for _ in groups)
        self.retained = tuple(Retained(int(retained_share * pool.num_blocks)) for pool in self.pools)
        self.hits = HitCounts()
        self.num_evicted = 0  # reusable blocks whose memory was needed
        self.disk: DiskTier | None = None  # if set, writes blocks of prompts to a disk when their last owner frees them
        self.memory: BlockMemory | None = None  # set if blocks may be read from other sources
        self.now = 0.0  # seconds; set by `begin_step`
        self.listeners: list[Listener] = []
        # Requests free blocks while they run, so the first blocks of a prompt do not determine its cached length.
        self.frees_early = any(group.window is not None or group.piece is not None for group in groups)
        self._is_plain = len(groups) == 1 and not self.frees_early

    def begin_step(self, now: float) -> None:
        """Set the time, and stop keeping the blocks whose time is over. now: seconds."""
        self.now = now
        for g, retained in enumerate(self.retained):
            self._end_retention(g, retained.expire(now), Miss.EXPIRED)

    def _tell(self, event: CacheEvent) -> None:
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed and is not called again")
                self.listeners.remove(listener)

    # --------------------------------------------------------------------------------------------- counting

    def most_blocks(self, num_tokens: int, growth: int, group: int) -> int:
        """Return the most blocks of the group that a request owns while it grows to num_tokens, `growth` at a time."""
        return self.groups[group].most(num_tokens, min(growth, self.max_growth), self.spans[group])

    def has_free(self, counts: Sequence[int]) -> bool:
        """Return whether each group has that many free blocks."""
        return all(count <= pool.num_free for count, pool in zip(counts, self.pools, strict=True))

    def lacking(self, request: Request) -> list[int]:
        """Return the blocks of each group that a running request still lacks to compute all of its tokens."""
        return [
            max(0, self.most_blocks(len(request.tokens), request.num_missing, g) - len(self.owned(request, g)))
            for g in range(len(self.groups))
        ]

    def owned(self, request: Request, group: int) -> array[int]:
        """Return the blocks that the request owns in group `group`."""
        return present(request.cache.block_ids[group][request.cache.num_freed[group] :])

    # ------------------------------------------------------------------------------------------ prefix cache

    def needed(self, request: Request, match: Match) -> list[int]:
        """Return the free blocks of each group that a waiting request needs to compute all of its tokens."""
        growth = len(request.tokens) - match.num_blocks * self.block_size
        counts = []
        for g, (pool, blocks) in enumerate(zip(self.pools, match.blocks, strict=True)):
            idle = sum(pool.ref_counts[block] == 0 for block in blocks)  # sharing removes them from the free order
            most = self.most_blocks(len(request.tokens), growth, g)
            counts.append(max(0, most - len(blocks)) + idle)
        return counts

    def admit(self, request: Request, match: Match) -> None:
        """Assign the matched blocks to a waiting request. Its last token is always computed."""
        if request.cache.prefix_report is None:
            request.cache.prefix_report = self.lookup.explain(request, match, self.now)
            if not request.is_whole:  # those look nothing up
                self.hits.count(request.cache.prefix_report)
        request.cache.block_ids = [
            array("i", bytes(4 * first)) + blocks for first, blocks in zip(match.first, match.blocks, strict=True)
        ]
        request.cache.num_freed = list(match.first)
        request.cache.num_cached = match.num_blocks * self.block_size
        request.cache.num_computed = self.lookup.start(request, request.cache.num_cached)
        request.cache.num_published = request.cache.num_scored = match.num_blocks
        if (group := self.scores.group) is not None and self.scores.serve(request):
            request.cache.found = self.scores.read(request, match.blocks[group])
        request.cache.room = 0
        request.cache.reach = match.reach * self.block_size
        for g, (pool, blocks) in enumerate(zip(self.pools, match.blocks, strict=True)):
            pool.share(blocks)
            if self.listeners and blocks:
                self._tell(events.BlocksShared(self.now, g, request.id, blocks.tolist()))

    def _publish(self, request: Request) -> None:
        """Offer the request's full blocks for reuse, except those already offered.

        None is offered from the first position on whose K or V is not finite.
        """
        cache, size = request.cache, self.block_size
        full = cache.num_computed // size
        if cache.nonfinite_at is not None:
            full = min(full, cache.nonfinite_at // size)
        self.lookup.know_digests(request, full)
        if self._is_plain and full > cache.num_published and self._publish_new(request, full):
            return
        for i in range(cache.num_published, full):
            end = (i + 1) * size
            tokens = request.tokens[i * size : end]
            for g, span, index in self._published:
                at = end // span - 1
                if end % span or at < cache.num_freed[g]:
                    continue
                block = cache.block_ids[g][at]
                if block != NONE and block not in index.by_block:
                    parent, digest = cache.digests[i], cache.digests[i + 1]
                    if index.publish(block, digest, parent, tokens.tobytes(), first=i == 0) and self.listeners:
                        self._tell_stored(request, g, i, [block])
        cache.num_published = full

    def _publish_new(self, request: Request, full: int) -> bool:
        """Publish all blocks at once if one group publishes and knows none of them: the common case of `_publish`."""
        cache, size, (g, _, index) = request.cache, self.block_size, self._published[0]
        first = cache.num_published
        blocks, digests = cache.block_ids[g][first:full], cache.digests[first : full + 1]
        tokens = block_tokens(request.tokens, first, full, size)
        if not index.publish_new(blocks, digests, tokens, first=first == 0):
            return False
        cache.num_published = full
        if self.listeners:
            self._tell_stored(request, g, first, blocks.tolist())
        return True

    def _tell_stored(self, request: Request, g: int, first: int, blocks: list[int]) -> None:
        """Report that group g stored these blocks for reuse, the request's block `first` and those after it."""
        digests = request.cache.digests[first + 1 : first + 1 + len(blocks)]
        self._tell_named(request, g, first, blocks, digests, request.cache.digests[first])

    def _tell_named(
        self, request: Request, g: int, first: int, blocks: list[int], digests: list[bytes], parent: bytes
    ) -> None:
        """See `_tell_stored`. digests: of the blocks. parent: that of the block before them."""
        size, images, end = self.block_size, request.images, first + len(blocks)
        tokens = request.tokens[first * size : end * size].tolist()
        seen: list[list[tuple[str, int]] | None] | None = None
        if images is not None and min(tokens) < 0:
            tokens = images.with_placeholders(tokens)
            seen = [images.lying_in(i * size, (i + 1) * size) or None for i in range(first, end)]
        names = (blocks, digests, parent if first else None)
        self._tell(events.BlockStored(self.now, g, request.id, *names, tokens, size, request.lora, seen))

    def reset_prefix_cache(self, *, keeps_disk: bool = False) -> None:
        """Drop all reusable blocks. Running requests keep theirs. keeps_disk: those on the disk stay reusable."""
        for g, (pool, index) in enumerate(zip(self.pools, self.indexes, strict=True)):
            pool.drop([block for block in index.by_block if pool.ref_counts[block] == 0])
            index.clear()
            self.retained[g].clear()
            self.scores.clear()
            if self.listeners:
                self._tell(events.AllBlocksCleared(self.now, g))
        if self.disk is not None and not keeps_disk:
            self.disk.clear()

    # ---------------------------------------------------------------------------------------------- growing

    def most_taken(self, request: Request, num_tokens: int) -> int:
        """Return the most blocks of each group that `grow` takes: only siblings share a partly filled block."""
        if num_tokens <= request.cache.room:
            return 0
        tables = zip(self.groups, self.spans, request.cache.block_ids, strict=True)
        lacking = max(group.count(num_tokens, span) - len(table) for group, span, table in tables)
        return max(0, lacking) + (request.group is not None)

    def grow(self, request: Request, num_tokens: int, copies: list[Move]) -> bool:
        """Give a running request blocks for its first num_tokens tokens.

        Return False, and allocate none, if blocks are short. If the first new token falls into a shared block, the
        request gets a separate copy: it is appended to `copies`, which must be made before anything is written.
        """
        cache = request.cache
        if num_tokens <= cache.room:
            return True
        sure = min(num_tokens, len(request.tokens))  # the others are draft tokens
        is_forked = request.group is not None and request.num_generated == 0 and not request.driven
        if is_forked and sure == len(request.tokens):
            sure -= 1  # its siblings compute the last token again
        counts: list[int] = []  # entries that each table gets
        passed: list[int] = []  # the first of them that gets a block
        shared: list[int] = []  # the entry of the first block to be written, if shared; else NONE
        for g, (group, span, table) in enumerate(zip(self.groups, self.spans, cache.block_ids, strict=True)):
            counts.append(max(len(table), group.count(num_tokens, span)))
            passed.append(min(counts[g], max(len(table), group.passed(sure, span))))
            stored = group.stored(cache.num_computed, cache.num_cached)
            at, filled = divmod(stored, span)
            is_open = filled > 0 and stored < num_tokens and at < len(table) and table[at] != NONE
            shared.append(at if is_open and self.pools[g].ref_counts[table[at]] > 1 else NONE)
        wanted = [count - start + (own != NONE) for count, start, own in zip(counts, passed, shared, strict=True)]
        if not self.has_free(wanted):
            return False
        for g, blocks in enumerate(self._take(wanted) if any(wanted) else ()):
            table = cache.block_ids[g]
            if shared[g] != NONE:
                move = Move(g, table[shared[g]], blocks.pop())
                table[shared[g]] = move.dst
                self.pools[g].release([move.src])  # it has other owners
                copies.append(move)
                if self.listeners:
                    self._tell(events.BlockCopied(self.now, g, request.id, move.src, move.dst))
            table.extend([NONE] * (passed[g] - len(table)))
            table.extend(blocks)
            if self.listeners and blocks:
                self._tell(events.BlocksAllocated(self.now, g, request.id, blocks.tolist()))
        if num_tokens > cache.num_cached:  # else a shared block may still be written
            tables = zip(self.groups, self.spans, cache.block_ids, strict=True)
            cache.room = min(group.room(len(table), span) for group, span, table in tables)
        return True

    def can_grow_each(self, requests: Iterable[Request]) -> bool:
        """Return whether `grow_each` is equivalent to `grow` for these running requests."""
        size = self.block_size
        return not self.frees_early and all(
            one.group is None and one.cache.room == len(one.cache.block_ids[0]) * size for one in requests
        )

    def grow_each(self, requests: Sequence[Request], times: Sequence[float] | None = None) -> bool:
        """Append one block per occurrence to each listed running request, in every group.

        Equivalent to calling `grow` when each of them reaches its next block, if `can_grow_each`. times: when each of
        them does, in seconds; None: now. Events carry the present time. Return False, taking none, if blocks are short.
        """
        counts = [len(requests)] * len(self.groups)
        if not self.has_free(counts):
            return False
        for g, blocks in enumerate(self._take(counts, times)):
            for request, block in zip(requests, blocks, strict=True):
                request.cache.block_ids[g].append(block)
            for request, block in zip(requests, blocks, strict=True) if self.listeners else ():
                self._tell(events.BlocksAllocated(self.now, g, request.id, [block]))
        for request in requests:
            request.cache.room += self.block_size
        return True

    def evicts(self, count: int) -> bool:
        """Return whether allocating `count` more blocks in every group, which are free, would evict a cached block."""
        pairs = zip(self.pools, self.indexes, strict=True)
        return any(pool.in_order(count) in index.by_block for pool, index in pairs)

    def keep_states(self, request: Request, start: int, end: int) -> None:
        """Allocate blocks for states that a step from token `start` to token `end` stores for reuse.

        The step must already have all blocks that it needs. If free blocks are short, the last states are preferred.
        """
        if not self.lookup.shares(request):
            return
        for g in self.state_groups:
            span, table, pool = self.spans[g], request.cache.block_ids[g], self.pools[g]
            last = min(end, len(request.tokens)) // span
            holes = [
                i for i in range(start // span, last) if table[i] == NONE and self._is_kept(request, (i + 1) * span)
            ]
            if not holes or not pool.num_unreserved:
                continue
            counts = [0] * len(self.groups)
            counts[g] = min(len(holes), pool.num_unreserved)
            blocks = self._take(counts)[g]
            for i, block in zip(reversed(holes), blocks, strict=False):
                table[i] = block
            if self.listeners:
                self._tell(events.BlocksAllocated(self.now, g, request.id, blocks.tolist()))

    def parted_at(self, request: Request) -> int:
        """Return the number of tokens after which the request stores a state, because others may diverge there, too."""
        return self.lookup.parting(request.cache.reach)

    def _is_kept(self, request: Request, position: int) -> bool:
        """Return whether the state at `position` stays in the cache when the request has continued.

        Others begin where a prompt ended, where prefixes were seen to diverge, and where this request itself began; for
        unforeseen cases, states are also kept at intervals.
        """
        return (
            position % self.state_snapshot_interval == 0
            or position == (request.num_prompt - 1) // self.unit * self.unit
            or position in (self.parted_at(request), request.cache.num_cached)
        )

    def _take(self, counts: Sequence[int], times: Sequence[float] | None = None) -> list[array[int]]:
        """Allocate free blocks of each group, evicting their contents. times: see `grow_each`."""
        taken: list[array[int]] = []
        try:
            for count, pool in zip(counts, self.pools, strict=True):
                taken.append(pool.allocate(count))
        except BaseException:
            for g, blocks in enumerate(taken):
                self._give_back(g, blocks)
            raise
        for g, (index, blocks) in enumerate(zip(self.indexes, taken, strict=True)):
            lost = index.evict(blocks, repeat(self.now) if times is None else times)
            if not lost:
                continue
            self.num_evicted += len(lost)
            for cached in lost if self.retained[g] else ():
                self.retained[g].forget(cached.digest)
            for cached in lost if self.scores and g == self.scores.group else ():
                self.scores.forget(cached.block)
            if self.disk is not None:
                for cached in lost:
                    self.disk.cancel(g, cached.block)
            if self.listeners:
                names = [cached.block for cached in lost], [cached.digest for cached in lost]
                self._tell(events.BlockRemoved(self.now, g, *names, evicted=True))
        return taken

    def advance(self, request: Request, num_new: int) -> None:
        """Record that the next `num_new` tokens are computed: publish full blocks, free those no longer needed."""
        request.cache.num_computed += num_new
        full = request.cache.num_computed // self.block_size
        if full > request.cache.num_published and self.lookup.shares(request):
            self._publish(request)
            if request.cache.scores is not None:
                self._attach_scores(request, self.scores)
        if self.frees_early:
            self._trim(request)

    def record(self, request: Request, found: Sequence[TokenLogprobs]) -> None:
        """Record the next logprobs of a request's prompt that were computed, with the most probable token of each.

        `advance` stores them with the blocks that it publishes.
        """
        if found and self.scores.group is not None and self.lookup.shares(request):
            if request.cache.scores is None:
                size = self.block_size
                request.cache.scores = bytearray(-(-request.num_prompt // size) * size * RECORD.size)
            write(request.cache.scores, request.next_prompt_logprob + 1, found)

    def _attach_scores(self, request: Request, scores: Scores) -> None:
        """Store the records of the request's tokens with the published blocks of these."""
        cache, records, width, group = request.cache, request.cache.scores or b"", scores.width, scores.group or 0
        index, changed = self.indexes[group], list[tuple[int, CachedBlock]]()
        for i in range(cache.num_scored, min(cache.num_published, len(records) // width)):
            block = index.block_of(cache.digests[i + 1])
            if block is not None and scores.merge(block, bytes(records[i * width : (i + 1) * width])):
                changed.append((i, index.by_block[block]))
        cache.num_scored = cache.num_published
        # The request may have blocks with the same tokens, and release will offer only published ones that it owns.
        changed = [(i, cached) for i, cached in changed if self.pools[group].ref_counts[cached.block] == 0]
        if self.disk is not None and changed:
            self._write(self.disk, group, changed, self.disk.store.next_tick())

    def next_due(self, request: Request) -> int:
        """Return the number of computed tokens up to which `advance` only counts them."""
        cache = request.cache
        due = (cache.num_published + 1) * self.block_size if self.lookup.shares(request) else NEVER
        if self.frees_early:
            rows = zip(self.groups, self.spans, cache.num_freed, strict=True)
            due = min(due, *(group.freed_at(freed, span) for group, span, freed in rows))
        return due

    def _trim(self, request: Request) -> None:
        """Free the blocks that the request's next row does not need. States that are not kept for reuse are dropped."""
        cache = request.cache
        for g, (group, span) in enumerate(zip(self.groups, self.spans, strict=True)):
            first, freed = group.first(cache.num_computed, span), cache.num_freed[g]
            if first <= freed:
                continue
            cache.num_freed[g] = first
            self._free(request, g, present(cache.block_ids[g][freed:first]))
            if g in self.state_groups:
                for i in range(freed, first):
                    if not self._is_kept(request, (i + 1) * span):
                        self._forget(g, cache.block_ids[g][i])
            if self.disk is not None:
                self._offer(self.disk, request, g, freed, first, self.disk.store.next_tick())

    def _forget(self, group: int, block: int) -> None:
        """Remove an unowned block from the index, so that no prefix finds it."""
        pool, index = self.pools[group], self.indexes[group]
        if block != NONE and pool.ref_counts[block] == 0 and block in index.by_block:
            if self.disk is not None:
                self.disk.cancel(group, block)
            cached = index.withdraw(block)
            self.retained[group].forget(cached.digest)
            pool.drop([block])
            if self.listeners:
                self._tell(events.BlockRemoved(self.now, group, [block], [cached.digest], evicted=False))

    def _give_back(self, group: int, blocks: Sequence[int]) -> None:
        """Remove an owner from each block, in reverse, so that tails are evicted before heads."""
        pool, index = self.pools[group], self.indexes[group]
        reserved, retained = self.reserved[group], self.retained[group]
        pool.release(reversed(blocks), index.by_block)
        if reserved or retained:
            cached = [index.by_block[block] for block in blocks if block in index.by_block]
            pool.retain(one.block for one in reversed(cached) if one.digest in retained)
            pool.reserve(one.block for one in cached if one.digest in reserved)

    def _retain(self, request: Request, group: int, blocks: Sequence[int]) -> None:
        """Keep the request's reusable blocks, as it asks."""
        index = self.indexes[group]
        digests = [index.by_block[block].digest for block in reversed(blocks) if block in index.by_block]
        for digest in digests if index.ended else ():
            index.ended.pop(digest, None)
        if request.retention is not None:
            lost = self.retained[group].keep(request.cache_salt, request.retention, digests, self.now)
            self._end_retention(group, lost, Miss.BUDGET)

    def _end_retention(self, group: int, digests: Iterable[bytes], reason: Miss) -> None:
        """Make these blocks ordinary cached ones, because they are no longer kept."""
        index = self.indexes[group]
        for digest in digests:
            block = index.block_of(digest)
            if block is not None:
                index.ended[digest] = reason
                self.pools[group].unretain([block])

    def reserve(self, names: Iterable[Name]) -> None:
        """Make these blocks, once they are cached, the last ones to be evicted, until `unreserve` of each."""
        for group, digest in names:
            self.reserved[group][digest] += 1
            block = self.indexes[group].block_of(digest)
            if block is not None:
                self.pools[group].reserve([block])

    def unreserve(self, names: Sequence[Name]) -> None:
        """End one reservation of each of these blocks. Tails are then evicted before heads again."""
        for group, digest in reversed(names):
            self.reserved[group][digest] -= 1
            if self.reserved[group][digest] == 0:
                del self.reserved[group][digest]
                block = self.indexes[group].block_of(digest)
                if block is not None:
                    self.pools[group].unreserve([block])
                    if digest in self.retained[group]:
                        self.pools[group].retain([block])

    def _free(self, request: Request, group: int, blocks: Sequence[int]) -> None:
        """Free these blocks."""
        if blocks:
            if request.retention is not None:
                self._retain(request, group, blocks)
            self._give_back(group, blocks)
            if self.listeners:
                self._tell(events.BlocksFreed(self.now, group, request.id, list(blocks)))

    def _offer(self, disk: DiskTier, request: Request, group: int, start: int, stop: int, tick: int) -> None:
        """Offer the unowned blocks among these table entries to the disk.

        Only blocks of the prompt: generated tokens are written once they are part of another request's prompt. But if
        the request's blocks are kept, a session continues with them, and all of them are offered.
        """
        pool, index, span = self.pools[group], self.indexes[group], self.spans[group]
        table = request.cache.block_ids[group]
        left: list[tuple[int, CachedBlock]] = []
        most = request.num_prompt // span if request.retention is None else len(table)
        for i in range(start, min(stop, len(table), most)):
            block = table[i]
            if block != NONE and pool.ref_counts[block] == 0 and block in index.by_block:
                left.append((i, index.by_block[block]))
        if left:
            self._write(disk, group, left, tick)

    def _write(self, disk: DiskTier, group: int, blocks: Sequence[tuple[int, CachedBlock]], tick: int) -> None:
        """Offer blocks to the disk. Those whose logprobs have changed are written again."""
        disk.offer(group, blocks, tick, self.scores.unsaved if group == self.scores.group else ())
        if group == self.scores.group:
            self.scores.unsaved.difference_update(cached.block for _, cached in blocks)

    def restore(self, group: int, reads: Sequence[Read], request: Request) -> int:
        """Add blocks that were read to the prefix cache as free blocks, as many as fit. Return their number.

        request: the request for which they were read.
        """
        pool, index, size = self.pools[group], self.indexes[group], self.block_size
        memory = self.memory
        if isinstance(memory, ScoredMemory):
            for read in reads:
                block = index.block_of(read.name.digest)
                if block is not None and read.payload is not None:  # it was computed meanwhile, maybe without logprobs
                    memory.merge_records(group, block, read.payload)
        new = [read for read in reads if read.name.digest not in index][: pool.num_unreserved]
        if self.memory is None or not new:
            return 0
        counts = [0] * len(self.groups)
        counts[group] = len(new)
        blocks = self._take(counts)[group]
        try:
            for read, block in zip(new, blocks, strict=True):
                if read.payload is not None:
                    self.memory.write_block(group, block, read.payload)
                    parent, at = read.parent, (read.depth + 1) * self.spans[group] // size - 1
                    index.publish(block, read.name.digest, parent, read.tokens, first=at == 0)
                    if self.listeners:
                        self._tell_named(request, group, at, [block], [read.name.digest], parent)
        finally:
            self._give_back(group, blocks)
        return len(new)

    def tell_disk_changes(self) -> None:
        """Report the blocks that were stored on the disk, or removed from it."""
        changes = () if self.disk is None else self.disk.changes()
        for name, is_stored in changes if self.listeners else ():
            kind = events.DiskBlockStored if is_stored else events.DiskBlockRemoved
            self._tell(kind(self.now, name.group, [name.digest]))

    def release(self, request: Request) -> None:
        """Free all blocks of the request, also on the host. Its computed tokens are discarded."""
        for g in range(len(request.cache.block_ids)):
            self._free(request, g, self.owned(request, g))
        if self.disk is not None:
            tick = self.disk.store.next_tick()
            for g, table in enumerate(request.cache.block_ids):
                self._offer(self.disk, request, g, request.cache.num_freed[g], len(table), tick)
        for g, hosts in enumerate(request.cache.host_block_ids):
            self.host_pools[g].release(hosts)
            if self.listeners and hosts:
                self._tell(events.HostBlocksFreed(self.now, g, request.id, hosts.tolist()))
        request.cache.block_ids, request.cache.host_block_ids, request.cache.num_freed = [], [], []
        request.cache.num_computed = request.cache.num_cached = request.cache.num_published = 0
        request.cache.nonfinite_at, request.cache.scores, request.cache.found = None, None, ()
        request.cache.room = request.cache.reach = 0

    def forget_tokens(self, request: Request) -> None:
        """Forget the digests of a request without blocks, because its tokens will change."""
        request.cache.digests = []

    def mark_nonfinite(self, request: Request, position: int) -> None:
        """Record that K or V of `position` are not finite: no block from it on is published."""
        if request.cache.nonfinite_at is None:
            request.cache.nonfinite_at = position

    def forget_uncomputed(self, request: Request) -> None:
        """Remove a mark beyond the computed tokens: that row was a rejected draft token."""
        cache = request.cache
        if cache.nonfinite_at is not None and cache.nonfinite_at >= cache.num_computed:
            cache.nonfinite_at = None

    def fork(self, parent: Request, child: Request) -> None:
        """Make the child, which owns no blocks, share the parent's. Its tokens begin with those of the parent.

        Nothing is copied until one of them writes. Raises BadValue if the child needs blocks that the parent freed.
        """
        num_cached = min(len(parent.tokens), len(child.tokens))
        num_computed = min(num_cached, len(child.tokens) - 1)
        tables: list[array[int]] = []
        first: list[int] = []
        for g, (group, span) in enumerate(zip(self.groups, self.spans, strict=True)):
            first.append(group.first(num_computed, span))
            stop = group.count(group.stored(num_computed, num_cached), span)
            tables.append(parent.cache.block_ids[g][:stop])
            if first[g] < parent.cache.num_freed[g] or NONE in tables[g][first[g] :]:
                raise BadValue(f"{child.id} needs blocks of {parent.id} that it freed; give it one more token")
        child.cache.block_ids, child.cache.num_freed = tables, first
        child.cache.num_cached, child.cache.num_computed = num_cached, num_computed
        child.cache.room = parent.cache.room = 0  # the first to write into a shared block gets a copy
        child.cache.prefix_report = child.cache.prefix_report or parent.cache.prefix_report
        child.cache.digests = parent.cache.digests[: num_cached // self.block_size + 1]
        child.cache.num_published = min(parent.cache.num_published, num_cached // self.block_size)
        child.cache.nonfinite_at = parent.cache.nonfinite_at
        for g, pool in enumerate(self.pools):
            blocks = self.owned(child, g)
            pool.share(blocks)
            if self.listeners and blocks:
                self._tell(events.BlocksForked(self.now, g, parent.id, child.id, blocks.tolist()))

    # --------------------------------------------------------------------------------------------- swapping

    def swap_out(self, requests: Sequence[Request]) -> list[Move] | None:
        """Move the requests' blocks to the host, keeping shared ones shared.

        Return None, and change nothing, if the host is full. The moves must be made before anything is written to the
        blocks.
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
                self.host_pools[g].share(host for host in own if (g, host) in seen)  # the first owner already counts
                seen.update((g, host) for host in own)
                request.cache.host_block_ids.append(own)
                self._give_back(g, blocks)
                if self.listeners:
                    shown = events.BlocksSwappedOut(self.now, g, request.id, blocks.tolist(), own.tolist())
                    self._tell(shown)
            request.cache.block_ids = []
        return [Move(g, block, host) for g, host_of in enumerate(hosts) for block, host in host_of.items()]

    def needed_to_swap_in(self, requests: Sequence[Request]) -> list[int]:
        """Return the free blocks of each group that these swapped requests need to resume and compute all tokens."""
        counts = []
        for g, pool in enumerate(self.pools):
            still = self._still_cached(requests, g)
            back = len({host for request in requests for host in request.cache.host_block_ids[g]})
            in_use = sum(pool.ref_counts[block] > 0 for block in still.values())
            growth = sum(
                max(
                    0,
                    self.most_blocks(len(r.tokens), r.num_missing, g) - len(r.cache.host_block_ids[g]),
                    # a request that writes into a shared block needs one more
                    int(r.num_missing > 0 and r.cache.num_computed % self.spans[g] > 0 and len(requests) > 1),
                )
                for r in requests
            )
            counts.append(back - in_use + growth)
        return counts

    def _still_cached(self, requests: Sequence[Request], group: int) -> dict[int, int]:
        """Return the host blocks whose contents are still in the prefix cache: host block -> block."""
        found: dict[int, int] = {}
        for request in requests:
            stop = request.cache.num_published * self.block_size // self.spans[group]
            blocks = self.lookup.find(request, group, request.cache.num_freed[group], stop)
            pairs = zip(request.cache.host_block_ids[group], blocks, strict=False)
            found |= {host: block for host, block in pairs if block != NONE}
        return found

    def swap_in(self, requests: Sequence[Request]) -> list[Move]:
        """Swap requests in. Blocks that are still in the prefix cache are shared; the others are moved."""
        still = [self._still_cached(requests, g) for g in range(len(self.groups))]
        missing = [
            list(dict.fromkeys(h for r in requests for h in r.cache.host_block_ids[g] if h not in still[g]))
            for g in range(len(self.groups))
        ]
        for pool, found in zip(self.pools, still, strict=True):
            pool.share(found.values())  # before anything is allocated, so that it is not evicted
        try:
            taken = self._take([len(hosts) for hosts in missing])
        except BaseException:
            for g, found in enumerate(still):
                self._give_back(g, [*found.values()])
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
            request.cache.room = 0
            request.cache.num_published = request.cache.num_scored = 0  # moved blocks may be published again
        return [Move(g, host, block_of[g][host]) for g, hosts in enumerate(missing) for host in hosts]
