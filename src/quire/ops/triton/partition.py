"""The division of a step's query rows and keys into items for the programs of the attention kernel.

An item is a tile of query rows with a range of keys. If there are fewer tiles than programs that the device runs at a
time, keys are cut and the parts merged. Blocks that several decoding sequences share become separate items with rows of
all of these sequences, so that they are read once. In a reproducible plan every cut is at an absolute multiple of CHUNK
keys, and a cut does not change a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quire.errors import Unsupported
from quire.ops.spec import AttentionSpec
from quire.ops.triton.tiles import CHUNK, RESIDENT, SPLIT, WARPS, Tile, choose

Ints = NDArray[np.int64]

ITEM = 8  # numbers of an item: begin of its block ids, first of its rows, tokens, lo, hi, free_lo, free_hi, 0
WORTH_SHARING = 16 * 2**20  # bytes of K and V that sharing must save, to outweigh the merge
NEVER = 2**31 - 1  # keys: a cut beyond every context
PARTS = np.array([1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128])  # tried numbers of parts per context
MOST_CUTS = 3  # parts in addition to one per tile, in multiples of the programs that run at a time
# Costs of an item, as the number of keys that it could read in that time, measured on an H100.
START_FEW, START_MANY = 40, 160  # of its start, and of storing the sums of a part
MERGE = 110  # of the launch that folds parts
ALONE = 0.6  # time of an item on an idle device, relative to its time on a busy one
PART_MEMORY = 256 * 2**20  # largest size of the parts of a reproducible plan in bytes


@dataclass(frozen=True)
class Room:
    """The largest possible lengths of a plan's lists."""

    few: int
    many: int
    rows: int  # and parts


@dataclass(frozen=True)
class Lists:
    """A step's work, see `attention.attend` and `attention.merge`."""

    few: Ints  # [items, ITEM]
    many: Ints  # [items, ITEM]
    rows: Ints  # [entries, 2]
    merges: Ints  # [tokens, 3]
    positions: Ints  # [T]
    ends: Ints  # [T], the keys before which each token attends, of a causal plan
    sequences: Ints  # [T]
    num_parts: int


@dataclass(frozen=True)
class Rows:
    """A step's tiles and rows, independent of the lengths of the contexts."""

    starts: bytes  # query_starts, as a cache key
    seq: Ints  # sequence of each tile
    step: Ints  # its first token, relative to that of its sequence
    token: Ints  # its first token
    count: Ints  # its number of tokens
    few: NDArray[np.bool_]  # True if its rows are few
    width: Ints  # keys of the kernel's tile
    sequences: Ints  # [T]
    tokens: Ints  # [T]: 0, 1, ..


@dataclass
class Tiles:
    """Tiles of query rows, one entry per tile. All rows see the keys free_lo..free_hi, and none outside lo..hi."""

    seq: Ints
    token: Ints  # the first one
    count: Ints  # tokens
    few: NDArray[np.bool_]  # True if its rows are few
    lo: Ints
    hi: Ints
    free_lo: Ints
    free_hi: Ints
    inherited: Ints  # parts of each of its tokens that are computed by items of shared keys


@dataclass(frozen=True)
class Shared:
    """The keys from 0 on that several sequences share, in the same blocks."""

    seqs: Ints
    keys: int


class Partitioner:
    """Cuts the steps of one plan."""

    def __init__(
        self,
        spec: AttentionSpec,
        chip: str,
        processors: int,
        max_tokens: int,
        max_seqs: int,
        max_blocks: int,
        many_tile: Tile | None = None,  # None: by the chip
    ) -> None:
        self.spec = spec
        G = spec.group_size
        self.few_tile: Tile = choose(chip, "exact" if spec.reproducible else "few", spec)
        self.many_tile: Tile = many_tile or choose(chip, "exact" if spec.reproducible else "many", spec)
        # Largest number of rows of a sequence that counts as few. All rows of a reproducible plan are many: one tile.
        self.few_rows = 0 if spec.reproducible else self.few_tile.block_m // G * G
        # Tokens of a sequence in a tile. A plan with no more tokens than sequences is for decoding and takes one token,
        # so that all rows of a tile see the same keys.
        self.decodes = max_tokens <= max_seqs
        self.shared_tokens = max(1, self.many_tile.tokens(G))
        self.few_tokens = 1 if self.decodes else max(1, self.few_tile.tokens(G))
        self.many_tokens = 1 if self.decodes else self.shared_tokens
        # Number of items that fill the device: its programs divided by those of an item.
        programs = spec.num_kv_heads * -(-G // self.many_tile.block_m)
        self.few_wanted = RESIDENT[chip] * processors // programs
        self.many_wanted = max(1, WARPS // self.many_tile.num_warps) * processors // programs
        self.room = self._room(max_tokens, max_seqs, max_blocks)
        self._last_rows: Rows | None = None  # of the last step; reused while the same sequences decode

    def _room(self, max_tokens: int, max_seqs: int, max_blocks: int) -> Room:
        spec = self.spec
        long = min(max_seqs, max_tokens // (self.few_rows // spec.group_size + 1))
        own = most_tiles(max_tokens, long, self.many_tokens)
        of_shared = most_tiles(max_tokens, max_seqs // 2, self.shared_tokens)  # a group has two sequences at least
        few, many = max_seqs, own + of_shared
        if spec.reproducible:  # all chunks of fewer tiles than programs, or half as many chunks of long contexts
            few = 0
            chunks = max(1, -(-max_blocks * spec.block_size // CHUNK))
            part = 4 * spec.num_heads * (spec.dim_v + 2)  # bytes
            rows = 2 * max_tokens + min(2 * max_tokens * chunks, PART_MEMORY // part)
            many += min(many, max(self.few_wanted, self.many_wanted)) * chunks  # those of shared keys among them
        else:
            few_cuts, many_cuts = MOST_CUTS * self.few_wanted, MOST_CUTS * self.many_wanted
            rows = 2 * max_tokens + (few + few_cuts) * self.few_tokens + many_cuts * self.shared_tokens
            few += few_cuts
            many += many_cuts
        # Lists that are made on the device have all sequences here, also those with few rows.
        many = max(many, most_tiles(max_tokens, max_seqs, self.many_tokens))
        return Room(few, many, rows)

    def cut(self, starts: Ints, lens: Ints, tables: NDArray[np.int32], ends: NDArray[np.int32] | None = None) -> Lists:
        """Divide the work of a step.

        starts: [S+1]; lens: [S]; tables: [S, width], the blocks of all keys; ends: [T], `AttentionPlan.key_ends`.
        """
        own = self.rows(starts)
        positions = (lens - starts[1:])[own.sequences] + own.tokens
        rows = positions, np.maximum(positions + 1, 0) if ends is None else ends.astype(np.int64)
        shared = self.shared(starts, lens, tables)
        width = tables.shape[1]
        lists = self._lists(
            self.tiles(starts, lens, rows), shared, rows, starts, width, self.few_wanted, self.many_wanted
        )
        if not self._fits(lists):  # then nothing is shared or cut
            lists = self._lists(self.tiles(starts, lens, rows), [], rows, starts, width, 0, 0)
        if not self._fits(lists):
            found = f"{len(lists.few)} and {len(lists.many)} items of {len(lists.rows)} rows"
            raise Unsupported(f"the step comes to {found}; the plan has room for {self.room}")
        return lists

    def mixes(self, items: Ints) -> bool:
        """Return True if an item has a row that sees a key which another row does not see."""
        if not self.spec.causal or self.decodes:
            return False
        _, _, count, lo, hi, free_lo, free_hi, _ = items.T
        return bool(((count > 1) & ((free_lo > lo) | (free_hi < hi))).any())

    def _fits(self, lists: Lists) -> bool:
        room = self.room
        return len(lists.few) <= room.few and len(lists.many) <= room.many and len(lists.rows) <= room.rows

    # --------------------------------------------------------------------------------------- tiles of rows

    def rows(self, starts: Ints) -> Rows:
        """Divide the rows of a step into the largest tiles of the kernel."""
        key = starts.tobytes()
        if self._last_rows is None or self._last_rows.starts != key:
            rows, num_seqs = np.diff(starts), len(starts) - 1
            few = rows * self.spec.group_size <= self.few_rows
            tokens = np.where(few, self.few_tokens, self.many_tokens)
            counts = -(-rows // tokens)
            seq = np.repeat(np.arange(num_seqs), counts)
            step = (np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens[seq]
            token = starts[seq] + step
            count = np.minimum(tokens[seq], starts[seq + 1] - token)
            width = np.where(few[seq], self.few_tile.block_n, self.many_tile.block_n)
            sequences = np.repeat(np.arange(num_seqs), rows)
            every = np.arange(starts[-1])
            self._last_rows = Rows(key, seq, step, token, count, few[seq], width, sequences, every)
        return self._last_rows

    def tiles(self, starts: Ints, lens: Ints, rows: tuple[Ints, Ints]) -> Tiles:
        """Divide all query rows into tiles with ranges of keys. rows: the position and the end of each token."""
        spec, own = self.spec, self.rows(starts)
        width, (positions, ends) = own.width, rows
        first, last = own.token, own.token + own.count - 1
        hi, sure_hi = (ends[last], ends[first]) if spec.causal else [lens[own.seq]] * 2
        first, last = positions[first], positions[last]
        lo = free_lo = np.zeros_like(hi)
        if spec.window is not None:
            lo = np.clip(first - spec.window + 1, 0, hi)
            free_lo = -(-np.maximum(last - spec.window + 1, 0) // width) * width
        free_hi = np.maximum(sure_hi // width * width, free_lo)
        return Tiles(
            own.seq, own.token, own.count, own.few, lo.copy(), hi, free_lo.copy(), free_hi, np.zeros_like(own.seq)
        )

    # ----------------------------------------------------------------------------------------- shared keys

    def shared(self, starts: Ints, lens: Ints, tables: NDArray[np.int32]) -> list[Shared]:
        """Return groups of decoding sequences with the same first blocks, if reading these once outweighs a merge."""
        spec, unit = self.spec, CHUNK if self.spec.reproducible else SPLIT
        rows = np.diff(starts)
        history = lens - rows  # keys that all of a sequence's rows see
        decodes = rows * spec.group_size <= max(16, spec.group_size)
        candidates = np.flatnonzero((rows > 0) & (history >= unit) & decodes)
        a_key = spec.num_kv_heads * (spec.head_dim + spec.dim_v) * spec.cache_dtype.itemsize
        most = (len(candidates) - 1) * history[candidates].max(initial=0) * a_key
        if spec.window is not None or len(candidates) < 2 or most < WORTH_SHARING:
            return []
        groups = []
        if len(set(tables[candidates, 0].tolist())) == len(candidates):  # the usual case: no first block is shared
            return []
        _, group, sizes = np.unique(tables[candidates, 0], return_inverse=True, return_counts=True)
        for g in np.flatnonzero(sizes > 1):
            seqs = candidates[group == g]
            blocks = tables[seqs, : history[seqs].min() // spec.block_size]
            same = (blocks == blocks[0]).all(0)
            keys = (len(same) if same.all() else int(same.argmin())) * spec.block_size // unit * unit
            groups.append(Shared(seqs, keys))
        saved = sum((len(group.seqs) - 1) * group.keys for group in groups) * a_key
        return [group for group in groups if group.keys] if saved >= max(1, WORTH_SHARING) else []

    # ----------------------------------------------------------------------------------------------- items

    def _lists(
        self,
        tiles: Tiles,  # changed: shared keys are removed from them
        shared: list[Shared],
        of_rows: tuple[Ints, Ints],  # the position and the end of each token
        starts: Ints,
        width: int,  # blocks of a row of the tables
        few_wanted: int,  # items of few rows that fill the device; 0: no cuts
        many_wanted: int,
    ) -> Lists:
        """Make the items and their rows."""
        group_tiles = []  # of each group: its first sequence, the tiles that own its tokens, its tokens
        for group in shared:
            own = np.flatnonzero(np.isin(tiles.seq, group.seqs))
            tiles.lo[own] = group.keys
            tiles.free_lo[own] = group.keys
            tiles.free_hi[own] = np.maximum(tiles.free_hi[own], group.keys)
            owner, j = _spread(tiles.count[own])
            group_tiles.append((group, own[owner], j))
        few = tiles.few
        counts = [-(-len(owner) // self.shared_tokens) for _, owner, _ in group_tiles]
        few_cut = self._cut_at(tiles.lo[few], tiles.hi[few], few_wanted, START_FEW)
        shared_hi = np.repeat([group.keys for group in shared], counts).astype(np.int64)
        many_lo = np.concatenate([tiles.lo[~few], 0 * shared_hi])
        many_cut = self._cut_at(many_lo, np.concatenate([tiles.hi[~few], shared_hi]), many_wanted, START_MANY)
        # A reproducible row's states of shared chunks are merged one by one with those of its other chunks.
        shared_cut = CHUNK if self.spec.reproducible else many_cut
        for group, owner, _ in group_tiles:
            tiles.inherited[owner] = _parts(0, group.keys, shared_cut)
        at = np.where(few, few_cut, many_cut)
        at = np.where(tiles.hi - tiles.lo > at, at, NEVER)  # short ones are not cut at a multiple
        if self.spec.reproducible:
            at = np.where(tiles.inherited > 0, CHUNK, at)
        own_parts = _parts(tiles.lo, tiles.hi, at)
        rows_of_step = self.rows(starts)
        sequences = rows_of_step.sequences
        if not shared and own_parts.max(initial=1) == 1:  # most steps: tokens in order, each in one item
            items = _items(
                tiles.seq * width,
                tiles.token,
                tiles.count,
                tiles.lo,
                tiles.hi,
                tiles.free_lo,
                tiles.free_hi,
            )
            whole = np.stack([rows_of_step.tokens, np.full(starts[-1], -1)], 1)
            none = np.zeros((0, 3), np.int64)
            return Lists(_longest_first(items[few]), _longest_first(items[~few]), whole, none, *of_rows, sequences, 0)
        parts = np.where(own_parts + tiles.inherited > 1, own_parts + tiles.inherited, 0)  # of each of its tokens
        first_part = np.cumsum(parts * tiles.count) - parts * tiles.count
        tile, k = _spread(own_parts)
        begin = np.where(k == 0, tiles.lo[tile], (tiles.lo[tile] // at[tile] + k) * at[tile])
        end = np.minimum((tiles.lo[tile] // at[tile] + k + 1) * at[tile], tiles.hi[tile])
        end = np.maximum(end, begin)  # for a tile whose rows see no key
        seq, count = tiles.seq[tile], tiles.count[tile]
        item, j = _spread(count)
        owner = tile[item]
        part = first_part[owner] + j * parts[owner] + tiles.inherited[owner] + k[item]
        rows = [np.stack([tiles.token[owner] + j, np.where(parts[owner] > 0, part, -1)], 1)]
        items = _items(
            seq * width, np.cumsum(count) - count, count, begin, end, tiles.free_lo[tile], tiles.free_hi[tile]
        )
        few_items, many_items = items[few[tile]], [items[~few[tile]]]
        entries = len(item)
        for group, owner, j in group_tiles:
            begins = np.arange(0, len(owner), self.shared_tokens)
            count = np.minimum(self.shared_tokens, len(owner) - begins)
            for piece in range(int(_parts(0, group.keys, shared_cut))):
                part = first_part[owner] + j * parts[owner] + piece
                rows.append(np.stack([tiles.token[owner] + j, part], 1))
                lo, hi = piece * shared_cut, min((piece + 1) * shared_cut, group.keys)
                many_items.append(_items(group.seqs[0] * width, entries + begins, count, lo, hi, lo, hi))
                entries += len(owner)
        tile, j = _spread(np.where(parts > 0, tiles.count, 0))
        merges = np.stack([tiles.token[tile] + j, first_part[tile] + j * parts[tile], parts[tile]], 1)
        return Lists(
            _longest_first(few_items),
            _longest_first(np.concatenate(many_items)),
            np.concatenate(rows),
            merges,
            *of_rows,
            sequences,
            int((parts * tiles.count).sum()),
        )

    def _cut_at(self, lo: Ints, hi: Ints, wanted: int, start: int) -> int:
        """Return the number of keys of a part that minimises the time of the step, by a simple model.

        `wanted` items run at a time. The last ones, which do not fill the device, run faster, but less than in
        proportion. A reproducible plan is cut into all chunks, if there are fewer tiles than programs or if one tile
        would run longer than all others.
        """
        if len(lo) == 0 or wanted == 0:
            return NEVER
        keys = hi - lo
        total, longest = int(keys.sum()), int(keys.max())
        if self.spec.reproducible:
            share = -(-2 * total // wanted)
            return CHUNK if len(lo) < wanted or longest > max(share, CHUNK) else NEVER
        tried = PARTS[: int(np.searchsorted(PARTS, -(-longest // SPLIT))) + 1]  # more parts would be smaller than SPLIT
        at = np.maximum(1, -(-longest // (tried * SPLIT))) * SPLIT
        at[0] = NEVER
        items = np.where(keys[:, None] > at, _parts(lo[:, None], hi[:, None], at), 1).sum(0)
        turns = items / wanted
        last = turns % 1
        time = (turns - last + np.where(last > 0, np.maximum(last**0.9, ALONE), 0)) * total / items
        time = np.maximum(time, ALONE * np.minimum(at, longest)) + start * np.ceil(turns)
        time += np.where(items > len(lo), MERGE, 0)
        best = int(np.where(items <= len(lo) + MOST_CUTS * wanted, time, np.inf).argmin())
        return int(at[best])


def most_tiles(num_tokens: int, num_seqs: int, tokens: int) -> int:
    """Return the largest possible number of tiles of `tokens` tokens, for any lengths of the sequences.

    It never decreases with more tokens or sequences, so memory for the largest step is enough for every other.
    """
    not_empty = min(num_tokens, num_seqs)  # the worst case: all have one token, except for one, which has the rest
    return not_empty + (num_tokens - not_empty) // tokens


def _parts(lo: Ints | int, hi: Ints | int, at: Ints | int) -> Ints:
    """Return the number of parts if keys lo..hi are cut at multiples of `at`. An empty range is one part."""
    return np.maximum(1, -(-np.asarray(hi) // at) - np.asarray(lo) // at)


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """Return each index i repeated counts[i] times, and the number of each repetition, from 0."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


def _items(
    table: ArrayLike,
    rows: ArrayLike,
    count: ArrayLike,
    lo: ArrayLike,
    hi: ArrayLike,
    free_lo: ArrayLike,
    free_hi: ArrayLike,
) -> Ints:
    """Make items of these fields, with the free range clipped to the keys of each: [items, ITEM]."""
    free_lo = np.clip(free_lo, lo, hi)
    free_hi = np.clip(free_hi, free_lo, hi)
    items = np.empty((len(np.atleast_1d(count)), ITEM), np.int64)
    for i, field in enumerate((table, rows, count, lo, hi, free_lo, free_hi, 0)):
        items[:, i] = field
    return items


def _longest_first(items: Ints) -> Ints:
    return items[np.argsort(items[:, 3] - items[:, 4], kind="stable")]
