"""The work list: whatever the batch, every row sees each of its keys in exactly one item, and the lists have room."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire import ops
from quire.ops.triton import partition, tiles
from quire.ops.triton.partition import Lists, Partitioner
from quire.ops.triton.tiles import CHUNK, SPLIT
from tests.ops.conftest import DEVICES

DEVICE = DEVICES[-1]  # the interpreter's, or the GPU
SEEDS = range(400)


def draw(seed: int) -> tuple[Partitioner, np.ndarray, np.ndarray, np.ndarray]:
    """A partitioner that has just room for a step, and the step: starts, lens, tables."""
    rng = random.Random(seed)
    size, causal = rng.choice((1, 7, 16, 64, 256)), rng.random() < 0.8
    kv_heads, group = rng.choice(((1, 1), (2, 4), (3, 5), (1, 8), (1, 24), (1, 200)))
    spec = ops.AttentionSpec(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=rng.choice((16, 64, 80, 128, 256, 600)),
        block_size=size,
        num_blocks=2**20,
        dtype=rng.choice((torch.bfloat16, torch.float32)),
        causal=causal,
        window=rng.choice((1, 5, 64, 700)) if causal and rng.random() < 0.25 else None,
        reproducible=rng.random() < 0.4,
    )
    num_seqs = rng.choice((0, 1, 2, 2, 4, 5, 33))
    most = rng.choice((40, 3_000, 9_000)) if num_seqs < 6 else 600
    decoding = rng.random() < 0.5
    rows = [rng.choice((0, 1, 1, 1, 2, 1 if decoding else rng.randint(1, 200))) for _ in range(num_seqs)]
    lens = [max(0, n + rng.choice((-3, 0, most, rng.randint(0, most), rng.randint(0, most)))) for n in rows]
    width = max((-(-n // size) for n in lens), default=0)
    tables = np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width)
    for s in range(1, num_seqs):
        common = rng.choice((0, rng.randint(0, width), width))
        tables[s, :common] = tables[rng.randrange(s), :common]
    partitioner = Partitioner(
        spec, rng.choice(("sm80", "sm90", "gfx942")), rng.choice((1, 8, 132, 132)), sum(rows), num_seqs, width
    )
    return partitioner, np.cumsum([0, *rows]), np.array(lens, np.int64), tables


def seen(partitioner: Partitioner, lists: Lists, tables: np.ndarray, num_tokens: int) -> list[dict[int, list[int]]]:
    """Of every query token, by part: the places that its keys lie at (block, offset), as numbers."""
    spec, flat = partitioner.spec, tables.reshape(-1)
    found: list[dict[int, list[int]]] = [{} for _ in range(num_tokens)]
    for items, tile in ((lists.few, partitioner.few_tile), (lists.many, partitioner.many_tile)):
        mixes = partitioner.mixes(items)
        for table, first, count, lo, hi, free_lo, free_hi, _ in items.tolist():
            assert count * min(spec.group_size, tile.block_m) <= tile.block_m
            start = lo // tile.block_n * tile.block_n
            assert start <= free_lo <= free_hi
            if spec.window is None:
                assert free_lo == start  # the kernel has no loop before it
            if free_hi > free_lo:
                assert free_lo % tile.block_n == free_hi % tile.block_n == 0
                assert lo <= free_lo
                assert free_hi <= hi
            seen_by = []
            for token, part in lists.rows[first : first + count].tolist():
                position = lists.positions[token]
                keys = np.arange(lo, hi)
                visible = np.ones(len(keys), bool) if not spec.causal else keys < lists.ends[token]
                if spec.window is not None:
                    visible &= position - keys < spec.window
                assert visible[(keys >= free_lo) & (keys < free_hi)].all()
                seen_by.append(visible)
                keys = keys[visible]
                place = (
                    flat[table + keys // spec.block_size].astype(np.int64) * spec.block_size + keys % spec.block_size
                )
                assert part not in found[token], "two items write the same part"
                found[token][part] = place.tolist()
            assert mixes or all((visible == seen_by[0]).all() for visible in seen_by)
    return found


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.parametrize("worth", [0, partition.WORTH_SHARING])
def test_every_key_once(monkeypatch, worth, long):
    monkeypatch.setattr(partition, "WORTH_SHARING", worth)
    shared = cut = 0
    for seed in SEEDS if long else SEEDS[:200]:
        partitioner, starts, lens, tables = draw(seed)
        spec, num_tokens = partitioner.spec, int(starts[-1])
        ends = np.repeat(lens - starts[1:], np.diff(starts)) + np.arange(num_tokens) + 1
        if seed % 3 == 0:  # every row sees the others of its 20 tokens
            last = np.minimum(np.arange(num_tokens) // 20 * 20 + 20, np.repeat(starts[1:], np.diff(starts)))
            ends = ends[last - 1]
        ends = np.maximum(ends, 0)
        lists = partitioner.cut(starts, lens, tables, None if seed % 3 else ends)
        room = partitioner.room
        assert len(lists.few) <= room.few, seed
        assert len(lists.many) <= room.many, seed
        assert lists.num_parts <= room.rows >= len(lists.rows), seed
        assert len(lists.merges) <= num_tokens, seed
        found = seen(partitioner, lists, tables, num_tokens)
        merged = {token: range(first, first + count) for token, first, count in lists.merges.tolist()}
        assert sorted(p for parts in merged.values() for p in parts) == list(range(lists.num_parts)), seed
        for s in range(len(lens)):
            for token in range(starts[s], starts[s + 1]):
                position = lens[s] - starts[s + 1] + token
                assert lists.positions[token] == position
                first = 0 if spec.window is None else max(0, position - spec.window + 1)
                keys = np.arange(first, ends[token] if spec.causal else lens[s])
                want = tables[s, keys // spec.block_size].astype(np.int64) * spec.block_size + keys % spec.block_size
                parts = found[token]
                assert list(merged.get(token, [-1])) == sorted(parts), (seed, token)
                in_order = [place for part in sorted(parts) for place in parts[part]]
                assert in_order == want.tolist(), (seed, token)
        shared += any(len(set(np.searchsorted(starts, lists.rows[f : f + c, 0], "right"))) > 1
            for _, f, c, *_ in lists.many.tolist())  # fmt: skip
        cut += len(lists.merges) > 0
    assert cut > 20
    assert (shared > 10) == (worth == 0)


def test_reproducible_parts_are_chunks(monkeypatch):
    """The parts of a reproducible row's keys are chunks, each by itself: there is one order in which they merge."""
    monkeypatch.setattr(partition, "WORTH_SHARING", 0)
    parts = 0
    for seed in SEEDS:
        partitioner, starts, lens, tables = draw(seed)
        if partitioner.spec.reproducible:
            lists = partitioner.cut(starts, lens, tables)
            for _, first, count, lo, hi, *_ in [*lists.few.tolist(), *lists.many.tolist()]:
                if (lists.rows[first : first + count, 1] >= 0).any():
                    parts += 1
                    assert lo // CHUNK == (hi - 1) // CHUNK
    assert parts > 100


def one_token_each(processors: int, lens: list[int], **fields: object) -> tuple[Partitioner, Lists]:
    fields = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, **fields}
    spec = ops.AttentionSpec(num_blocks=2**20, dtype=torch.bfloat16, **fields)
    width = -(-max(lens) // 16)
    partitioner = Partitioner(spec, "sm90", processors, len(lens), len(lens), width)
    tables = np.arange(len(lens) * width, dtype=np.int32).reshape(len(lens), width)
    return partitioner, partitioner.cut(np.arange(len(lens) + 1), np.array(lens), tables)


def test_one_long_context_fills_the_device_and_many_stay_whole():
    partitioner, lists = one_token_each(16, [16_384])
    assert partitioner.few_wanted == 16  # 2 programs on each of 16 processors, 2 KV heads
    assert 0.75 * 16 <= len(lists.few) <= 16
    assert ((lists.few[:, 4] - lists.few[:, 3]) % SPLIT == 0).all()
    _, lists = one_token_each(16, [16_384] * 16)
    assert (len(lists.few), len(lists.merges)) == (16, 0)


def test_contexts_are_cut_where_the_last_of_them_would_leave_the_device_idle():
    """A little more than fills it takes two turns, the second with nearly nothing to do."""
    _, lists = one_token_each(16, [16_384] * 17)
    parts = lists.few[:, 4] - lists.few[:, 3]
    assert parts.max() < 16_384
    assert len(lists.few) / 16 % 1 > 0.5 or len(lists.few) > 3 * 16
    _, lists = one_token_each(16, [16_384] * 31)
    assert (len(lists.few), len(lists.merges)) == (31, 0)


def test_a_context_much_longer_than_the_others_is_cut_whatever_their_number():
    """Else its items would run on when all others are done."""
    for reproducible in (False, True):
        partitioner, lists = one_token_each(16, [100_000] + [500] * 63, reproducible=reproducible)
        items = lists.many if reproducible else lists.few
        wanted = partitioner.many_wanted if reproducible else partitioner.few_wanted
        longest = (items[:, 4] - items[:, 3]).max()
        assert longest <= 2 * (100_000 + 63 * 500) / wanted + SPLIT
        assert len(items) > 64 > wanted


def test_a_long_prompt_beside_them_does_not_keep_sequences_from_sharing():
    """Nor where parts of a reproducible plan are chunks."""
    keys, width, count = 32_768, 33_024 // 16, 64
    tables = np.arange((count + 1) * width, dtype=np.int32).reshape(count + 1, width)
    tables[1:count, : keys // 16] = tables[0, : keys // 16]
    starts = np.concatenate([np.arange(count + 1), [count + 2_048]])
    lens = np.full(count + 1, 33_024)
    for reproducible in (False, True):
        spec = ops.AttentionSpec(
            num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, num_blocks=2**20, dtype=torch.bfloat16,
            reproducible=reproducible,
        )  # fmt: skip
        partitioner = Partitioner(spec, "sm90", 132, 4_096, 256, width)
        lists = partitioner.cut(starts, lens, tables)
        items = np.concatenate([lists.few, lists.many])
        decoding = lists.rows[items[:, 1], 0] < count
        read = (items[:, 4] - items[:, 3])[decoding].sum()
        assert read < count * 300 + 16 * keys, "the shared keys are read for each sequence"


@pytest.mark.parametrize("own", [16, 240, 700])
@pytest.mark.parametrize("keys", [2_048, 4_096, 30_720])
def test_short_remainders_after_shared_keys_stay_whole(keys, own):
    """Wherever cuts of longer ones would lie."""
    width, count = (keys + own) // 16, 256
    tables = np.arange(count * width, dtype=np.int32).reshape(count, width)
    tables[:, : keys // 16] = tables[0, : keys // 16]
    spec = ops.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, num_blocks=2**20, dtype=torch.bfloat16
    )
    partitioner = Partitioner(spec, "sm90", 132, count, count, width)
    lists = partitioner.cut(np.arange(count + 1), np.full(count, keys + own), tables)
    assert len(lists.few) == count
    assert len(lists.merges) == count
    assert lists.many[:, 4].max() == keys // SPLIT * SPLIT


def test_no_part_is_smaller_than_it_is_worth():
    _, lists = one_token_each(132, [1_000, 300, 256, 1])
    sizes = lists.few[:, 4] - lists.few[:, 3]
    assert sorted(sizes.tolist()) == [1, 44, 232, 256, 256, 256, 256, 256]


def test_tiles_of_rows_that_decode_mix_nothing():
    """So a step of them needs no second launch, nor does a graph of steps of no more tokens than sequences."""
    backend = ops.load("triton", DEVICE)
    metadata = torch.tensor([9, 300]), torch.arange(40).reshape(2, 20)
    for starts, max_tokens, mixed, graph in (
        ([0, 1, 2], 2, (False, False), (False, False)),  # with one token each
        ([0, 1, 2], 40, (False, False), (True, True)),
        ([0, 0, 2], 2, (False, False), (False, False)),  # of a plan for decoding, with a tile for each token
        ([0, 1, 4], 40, (True, False), (True, True)),
        ([0, 1, 40], 40, (False, True), (True, True)),
    ):
        for causal in (True, False):
            spec = ops.AttentionSpec(
                num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, num_blocks=40, dtype=torch.bfloat16,
                causal=causal, device=DEVICE,
            )  # fmt: skip
            plan = backend.make_plan(spec, max_tokens, 2, 20)
            plan.update(torch.tensor(starts), *metadata)
            assert plan.launched_again == (mixed if causal else (False, False)), (starts, causal)
            plan.covers_all = True
            assert plan.launched_again == (graph if causal else (False, False)), (starts, causal)


def test_the_longest_items_come_first():
    _, lists = one_token_each(1, [10, 2_000, 70, 900])
    assert (lists.few[:, 4] - lists.few[:, 3]).tolist() == [2_000, 900, 70, 10]


@pytest.mark.parametrize("chip", ["sm80", "sm90", "sm100", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_all_rows_of_a_reproducible_plan_have_one_tile(chip, dtype, head_dim):
    """Sequences that decode, pieces of prompts and both: the instructions of a row do not depend on its batch."""
    spec = ops.AttentionSpec(
        num_heads=8, num_kv_heads=1, head_dim=head_dim, block_size=16, num_blocks=2**20, dtype=dtype, reproducible=True
    )
    partitioner = Partitioner(spec, chip, 132, 4_096, 64, 256)
    assert partitioner.few_tile == partitioner.many_tile == tiles.choose(chip, "exact", spec)
    for rows in ([1], [10], [1, 1, 1], [1, 300, 2], [10] * 3):
        starts = np.cumsum([0, *rows])
        tables = np.arange(len(rows) * 256, dtype=np.int32).reshape(-1, 256)
        lists = partitioner.cut(starts, np.full(len(rows), 3_000), tables)
        assert len(lists.few) == 0
        assert len(lists.many) > 0


def test_a_step_that_would_need_more_parts_than_there_is_room_for_is_not_cut(monkeypatch):
    monkeypatch.setattr(partition, "PART_MEMORY", 0)
    monkeypatch.setattr(partition, "WORTH_SHARING", 0)
    partitioner, lists = one_token_each(132, [9_000] * 3, reproducible=True)
    assert len(lists.rows) <= partitioner.room.rows
    assert lists.num_parts == 0


@pytest.mark.slow
def test_what_is_remembered_of_the_step_before_does_not_show(long):
    """One partitioner, and a new one for each step: rows come and go, and contexts grow by a token a step."""
    for seed in range(12 if long else 6):
        partitioner, starts, lens, tables = draw(seed)
        room = partitioner.room
        for step in range(140):  # contexts pass multiples of blocks and tiles
            grown = lens + step * (np.diff(starts) == 1)
            width = -(-int(grown.max(initial=0)) // partitioner.spec.block_size)
            wider = np.zeros((len(lens), width), np.int32)
            wider[:, : tables.shape[1]] = tables
            fresh, *_ = draw(seed)
            partitioner.room = fresh.room = replace(room, few=10**6, many=10**6, rows=10**6)
            if step % 40 == 39:  # another step in between
                partitioner.cut(np.array([0, 1]), np.array([77]), np.zeros((1, 10), np.int32))
            got, want = partitioner.cut(starts, grown, wider), fresh.cut(starts, grown, wider)
            for name in ("few", "many", "rows", "merges", "positions", "sequences"):
                assert np.array_equal(getattr(got, name), getattr(want, name)), (seed, step, name)
