"""The attention kernels: one body for tiles of few rows (decode) and of many (prefill), and the merge of parts.

A program has one item of the plan's work list and one KV head. An item is a tile of query rows and a range of keys:
its rows are (query token, head) pairs, the G heads of a token next to each other, so that keys are read once for all of
them. The tokens may be from several sequences if these share the keys. The online softmax (Milakov & Gimelshein
2018) runs over tiles of keys at absolute multiples of the tile's size, in base 2.

Three choices determine its speed:
- The ids of a tile's blocks are loaded one iteration ahead. The compiler does not pipeline a loop that loads ids and,
  in the same iteration, the keys at these ids.
- Tiles that are entirely visible to all rows use no masks; the plan gives their range.
- Head dimensions that are not a power of two are split into a main part and a tail: 80 = 64 + 16, 192 = 128 + 64.

A row has the weight 0 for a key that it does not see, and 0 times an infinite value or NaN is NaN. So a program whose
rows see different keys reports rows whose sums are not finite. A second launch (FINITE) computes such items again
without these values, and stores the rows that see none of them. The results of the other rows are left unchanged.

A cache of integers has scales: those of K multiply the products before the scale of the scores does, those of V the
weights before these are rounded; afterwards the weights of keys that a row does not see are set to 0 again. Integers
are finite, so no second launch is needed. In a LATENT cache the scales multiply the products of the main part (V's) and
of the tail.

Scalar offsets are added to a pointer before the offsets of a tensor: the compiler (3.5, 3.6) miscompiled the other
order in split reductions. Offsets that may exceed 2^31 have 64 bits. An argument that is `None` is compiled away.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quire.ops.triton.functions import is_finite
from quire.ops.triton.widening import widen

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.constexpr_function
def main_part(dim: int, pairs: bool = False) -> int:
    """Return the largest power of two in a head dimension, at least the 16 that a matrix product needs.

    pairs: the main part has the even dimensions and the tail the odd ones, see `widen`.
    """
    if pairs:
        return dim // 2
    return max(16, 1 << (dim.bit_length() - 1))


@triton.constexpr_function
def tail_part(dim: int, pairs: bool = False) -> int:
    """Return the size of the rest of a head dimension, rounded up to a power of two, or 0 without a rest."""
    if pairs:
        return dim // 2
    left = dim - main_part(dim)
    return 0 if left <= 0 else max(16, 1 << (left - 1).bit_length())


@triton.jit
def _fold(mix, top, total, new_mix, new_top, new_total):
    """Merge the states over two sets of keys. `reproducible` requires the same order of operations everywhere."""
    both = tl.maximum(top, new_top)
    shift = tl.where(both == float("-inf"), 0.0, both)
    old, new = tl.exp2(top - shift), tl.exp2(new_top - shift)
    return tl.fma(new_mix, new[:, None], mix * old[:, None]), both, tl.fma(new_total, new, total * old)


@triton.jit
def _share(top, total, sink):
    """Return the factor of a row's sum of weighted values: 1 / denominator, or 0 for a row that has seen no key."""
    if sink is not None:
        total += tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))
    return tl.where(total == 0, 0.0, 1.0 / total)  # NaN stays


@triton.jit
def _ids(table, first, lane, hi, TILE: tl.constexpr, B: tl.constexpr):
    """Load the block ids of the keys in the tile that begins at `first`. Entries beyond `hi` are not read."""
    if TILE % B == 0:
        at = first // B + lane // B
    elif B % TILE == 0:
        at = first // B + 0 * lane
    else:
        at = (first + lane) // B
    return tl.load(table + at, mask=first + lane < hi, other=0)


@triton.jit
def _part(
    base, at, held, dtype, FIRST: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr,
    STRIDE: tl.constexpr = 1,
):  # fmt: skip
    """Load COUNT dimensions of SIZE of a tile's keys or values from FIRST on, one per row; zeros elsewhere."""
    dim = FIRST + tl.arange(0, COUNT) * STRIDE
    rows = base + at[:, None] + dim[None, :]
    if STRIDE == 1 and FIRST + COUNT > SIZE:
        if MASKED:
            x = tl.load(rows, mask=held[:, None] & (dim < SIZE)[None, :], other=0.0)
        else:
            x = tl.load(rows, mask=(dim < SIZE)[None, :], other=0.0)
    else:
        if MASKED:
            x = tl.load(rows, mask=held[:, None], other=0.0)
        else:
            x = tl.load(rows)
    return x.to(dtype)


@triton.jit
def _scales(base, ids, slot, held, block_stride, slot_stride, MASKED: tl.constexpr):
    """Load the scale of each key or value of a tile; 0 for keys that are not held."""
    at = base + ids.to(tl.int64) * block_stride + slot.to(tl.int64) * slot_stride
    if MASKED:
        return tl.load(at, mask=held, other=0.0)
    return tl.load(at)


@triton.jit
def _without(total, values, seen):
    """Replace values that are not finite by 0, and the total of a row that sees one by NaN."""
    finite = is_finite(values)
    bad = tl.min(finite.to(tl.int32), 1) == 0
    total = tl.where(tl.max((seen & bad[None, :]).to(tl.int32), 1) > 0, float("nan"), total)
    return total, tl.where(finite, values, 0.0)


@triton.jit
def _slots(first, lane, TILE: tl.constexpr, B: tl.constexpr):
    """Return the offset in its block of each key of the tile that begins at `first`, a multiple of the tile's size.

    The cases are written out so that a loop need not compute offsets again: long prompts are bound by instructions.
    """
    if TILE % B == 0:
        return lane % B
    if B % TILE == 0:
        return first % B + lane
    return (first + lane) % B


@triton.jit
def _tile(
    state, rows, cache, scale, cap, slope, window, span, first, lane, ids, lo, hi,
    TILE: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, FINITE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to the state: one step of the online softmax.

    With FINITE, values that are not finite are left out, and the sum of weights of each row that sees one becomes NaN.
    """
    mix, mix_tail, top, total = state
    q, q_tail, position, end = rows
    k, v, k_block, k_slot, v_block, v_slot, k_scale, v_scale, scale_strides = cache
    D_MAIN: tl.constexpr = main_part(D, PAIRS)
    D_TAIL: tl.constexpr = tail_part(D, PAIRS)
    V_MAIN: tl.constexpr = main_part(DV, PAIRS)
    V_TAIL: tl.constexpr = tail_part(DV, PAIRS)
    key, slot = first + lane, _slots(first, lane, TILE, B)
    held = (key >= lo) & (key < hi)
    at = ids.to(tl.int64) * k_block + slot.to(tl.int64) * k_slot
    if PAIRS is not None:
        keys = _part(k, at, held, tl.int16, 0, D_MAIN, D_MAIN, MASKED)
        score = tl.dot(q, tl.trans(widen(keys, q.dtype, PAIRS, False)), input_precision=PRECISION)
        score = tl.dot(q_tail, tl.trans(widen(keys, q.dtype, PAIRS, True)), score, input_precision=PRECISION)
    else:
        keys = _part(k, at, held, q.dtype, 0, D_MAIN, D, MASKED)
        score = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if LATENT:
        score *= _scales(v_scale, ids, slot, held, scale_strides[2], scale_strides[3], MASKED)[None, :]
        keys = _part(k, at, held, q.dtype, D_MAIN, D_TAIL, D, MASKED)
        others = tl.dot(q_tail, tl.trans(keys), input_precision=PRECISION)
        score += others * _scales(k_scale, ids, slot, held, scale_strides[0], scale_strides[1], MASKED)[None, :]
    else:
        if D_TAIL > 0 and PAIRS is None:
            keys = _part(k, at, held, q.dtype, D_MAIN, D_TAIL, D, MASKED)
            score = tl.dot(q_tail, tl.trans(keys), score, input_precision=PRECISION)
        if k_scale is not None:
            score *= _scales(k_scale, ids, slot, held, scale_strides[0], scale_strides[1], MASKED)[None, :]
    score *= scale
    if cap is not None:  # tanh; its form (a - b) / (a + b) would be inf / inf
        score = cap * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
    if slope is not None:
        score += slope[:, None] * (key[None, :] - position[:, None]).to(tl.float32)
    if MASKED:
        seen = held[None, :]
        if CAUSAL:
            seen = seen & (key[None, :] < end[:, None])
        if window is not None:
            seen = seen & (position[:, None] - key[None, :] < window)
        if span is not None:
            seen = seen & (key[None, :] >= (position // span * span)[:, None])
        score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    shift = new_top
    if MASKED:  # a row may have seen no key yet
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - shift[:, None])
    correction = tl.exp2(top - shift)
    total = total * correction + tl.sum(weight, 1)
    if v_scale is not None:
        weight *= _scales(v_scale, ids, slot, held, scale_strides[2], scale_strides[3], MASKED)[None, :]
        if MASKED:
            weight = tl.where(seen, weight, 0.0)
    if v_block is not None:
        at = ids.to(tl.int64) * v_block + slot.to(tl.int64) * v_slot
    if PAIRS is not None:
        both = _part(v, at, held, tl.int16, 0, V_MAIN, V_MAIN, MASKED)
        values = widen(both, q.dtype, PAIRS, False)
    else:
        values = _part(v, at, held, q.dtype, 0, V_MAIN, DV, MASKED)
    if FINITE:
        total, values = _without(total, values, seen)
    mix = tl.dot(weight.to(q.dtype), values, mix * correction[:, None], input_precision=PRECISION)
    if V_TAIL:
        if PAIRS is not None:
            values = widen(both, q.dtype, PAIRS, True)
        else:
            values = _part(v, at, held, q.dtype, V_MAIN, V_TAIL, DV, MASKED)
        if FINITE:
            total, values = _without(total, values, seen)
        mix_tail = tl.dot(weight.to(q.dtype), values, mix_tail * correction[:, None], input_precision=PRECISION)
    return mix, mix_tail, new_top, total


@triton.jit
def _empty(BLOCK_M: tl.constexpr, DV: tl.constexpr, PAIRS: tl.constexpr):
    """Return the state over no keys: sums of weighted values (main part, tail), largest score, sum of weights."""
    V_TAIL: tl.constexpr = tail_part(DV, PAIRS)
    total = tl.zeros([BLOCK_M], tl.float32)
    mix_tail = total  # a placeholder if there is no tail
    if V_TAIL:
        mix_tail = tl.zeros([BLOCK_M, V_TAIL], tl.float32)
    return tl.zeros([BLOCK_M, main_part(DV, PAIRS)], tl.float32), mix_tail, total + float("-inf"), total


@triton.jit
def _walk(
    state, rows, cache, scale, cap, slope, window, span, table, lo, hi, start, free_lo, free_hi,
    TILE: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, FINITE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Add the keys lo..hi to the state, in tiles from `start` on. All rows see the keys free_lo..free_hi."""
    # fmt: off
    lane = tl.arange(0, TILE)
    # Keys before lo are not the item's, but the ids of their blocks may be read if a tile has later keys.
    ids = _ids(table, start, lane, hi, TILE, B)
    if window is not None:  # the first tiles are only partially visible
        for first in range(start, free_lo, TILE):
            state = _tile(
                state, rows, cache, scale, cap, slope, window, span, first, lane, ids, lo, hi,
                TILE, B, D, DV, LATENT, CAUSAL, PRECISION, True, FINITE, PAIRS,
            )
            ids = _ids(table, first + TILE, lane, hi, TILE, B)
    for first in range(free_lo, free_hi, TILE):
        state = _tile(
            state, rows, cache, scale, cap, slope, window, span, first, lane, ids, lo, hi,
            TILE, B, D, DV, LATENT, CAUSAL, PRECISION, FINITE, FINITE, PAIRS,
        )
        ids = _ids(table, first + TILE, lane, hi, TILE, B)
    for first in range(free_hi, hi, TILE):
        state = _tile(
            state, rows, cache, scale, cap, slope, window, span, first, lane, ids, lo, hi,
            TILE, B, D, DV, LATENT, CAUSAL, PRECISION, True, FINITE, PAIRS,
        )
        ids = _ids(table, first + TILE, lane, hi, TILE, B)
    # fmt: on
    return state


@triton.jit
def _store(base, at, x, live, FIRST: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr = 1):
    """Store dimensions FIRST.. of SIZE of the live rows."""
    dim = FIRST + tl.arange(0, x.shape[1]) * STRIDE
    mask = live[:, None]
    if STRIDE == 1 and FIRST + x.shape[1] > SIZE:
        mask = mask & (dim < SIZE)[None, :]
    tl.store(base + at[:, None] + dim[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _report(reports, BLOCK_M: tl.constexpr):
    """Return the addresses of the reports of this program's rows."""
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    return reports + (program * tl.num_programs(2) + tl.program_id(2)) * BLOCK_M + tl.arange(0, BLOCK_M)


@triton.jit
def attend(
    q, k, v, k_scale, v_scale, out, lse, part_mix, part_sums, items, rows, positions, ends, sequences, tables, slopes,
    sinks, reports, scale, cap, window, span,
    slope_seq, q_token, q_head, k_block, k_head, k_slot, v_block, v_head, v_slot,
    k_scale_block, k_scale_head, k_scale_slot, v_scale_block, v_scale_head, v_scale_slot, out_token, out_head,
    G: tl.constexpr, B: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, LATENT: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    FINITE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Compute attention of one item for one KV head.

    The result goes to `out`, or for a part of the rows' keys to `part_mix` and `part_sums`.

    items: int32, 8 per item: begin of its block ids in `tables` (negative: nothing to do), its first entry in `rows`,
    its tokens, lo, hi, free_lo, free_hi. rows: int32, 2 per entry: a query token, and its part (negative: all keys).
    k_scale, v_scale: fp32, of a cache of int8; otherwise `None`.
    k_block .. v_slot: strides, all multiples of UNIT elements. v_block, v_slot: `None` if they are those of K.
    BLOCK_M: if an item has more rows, the third dimension of the grid has a program for each BLOCK_M of them.
    ends: int32, of each query token: in a CAUSAL plan it sees no key from this one on.
    sequences: int32, of each query token; `None` if all sequences have the same slopes.
    scale: log2(e) times the factor of q·k; with a softcap 2 log2(e) / softcap times it, and cap is log2(e) softcap.
    span: a row sees no key before the last multiple of `span` positions; `None`: it sees all earlier keys.
    CHUNK: keys are processed in chunks at absolute multiples of CHUNK. Each has a separate state, and these are folded
    in ascending order: the same operations as if each chunk were an item and `merge` folded them. 0: no chunks.
    reports: int8, BLOCK_M per program: 1 if the row's sums are not all finite; only of items of several tokens.
    LATENT: a cache of int8 whose V is the first DV numbers of K; DV is the main part of D.
    FINITE: compute only the reported rows, without values that are not finite.
    PAIRS: of a cache of 8 bits: load two dimensions at a time, see `widen`. None: load each.
    """
    item = items + tl.program_id(0).to(tl.int64) * 8
    table = tl.load(item)
    if table < 0:
        return
    first_row, count = tl.load(item + 1), tl.load(item + 2)
    lo, hi, free_lo, free_hi = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1) * G
    GROUP: tl.constexpr = G if G < BLOCK_M else BLOCK_M  # heads of a token in the tile
    HEAD_TILES: tl.constexpr = (G + BLOCK_M - 1) // BLOCK_M
    several = count > 1  # rows of a single token see the same keys
    skipped = tl.program_id(2) // HEAD_TILES * (BLOCK_M // GROUP)
    first_row, count = first_row + skipped, tl.minimum(count - skipped, BLOCK_M // GROUP)
    if count <= 0:
        return
    # Show the compiler that the strides are multiples of UNIT, so that it loads 16 bytes at a time.
    STRIDE: tl.constexpr = 1 if PAIRS is None else 2
    OWN: tl.constexpr = UNIT // STRIDE  # in the elements that are loaded
    if PAIRS is not None:
        k, v = k.to(tl.pointer_type(tl.int16)), v.to(tl.pointer_type(tl.int16))
    k_block, k_head, k_slot = k_block // UNIT * OWN, k_head // UNIT * OWN, k_slot // UNIT * OWN
    v_head = v_head // UNIT * OWN
    if v_block is not None:
        v_block, v_slot = v_block // UNIT * OWN, v_slot // UNIT * OWN
    D_MAIN: tl.constexpr = main_part(D, PAIRS)
    D_TAIL: tl.constexpr = tail_part(D, PAIRS)
    V_MAIN: tl.constexpr = main_part(DV, PAIRS)
    V_TAIL: tl.constexpr = tail_part(DV, PAIRS)

    row = tl.arange(0, BLOCK_M)
    of_group = tl.program_id(2) % HEAD_TILES * BLOCK_M + row % GROUP
    live = (row // GROUP < count) & (of_group < G)
    if FINITE:
        reported = tl.load(_report(reports, BLOCK_M), mask=live & several, other=0)
        if tl.max(reported, 0) == 0:
            return
    entry = rows + first_row.to(tl.int64) * 2 + row // GROUP * 2
    token = tl.load(entry, mask=live, other=0)
    position = tl.load(positions + token, mask=live, other=0)
    row_end = position  # unused
    if CAUSAL:
        row_end = tl.load(ends + token, mask=live, other=0)
    q_heads = (head * G + of_group).to(tl.int64)
    at = token.to(tl.int64) * q_token + q_heads * q_head
    D_NEXT: tl.constexpr = D_MAIN if PAIRS is None else 1  # the tail's first dimension
    V_NEXT: tl.constexpr = V_MAIN if PAIRS is None else 1
    q_main = _part(q, at, live, q.dtype.element_ty, 0, D_MAIN, D, True, STRIDE)
    q_tail = q_main
    if D_TAIL:
        q_tail = _part(q, at, live, q.dtype.element_ty, D_NEXT, D_TAIL, D, True, STRIDE)
    slope = slopes
    if slopes is not None:
        at = q_heads
        if sequences is not None:
            at += tl.load(sequences + token, mask=live, other=0).to(tl.int64) * slope_seq
        slope = tl.load(slopes + at, mask=live, other=0.0) * LOG2_E

    k_of_head = k + head.to(tl.int64) * k_head
    v_of_head = v + head.to(tl.int64) * v_head
    k_scales, v_scales = k_scale, v_scale
    if k_scale is not None:
        k_scales += head.to(tl.int64) * k_scale_head
        v_scales += head.to(tl.int64) * v_scale_head
    scale_strides = (k_scale_block, k_scale_slot, v_scale_block, v_scale_slot)
    cache = (k_of_head, v_of_head, k_block, k_slot, v_block, v_slot, k_scales, v_scales, scale_strides)
    query = (q_main, q_tail, position, row_end)
    if span is not None:  # items begin where a window does; a single row must see all of its item's keys
        lo = tl.maximum(lo, tl.min(tl.where(live, position, hi), 0) // span * span)
    start = lo // TILE * TILE
    if span is not None:
        free_lo, free_hi = start, start
    ids = tables + table
    state = _empty(BLOCK_M, DV, PAIRS)
    if CHUNK == 0:
        state = _walk(
            state, query, cache, scale, cap, slope, window, span, ids, lo, hi, start, free_lo, free_hi,
            TILE, B, D, DV, LATENT, CAUSAL, PRECISION, FINITE, PAIRS,
        )  # fmt: skip
    else:
        for chunk in range(lo // CHUNK * CHUNK, hi, CHUNK):
            end = chunk + CHUNK
            begin = tl.maximum(start, chunk)
            free_begin = tl.minimum(tl.maximum(free_lo, begin), end)
            free_end = tl.minimum(tl.maximum(free_hi, free_begin), end)
            mix, mix_tail, top, total = state
            new_mix, new_tail, new_top, new_total = _walk(
                _empty(BLOCK_M, DV, PAIRS), query, cache, scale, cap, slope, window, span, ids, lo, tl.minimum(hi, end),
                begin, free_begin, free_end, TILE, B, D, DV, LATENT, CAUSAL, PRECISION, FINITE, PAIRS,
            )  # fmt: skip
            if V_TAIL:
                mix_tail, _, _ = _fold(mix_tail, top, total, new_tail, new_top, new_total)
            mix, top, total = _fold(mix, top, total, new_mix, new_top, new_total)
            if V_TAIL == 0:
                mix_tail = total
            state = (mix, mix_tail, top, total)
    mix, mix_tail, top, total = state

    if FINITE:
        live = live & (total == total)

    part = tl.load(entry + 1, mask=live, other=0)
    whole = live & (part < 0)
    split = live & (part >= 0)
    at = (part.to(tl.int64) * num_heads + q_heads) * DV
    _store(part_mix, at, mix, split, 0, DV, STRIDE)
    if V_TAIL:
        _store(part_mix, at, mix_tail, split, V_NEXT, DV, STRIDE)
    sums = part_sums + (part.to(tl.int64) * num_heads + q_heads) * 2
    tl.store(sums, top, mask=split)
    tl.store(sums + 1, total, mask=split)
    sink = sinks
    if sinks is not None:
        sink = tl.load(sinks + q_heads, mask=live, other=0.0) * LOG2_E
    share = _share(top, total, sink)[:, None]
    at = token.to(tl.int64) * out_token + q_heads * out_head
    _store(out, at, mix * share, whole, 0, DV, STRIDE)
    if V_TAIL:
        _store(out, at, mix_tail * share, whole, V_NEXT, DV, STRIDE)
    if lse is not None:
        tl.store(lse + token.to(tl.int64) * num_heads + q_heads, (top + tl.log2(total)) * LN_2, mask=whole)
    if reports is not None and not FINITE:
        finite = tl.min(is_finite(mix).to(tl.int32), 1)
        if V_TAIL:
            finite = tl.minimum(finite, tl.min(is_finite(mix_tail).to(tl.int32), 1))
        tl.store(_report(reports, BLOCK_M), (1 - finite).to(tl.int8), mask=live & several)


@triton.jit
def merge(
    out, lse, part_mix, part_sums, merges, sinks, out_token, out_head, DV: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Fold the parts of one query token and head, in ascending order of their keys.

    merges: int32, 3 per token: the token (negative: nothing to do), its first part, its number of parts.
    """
    row = merges + tl.program_id(0).to(tl.int64) * 3
    token = tl.load(row)
    if token < 0:
        return
    first, count = tl.load(row + 1), tl.load(row + 2)
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    begin = first.to(tl.int64) * num_heads + head
    sums = part_sums + begin * 2
    mixes = part_mix + begin * DV
    one = tl.arange(0, 1)
    total = tl.zeros([1], tl.float32)
    top = total + float("-inf")
    mix = tl.zeros([1, DIMS], tl.float32)
    for i in tl.range(0, count, num_stages=4):
        held = one + i < count
        at = (one + i).to(tl.int64) * num_heads
        new_mix = _part(mixes, at * DV, held, tl.float32, 0, DIMS, DV, False)
        mix, top, total = _fold(mix, top, total, new_mix, tl.load(sums + 2 * at), tl.load(sums + 2 * at + 1))
    sink = sinks
    if sinks is not None:
        sink = tl.load(sinks + head + one) * LOG2_E
    at = token.to(tl.int64) * out_token + head.to(tl.int64) * out_head + one
    _store(out, at, mix * _share(top, total, sink)[:, None], one == 0, 0, DV)
    if lse is not None:
        tl.store(lse + token.to(tl.int64) * num_heads + head + one, (top + tl.log2(total)) * LN_2)
