"""RoseLLM's decode: the new token's K and V are separate arguments, and are appended to the cache afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import BadShape, BadValue
from quire.ops.checks.attention import check_new
from quire.ops.checks.tensors import has_values, renamed, to_host
from quire.ops.paged import check_sizes, describe, empty_rows
from quire.ops.registered import one_call, pin
from quire.ops.registry import load
from quire.ops.spec import AttentionSpec, PagedKV, Scores

# An operator's name of an argument -> its name here.
LAYER = {
    "block_tables": "block_table",
    "k_cache": "k_cache_layer",
    "v_cache": "v_cache_layer",
    "k": "k_cache_layer",
    "v": "v_cache_layer",
}


@one_call(
    "(Tensor q, Tensor k_new, Tensor v_new, Tensor k_cache_layer, Tensor v_cache_layer, Tensor block_table, "
    'Tensor context_lens, *, float? scale=None, SymInt? block_size=None, str backend="auto") -> Tensor',
    empty_rows,
)
def paged_attention_decode(
    q: Tensor,  # [S, Hq, D]
    k_new: Tensor,  # [S, Hkv, D]
    v_new: Tensor,  # [S, Hkv, Dv]
    k_cache_layer: Tensor,  # [N, Hkv, B, D]
    v_cache_layer: Tensor,  # [N, Hkv, B, Dv]
    block_table: Tensor,  # int32 or int64 [S, M]
    context_lens: Tensor,  # int32 or int64 [S]: cached tokens of each sequence, the new token NOT included
    *,
    scale: float | None = None,  # factor of q·k; None: 1 / sqrt(D)
    block_size: int | None = None,  # if given, checked against the cache
    backend: str = "auto",  # name of a backend, as in `load`
) -> Tensor:
    """Compute attention of one new token per sequence over itself and its context_lens[s] cached tokens.

    The new token's K and V are the first element of the running softmax. The cache is read and not written, so its
    table needs no room for the new token yet; `append_token` writes it. Here a context length does not include the new
    token, unlike in the rest of Quire.

    Table entries at or beyond ceil(context_lens[s] / B) are not read and may have any value, for example 0.

    Returns:
        out, [S, Hq, Dv].

    Raises:
        BadShape: also for more than one query token per sequence.
        BadDtype, BadStride: naming the argument.
        BadValue: also for a table that is too short for its length, naming the sequence.
        Unsupported: for a tensor that requires gradients, except under torch.no_grad() or torch.inference_mode().

    Example:
        >>> q, new, cache = torch.randn(2, 8, 64), torch.randn(2, 2, 2, 64), torch.randn(2, 32, 2, 16, 64)
        >>> cached = *new, *cache, torch.tensor([[7, 2, 11], [5, 0, 0]]), torch.tensor([40, 3])
        >>> out = ops.paged_attention_decode(q, *cached)
        >>> ops.append_token(*cached)
    """
    table, lens = to_host("block_table", block_table, 2), to_host("context_lens", context_lens, 1)
    if q.dim() != 3 or len(q) != len(lens):
        raise BadShape(
            f"q has shape {tuple(q.shape)} for {len(lens)} sequences; decoding takes exactly one query token a "
            f"sequence, [S, Hq, D] (paged_prefill takes more)"
        )
    with renamed(**LAYER):
        ops, spec = load(backend, q.device.type), describe(q, k_cache_layer, v_cache_layer)
        check_new(k_new, v_new, spec, len(q))
        if block_size is not None and block_size != spec.block_size:
            raise BadValue(f"block_size is {block_size}; the cache has blocks of {spec.block_size}")
        kv, starts = PagedKV(k_cache_layer, v_cache_layer), torch.arange(len(q) + 1, dtype=torch.int32)
        if not has_values(q):
            return check_sizes(ops, spec, q, kv, starts, lens, table, Scores(scale))[0]
        # A row has the position of the last cached token here, and sees all of them.
        cached = ops.attention(q, kv, ops.plan(spec, starts, lens, table), scale=scale, return_lse=True)
    k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k_new, v_new))
    wide = torch.promote_types(q.dtype, torch.float32)
    score = (q.to(wide) * k.to(wide)).sum(-1) * (spec.default_scale if scale is None else scale)
    out, _ = ops.merge_states(v, score, *cached)
    return out


def _nothing(
    k_new: Tensor, v_new: Tensor, k_cache_layer: Tensor, v_cache_layer: Tensor, *args: object, **_: object
) -> None:
    pin(k_cache_layer, v_cache_layer)


@one_call(
    "(Tensor k_new, Tensor v_new, Tensor(a!) k_cache_layer, Tensor(b!) v_cache_layer, Tensor block_table, "
    'Tensor context_lens, *, str backend="auto") -> ()',
    _nothing,
)
def append_token(
    k_new: Tensor,  # [S, Hkv, D]
    v_new: Tensor,  # [S, Hkv, Dv]
    k_cache_layer: Tensor,  # [N, Hkv, B, D], written
    v_cache_layer: Tensor,  # [N, Hkv, B, Dv], written
    block_table: Tensor,  # int32 or int64 [S, M]
    context_lens: Tensor,  # int32 or int64 [S]: cached tokens of each sequence, the new token not included
    *,
    backend: str = "auto",  # name of a backend, as in `load`
) -> None:
    """Append each sequence's new token to its context_lens[s] cached tokens.

    The table must already have the block for it. Padding with 0 names block 0, which would then be written.

    Raises:
        BadShape, BadDtype: naming the argument. Nothing is written then.
        BadValue: for a table without room, naming the sequence. Nothing is written then.
        Unsupported: for a tensor that requires gradients, except under torch.no_grad() or torch.inference_mode().
    """
    table, lens = to_host("block_table", block_table, 2), to_host("context_lens", context_lens, 1)
    with renamed(**LAYER, q="k_new", slots="new_token_slots"):
        ops, spec = load(backend, k_new.device.type), describe(k_new, k_cache_layer, v_cache_layer)
        check_new(k_new, v_new, spec, len(k_new))
        if len(table) != len(k_new) or len(lens) != len(k_new):
            raise BadShape(f"there are {len(k_new)} new tokens, {len(table)} tables and {len(lens)} lengths")
        if not has_values(lens):
            return
        slots = _slots_after(lens.long(), table.long(), spec)
        starts, nobody = torch.arange(len(k_new) + 1), torch.zeros(len(k_new), dtype=torch.int32)
        plan = ops.plan(spec, starts, nobody, torch.zeros(len(k_new), 0, dtype=torch.int32), slots)
        ops.write_kv(k_new, v_new, PagedKV(k_cache_layer, v_cache_layer), plan)


def _slots_after(lens: Tensor, table: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the slot of each sequence's new token: int64 [S]."""
    column = lens // spec.block_size
    short = ((column >= table.shape[1]) | (lens < 0)).nonzero().flatten()
    if len(short):
        s = int(short[0])
        raise BadValue(
            f"sequence {s} has {lens[s]} tokens; its table of {table.shape[1]} blocks of {spec.block_size} has no room "
            f"for another one"
        )
    block = table.gather(1, column[:, None]).flatten()
    outside = ((block < 0) | (block >= spec.num_blocks)).nonzero().flatten()
    if len(outside):
        s = int(outside[0])
        raise BadValue(
            f"block_table[{s}, {column[s]}] is {block[s]}; the new token of sequence {s} goes there, so it must be a "
            f"block id in 0..{spec.num_blocks - 1}"
        )
    return block * spec.block_size + lens % spec.block_size
