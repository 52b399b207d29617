"""Attention of many rows on Hopper, in Gluon: one warp copies keys and values, two or three warp groups compute.

A program is resident and takes items of the plan's work list in turn, for one KV head each. A warp copies blocks of K
and V by the hardware's copy engine (TMA) through the block table into a ring in shared memory. Each warp group has 64
rows, (token, head) pairs as in `attention`, and multiplies them with a tile's keys while the weights of the tile before
are multiplied with its values; the groups issue their products in turns (Shah et al. 2024, FlashAttention 3). Tiles are
visited from the last to the first, so that those with masks come first.

Kept as the compiler (triton 3.6) needs it:
- A constant is written literally in the tuple given to `warp_specialize`; a variable becomes a number of the device.
- `mbarrier.arrive` makes the warps of a partition wait for each other. Hardware barriers do not, so buffers are given
  back by these. The compiler takes numbers 0 to 5: one per partition, and one more.
- Weights go from one turn of the loop to the next as pairs in int32: 16-bit values would be unpacked and packed again
  each time.
- The assembler moves the wait for a product up, before the exponentials that should hide it; see `_after`.
- A tile of several blocks is allocated with rank 4 and interpreted again as [keys, D]: a piece of at least 8 rows of
  128 bytes is a whole number of the 1,024 bytes after which the swizzle repeats.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
K_FREE = gl.constexpr(6)  # hardware barriers: of the stages of K, then of V, then the turn of each warp group


@gluon.jit
def _arrive(barrier, THREADS: gl.constexpr):
    """Arrive at a hardware barrier of THREADS threads, and do not wait."""
    if THREADS == 256:
        gl.inline_asm_elementwise("bar.arrive $1, 256; mov.b32 $0, $1;", "=r,r", [barrier], gl.int32, False, 1)
    elif THREADS == 288:
        gl.inline_asm_elementwise("bar.arrive $1, 288; mov.b32 $0, $1;", "=r,r", [barrier], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.arrive $1, 416; mov.b32 $0, $1;", "=r,r", [barrier], gl.int32, False, 1)


@gluon.jit
def _meet(barrier, THREADS: gl.constexpr):
    """Arrive at a hardware barrier of THREADS threads, and wait for the others."""
    if THREADS == 256:
        gl.inline_asm_elementwise("bar.sync $1, 256; mov.b32 $0, $1;", "=r,r", [barrier], gl.int32, False, 1)
    elif THREADS == 288:
        gl.inline_asm_elementwise("bar.sync $1, 288; mov.b32 $0, $1;", "=r,r", [barrier], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.sync $1, 416; mov.b32 $0, $1;", "=r,r", [barrier], gl.int32, False, 1)


@gluon.jit
def _after(x):
    """Return x, four sums of each thread that are never negative; waits that follow in the code follow x in time.

    The assembler moves no wait over a hardware barrier. This one depends on x, and no thread ever comes to it.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 s, t; min.f32 s, $4, $5; min.f32 t, $6, $7; min.f32 s, s, t; "
        "setp.lt.f32 p, s, 0f00000000; @p bar.sync 15, 1024; "
        "mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7; }",
        "=r,=r,=r,=r,r,r,r,r", [x], gl.float32, False, 4,
    )  # fmt: skip


@gluon.jit
def _pack(x, dtype: gl.constexpr):
    """Round fp32 [M, N] to 16 bits, in pairs: int32 [M, N / 2]."""
    lo, hi = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        pairs = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [lo, hi], gl.int32, True, 1)
    else:
        pairs = gl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [lo, hi], gl.int32, True, 1)
    return pairs


@gluon.jit
def _unpack(x, dtype: gl.constexpr, layout: gl.constexpr):
    """Return the operand of a product that `_pack` made pairs of: [M, N]."""
    lo = (x & 0xFFFF).to(gl.int16).to(dtype, bitcast=True)
    hi = (x >> 16).to(gl.int16).to(dtype, bitcast=True)
    y = gl.reshape(gl.join(lo, hi), [x.shape[0], x.shape[1] * 2])
    return gl.convert_layout(y, layout, assert_trivial=True)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """Return the next place in a ring, and the parity of its turn."""
    stage += 1
    wraps = stage == STAGES
    return gl.where(wraps, 0, stage), phase ^ wraps.to(gl.int32)


@gluon.jit
def _entry(items, num_items, num_heads, turn):
    """Return the item's number and the KV head of a turn, and whether there is one. Every second turn goes backwards.

    Items are sorted by their keys, so no program has the longest of each turn. One head follows the other: the programs
    of a turn share as many keys as they can.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    w = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    live = w < num_items * num_heads
    w = gl.where(live, w, 0)
    number = w % num_items
    return number, w // num_items, live & (gl.load(items + number.to(gl.int64) * 8) >= 0)


@gluon.jit
def _copy(
    k_desc, v_desc, ks, vs, k_full, v_full, items, tables, num_items, num_heads, num_blocks, turns, B: gl.constexpr,
    D: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the tiles of K and V of every item, in pieces of P rows and 64 numbers each: the work of one warp."""
    P: gl.constexpr = B if B < N else N
    PIECES: gl.constexpr = N // P
    HALVES: gl.constexpr = D // 64
    ALL: gl.constexpr = GROUPS * 128 + 32
    V_FREE: gl.constexpr = K_FREE + STAGES
    stage = 0
    filled = 0  # tiles
    for turn in range(turns):
        number, head, live = _entry(items, num_items, num_heads, turn)
        item = items + number.to(gl.int64) * 8
        if live:
            ids_at = tables + gl.load(item)
            lo = gl.load(item + 3)
            hi = gl.load(item + 4)
            tiles = gl.maximum((hi - lo + N - 1) // N, 1)
            for i in range(tiles):
                first = lo + (tiles - 1 - i) * N
                ids = ()
                for p in gl.static_range(PIECES):  # beyond hi there are zeros: no block has this number
                    key = first + p * P
                    block = gl.load(ids_at + key // B, mask=key < hi, other=num_blocks)
                    ids = ids + (block,)  # type: ignore[assignment]  # noqa: RUF005 - Gluon unpacks no tuple here
                slot = first % B if B > N else 0
                if filled >= STAGES:
                    _meet(K_FREE + stage, ALL)
                mbarrier.expect(k_full.index(stage), N * D * 2)
                for p in gl.static_range(PIECES):
                    for h in gl.static_range(HALVES):
                        tma.async_copy_global_to_shared(
                            k_desc, [ids[p], head, slot, h * 64], k_full.index(stage),
                            ks.index((stage * HALVES + h) * PIECES + p),
                        )  # fmt: skip
                if filled >= STAGES:
                    _meet(V_FREE + stage, ALL)
                mbarrier.expect(v_full.index(stage), N * D * 2)
                for p in gl.static_range(PIECES):
                    for h in gl.static_range(HALVES):
                        tma.async_copy_global_to_shared(
                            v_desc, [ids[p], head, slot, h * 64], v_full.index(stage),
                            vs.index((stage * HALVES + h) * PIECES + p),
                        )  # fmt: skip
                filled += 1
                stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    for i in gl.static_range(STAGES):  # leave no barrier half full
        if filled > i:
            _meet(K_FREE + i, ALL)
            _meet(V_FREE + i, ALL)


@gluon.jit
def _load_rows(
    q, rows, items, num_items, num_heads, turn, turns, q_token, q_head, WHICH: gl.constexpr, G: gl.constexpr,
    D: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Load a warp group's rows of q of a turn; zeros beyond the item's: [64, D]."""
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, W))
    dim = gl.arange(0, D, layout=gl.SliceLayout(0, W))
    number, head, live = _entry(items, num_items, num_heads, turn)
    item = items + number.to(gl.int64) * 8
    count = gl.where(live & (turn < turns), gl.load(item + 2) - WHICH * (64 // G), 0)
    held = (row // G < count) & (row // G < 64 // G)
    token = gl.load(rows + (gl.load(item + 1) + WHICH * (64 // G) + row // G) * 2, mask=held, other=0)
    at = token.to(gl.int64) * q_token + (head * G + row % G).to(gl.int64) * q_head
    return gl.load(q + at[:, None] + dim[None, :], mask=held[:, None], other=0.0)


@gluon.jit
def _weigh(s, top, total, scale, first, limit, MASKED: gl.constexpr):
    """Compute the weights of one tile, the factor of earlier sums, the largest score and each thread's own sums.

    limit: the number of keys that a row sees.
    """
    if MASKED:
        column = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        s = gl.where(column[None, :] < (limit - first)[:, None], s, float("-inf"))
    new = gl.maximum(top, gl.max(s, 1))
    shift = new * scale
    if MASKED:  # a row may have seen no key yet
        shift = gl.where(new == float("-inf"), 0.0, shift)
    weight = gl.exp2(s * scale - shift[:, None])
    factor = gl.exp2(top * scale - shift)
    sums = gl.sum(gl.reshape(weight, [weight.shape[0], weight.shape[1] // 8, 8]), 1)
    L: gl.constexpr = sums.type.layout
    if total is not None:
        sums += gl.convert_layout(total, L) * gl.convert_layout(factor, gl.SliceLayout(1, L))[:, None]
    return weight, factor, new, sums


@gluon.jit
def _step(
    q, k_tiles, v_tiles, bars, state, ring, first, limit, scale, WHICH: gl.constexpr, N: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Multiply q with a tile's keys while the weights of the tile before are multiplied with its values."""
    k_full, v_full = bars
    mix, packed, top, total = state
    k_stage, k_phase, v_stage, v_phase = ring
    ALL: gl.constexpr = GROUPS * 128 + 32
    TURN: gl.constexpr = K_FREE + 2 * STAGES
    SUMS: gl.constexpr = mix.type.layout
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    zero = gl.zeros([64, N], gl.float32, layout=SCORES)
    mbarrier.wait(k_full.index(k_stage), k_phase)
    _meet(TURN + WHICH, 256)
    s = warpgroup_mma(q, k_tiles.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(v_stage), v_phase)
    p = _unpack(packed, q.dtype, gl.DotOperandLayout(0, SUMS, 2))
    mix = warpgroup_mma(p, v_tiles.index(v_stage), mix, is_async=True)
    _arrive(TURN + (WHICH + 1) % GROUPS, 256)
    s = warpgroup_mma_wait(1, deps=(s,))
    _arrive(K_FREE + k_stage, ALL)
    weight, factor, top, total = _weigh(s, top, total, scale, first, limit, MASKED)
    total = _after(total)
    mix, p = warpgroup_mma_wait(0, deps=(mix, p))
    _arrive(K_FREE + STAGES + v_stage, ALL)
    mix = mix * gl.convert_layout(factor, gl.SliceLayout(1, SUMS))[:, None]
    packed = _pack(weight, q.dtype)
    k_stage, k_phase = _next(k_stage, k_phase, STAGES)
    v_stage, v_phase = _next(v_stage, v_phase, STAGES)
    return (mix, packed, top, total), (k_stage, k_phase, v_stage, v_phase)


@gluon.jit
def _compute(
    qs, ks, vs, k_full, v_full, q, out, lse, part_mix, part_sums, items, rows, ends, sinks, reports, num_items,
    num_heads, turns, q_token, q_head, out_token, out_head, scale, WHICH: gl.constexpr, G: gl.constexpr,
    B: gl.constexpr, D: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Compute a warp group's rows of every item: 64 // G tokens, those after the rows of the groups before it."""
    P: gl.constexpr = B if B < N else N
    PIECES: gl.constexpr = N // P
    HALVES: gl.constexpr = D // 64
    ALL: gl.constexpr = GROUPS * 128 + 32
    TURN: gl.constexpr = K_FREE + 2 * STAGES
    TOKENS: gl.constexpr = 64 // G
    dtype: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    LANES: gl.constexpr = D // 8
    W: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    PIECE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k_tiles = ks._reinterpret(dtype, [STAGES, N, D], SHARED)
    v_tiles = vs._reinterpret(dtype, [STAGES, N, D], SHARED)
    v_pieces = vs._reinterpret(dtype, [STAGES * HALVES * PIECES, P, 64], SHARED)
    mine = qs.index(WHICH)
    bars = (k_full, v_full)
    if WHICH == GROUPS - 1:  # the first group begins
        _arrive(TURN, 256)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    k_stage = 0
    k_phase = 0
    v_stage = 0
    v_phase = 0
    mine.store(_load_rows(q, rows, items, num_items, num_heads, 0, turns, q_token, q_head, WHICH, G, D, W))
    fence_async_shared()
    gl.thread_barrier()
    for turn in range(turns):
        number, head, live = _entry(items, num_items, num_heads, turn)
        item = items + number.to(gl.int64) * 8
        if live:
            first_row = gl.load(item + 1) + WHICH * TOKENS
            several = gl.load(item + 2) > 1
            count = gl.load(item + 2) - WHICH * TOKENS
            lo = gl.load(item + 3)
            hi = gl.load(item + 4)
            free_hi = gl.load(item + 6)
            held = (row // G < count) & (row // G < TOKENS)
            limit = gl.where(held, hi, 0)
            if CAUSAL:
                token = gl.load(rows + (first_row + row // G) * 2, mask=held, other=0)
                limit = gl.minimum(limit, gl.load(ends + token, mask=held, other=0))
            tiles = gl.maximum((hi - lo + N - 1) // N, 1)
            first = lo + (tiles - 1) * N

            mbarrier.wait(k_full.index(k_stage), k_phase)
            zero = gl.zeros([64, N], gl.float32, layout=SCORES)
            s = warpgroup_mma(mine, k_tiles.index(k_stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            _arrive(K_FREE + k_stage, ALL)
            k_stage, k_phase = _next(k_stage, k_phase, STAGES)
            empty = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
            weight, _, top, total = _weigh(s, empty, None, scale, first, limit, True)
            packed = _pack(weight, dtype)
            mix = gl.zeros([64, D], gl.float32, layout=SUMS)
            if hi % P != 0:  # slots that no sequence owns may hold NaN, and 0 times that is NaN
                mbarrier.wait(v_full.index(v_stage), v_phase)
                slot = gl.arange(0, P, layout=gl.SliceLayout(1, PIECE))
                for h in gl.static_range(HALVES):
                    piece = v_pieces.index((v_stage * HALVES + h) * PIECES + hi % N // P)
                    piece.store(gl.where((slot < hi % P)[:, None], piece.load(PIECE), 0.0))
                fence_async_shared()
                gl.thread_barrier()

            state = (mix, packed, top, total)
            ring = (k_stage, k_phase, v_stage, v_phase)
            seen_by_all = gl.maximum((free_hi - lo) // N, 0)  # tiles
            for t in range(tiles - 1, seen_by_all, -1):
                state, ring = _step(
                    mine, k_tiles, v_tiles, bars, state, ring, lo + (t - 1) * N, limit, scale,
                    WHICH, N, GROUPS, STAGES, True,
                )  # fmt: skip
            for t in range(gl.minimum(tiles - 1, seen_by_all), 0, -1):
                state, ring = _step(
                    mine, k_tiles, v_tiles, bars, state, ring, lo + (t - 1) * N, limit, scale,
                    WHICH, N, GROUPS, STAGES, False,
                )  # fmt: skip
            mix, packed, top, total = state
            k_stage, k_phase, v_stage, v_phase = ring
            mbarrier.wait(v_full.index(v_stage), v_phase)
            p = _unpack(packed, dtype, gl.DotOperandLayout(0, SUMS, 2))
            mix = warpgroup_mma(p, v_tiles.index(v_stage), mix, is_async=True)
            mix, p = warpgroup_mma_wait(0, deps=(mix, p))
            _arrive(K_FREE + STAGES + v_stage, ALL)
            v_stage, v_phase = _next(v_stage, v_phase, STAGES)

            total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
            top = top * scale
            token = gl.load(rows + (first_row + row // G) * 2, mask=held, other=0).to(gl.int64)
            part = gl.load(rows + (first_row + row // G) * 2 + 1, mask=held, other=0).to(gl.int64)
            whole = held & (part < 0)
            split = held & (part >= 0)
            of_head = (head * G + row % G).to(gl.int64)
            if lse is not None:
                gl.store(lse + token * (num_heads * G) + of_head, (top + gl.log2(total)) * LN_2, mask=whole)
            sums = part_sums + (part * (num_heads * G) + of_head) * 2
            gl.store(sums, top, mask=split)
            gl.store(sums + 1, total, mask=split)
            if sinks is not None:
                sink = gl.load(sinks + of_head, mask=held, other=0.0) * LOG2_E
                total += gl.exp2(sink - gl.where(top == float("-inf"), 0.0, top))
            share = gl.where(total == 0.0, 0.0, 1.0 / total)
            if reports is not None:
                bad = gl.max(gl.where(gl.abs(mix) < float("inf"), 0, 1), 1)
                at = reports + (number.to(gl.int64) * num_heads + head) * (GROUPS * 64) + WHICH * 64
                by_row = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS))
                of_item = (by_row // G < count) & (by_row // G < TOKENS) & several
                gl.store(at + by_row, bad.to(gl.int8), mask=of_item)
            dim = gl.arange(0, D, layout=gl.SliceLayout(0, SUMS))
            at = gl.convert_layout((part * (num_heads * G) + of_head) * D, gl.SliceLayout(1, SUMS))
            is_part = gl.convert_layout(split.to(gl.int32), gl.SliceLayout(1, SUMS)) > 0
            gl.store(part_mix + at[:, None] + dim[None, :], mix, mask=is_part[:, None])
            mix = mix * gl.convert_layout(share, gl.SliceLayout(1, SUMS))[:, None]
            y = gl.convert_layout(mix.to(dtype), W)
            at = gl.convert_layout(token * out_token + of_head * out_head, gl.SliceLayout(1, W))
            is_whole = gl.convert_layout(whole.to(gl.int32), gl.SliceLayout(1, W)) > 0
            dim = gl.arange(0, D, layout=gl.SliceLayout(0, W))
            gl.store(out + at[:, None] + dim[None, :], y, mask=is_whole[:, None])
        following = _load_rows(
            q, rows, items, num_items, num_heads, turn + 1, turns, q_token, q_head, WHICH, G, D, W
        )  # fmt: skip
        gl.thread_barrier()  # all warps of the group have multiplied their rows
        mine.store(following)
        fence_async_shared()
        gl.thread_barrier()
    if WHICH == 0:
        _meet(TURN, 256)


@gluon.jit(do_not_specialize=["num_items", "num_heads", "num_blocks", "turns"])
def prefill(
    k_desc, v_desc, q, out, lse, part_mix, part_sums, items, rows, ends, tables, sinks, reports, num_items,
    num_heads, num_blocks, turns, q_token, q_head, out_token, out_head, scale,
    G: gl.constexpr, B: gl.constexpr, D: gl.constexpr, N: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute attention of all items, as `attention.attend` does; lists, sums and reports have the same form.

    k_desc, v_desc: descriptors of the cache [N, Hkv, B, D], with boxes of one block's piece of 64 numbers. num_heads:
    KV heads. turns: items of a program. scale: log2(e) times the factor of q·k, positive. GROUPS: warp groups, of 64
    rows each. N: keys of a tile; lo and free_hi of an item are multiples of it. reports: 64 * GROUPS per item and head.
    """
    P: gl.constexpr = B if B < N else N
    COUNT: gl.constexpr = STAGES * (D // 64) * (N // P)
    dtype: gl.constexpr = q.dtype.element_ty
    qs = gl.allocate_shared_memory(dtype, [GROUPS, 64, D], gl.NVMMASharedLayout(128, 16, 2))
    ks = gl.allocate_shared_memory(dtype, [COUNT, 1, 1, P, 64], k_desc.layout)
    vs = gl.allocate_shared_memory(dtype, [COUNT, 1, 1, P, 64], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
    fence_async_shared()
    # fmt: off
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (
                    qs, ks, vs, k_full, v_full, q, out, lse, part_mix, part_sums, items, rows, ends, sinks,
                    reports, num_items, num_heads, turns, q_token, q_head, out_token, out_head, scale,
                    0, G, B, D, N, GROUPS, STAGES, CAUSAL,
                )),
                (_compute, (
                    qs, ks, vs, k_full, v_full, q, out, lse, part_mix, part_sums, items, rows, ends, sinks,
                    reports, num_items, num_heads, turns, q_token, q_head, out_token, out_head, scale,
                    1, G, B, D, N, GROUPS, STAGES, CAUSAL,
                )),
                (_copy, (
                    k_desc, v_desc, ks, vs, k_full, v_full, items, tables, num_items, num_heads, num_blocks, turns,
                    B, D, N, GROUPS, STAGES,
                )),
            ],
            [4, 1], [REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (
                    qs, ks, vs, k_full, v_full, q, out, lse, part_mix, part_sums, items, rows, ends, sinks,
                    reports, num_items, num_heads, turns, q_token, q_head, out_token, out_head, scale,
                    0, G, B, D, N, GROUPS, STAGES, CAUSAL,
                )),
                (_compute, (
                    qs, ks, vs, k_full, v_full, q, out, lse, part_mix, part_sums, items, rows, ends, sinks,
                    reports, num_items, num_heads, turns, q_token, q_head, out_token, out_head, scale,
                    1, G, B, D, N, GROUPS, STAGES, CAUSAL,
                )),
                (_compute, (
                    qs, ks, vs, k_full, v_full, q, out, lse, part_mix, part_sums, items, rows, ends, sinks,
                    reports, num_items, num_heads, turns, q_token, q_head, out_token, out_head, scale,
                    2, G, B, D, N, GROUPS, STAGES, CAUSAL,
                )),
                (_copy, (
                    k_desc, v_desc, ks, vs, k_full, v_full, items, tables, num_items, num_heads, num_blocks, turns,
                    B, D, N, GROUPS, STAGES,
                )),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, COPY_REGISTERS],
        )
    # fmt: on
