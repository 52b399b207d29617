"""vLLM's first paged-attention kernels: their arguments and their packed caches, with Quire's operators.

Both versions decode: one query token per sequence, over a cache in the packed layout of `layouts`. In vLLM V1 gives all
keys of a sequence and head to one thread block; V2 cuts them into partitions of 512 tokens and merges these. Quire's
kernels do not need two versions, as they cut long contexts at fixed positions: both exist for existing callers. Each
call unpacks the blocks that it reads; if possible, convert the cache once instead.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape, BadValue, check_integer
from quire.ops import layouts
from quire.ops.checks.attention import check_slopes
from quire.ops.checks.tensors import check_tensor, check_written, renamed, to_host
from quire.ops.paged import describe
from quire.ops.registry import load
from quire.ops.spec import PagedKV
from quire.ops.state import AttentionState

NAMES = {"q": "query", "k": "key_cache", "v": "value_cache"}  # an operator's name of an argument -> vLLM's
PARTITION = 512  # tokens, in V2
LONG_CONTEXT = 8_192  # tokens: below it one thread block per sequence and head is enough
MANY_PAIRS = 512  # sequences x heads: above it V1 alone keeps a GPU busy


def choose_version(num_seqs: int, num_heads: int, max_context_len: int) -> str:
    """Choose a kernel by vLLM's rule: V2 for long contexts, unless there are many pairs of sequence and head.

    Args:
        num_seqs: S.
        num_heads: Hq.
        max_context_len: the longest context in tokens.

    Returns:
        "v1" or "v2".

    Example:
        >>> ops.choose_version(num_seqs=2, num_heads=8, max_context_len=10_000)
        'v2'
    """
    return "v1" if max_context_len < LONG_CONTEXT or num_seqs * num_heads > MANY_PAIRS else "v2"


def num_partitions(max_context_len: int) -> int:
    """Return the number of V2's partitions, P, which is the size of its buffers."""
    return max(1, -(-max_context_len // PARTITION))


def paged_attention(
    out: Tensor,  # [S, Hq, D], written
    query: Tensor,  # [S, Hq, D]
    key_cache: Tensor,  # [N, Hkv, D/x, B, x], x = 16 // bytes of a number
    value_cache: Tensor,  # [N, Hkv, D, B]
    head_mapping: Tensor,  # int [Hq], the KV head of each query head
    scale: float,  # factor of q·k
    block_tables: Tensor,  # int32 or int64 [S, M]
    context_lens: Tensor,  # int32 or int64 [S]: tokens of each sequence, the query token included
    block_size: int,  # B
    max_context_len: int,  # at least the longest context in tokens
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    *,
    version: str = "auto",  # "v1", "v2", or the one that `choose_version` returns
    backend: str = "auto",  # name of a backend, as in `load`
) -> None:
    """Call `paged_attention_v1` or `paged_attention_v2`, and allocate the buffers of V2.

    Raises:
        BadShape, BadDtype, BadStride, BadValue: as the called version does, and for another `version`.
    """
    if version not in ("auto", "v1", "v2"):
        raise BadValue(f"version is {version!r}; it must be 'auto', 'v1' or 'v2'")
    check_integer(BadValue, "max_context_len", max_context_len, 0)
    if query.dim() != 3:
        raise BadShape(f"query has shape {tuple(query.shape)}; expected [S, Hq, D]")
    if version == "auto":
        version = choose_version(query.shape[0], query.shape[1], max_context_len)
    rest = (query, key_cache, value_cache, head_mapping, scale, block_tables, context_lens, block_size)
    if version == "v1":
        paged_attention_v1(out, *rest, max_context_len, alibi_slopes, backend=backend)
        return
    shape = (*query.shape[:2], num_partitions(max_context_len))
    wide = torch.promote_types(query.dtype, torch.float32)
    exp_sums, max_logits = (torch.empty(shape, dtype=wide, device=query.device) for _ in range(2))
    tmp_out = torch.empty(*shape, query.shape[2], dtype=query.dtype, device=query.device)
    paged_attention_v2(out, exp_sums, max_logits, tmp_out, *rest, max_context_len, alibi_slopes, backend=backend)


def paged_attention_v1(
    out: Tensor,  # [S, Hq, D], written
    query: Tensor,  # [S, Hq, D]
    key_cache: Tensor,  # [N, Hkv, D/x, B, x], x = 16 // bytes of a number
    value_cache: Tensor,  # [N, Hkv, D, B]
    head_mapping: Tensor,  # int [Hq], the KV head of each query head
    scale: float,  # factor of q·k
    block_tables: Tensor,  # int32 or int64 [S, M]
    context_lens: Tensor,  # int32 or int64 [S]: tokens of each sequence, the query token included
    block_size: int,  # B, 1..256
    max_context_len: int,  # at least the longest context in tokens
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    *,
    backend: str = "auto",  # name of a backend, as in `load`
) -> None:
    """Compute attention of one query token per sequence over its context_lens[s] cached tokens, its own included.

    The block size may be any up to 256, and the mapping of heads is arbitrary; vLLM's kernel takes blocks of 8, 16 and
    32.

    Raises:
        BadShape, BadDtype, BadStride, BadValue: naming the argument, the sequence and the value.
    """
    tables, lens = _check(
        query, key_cache, value_cache, head_mapping, block_tables, context_lens, block_size, max_context_len
    )
    check_written({"out": out}, {"query": query, "key_cache": key_cache, "value_cache": value_cache})
    kv, tables = _unpacked(key_cache, value_cache, head_mapping, tables, lens)
    with renamed(**NAMES):
        ops, spec = load(backend, query.device.type), describe(query, kv.k, kv.v)
        plan = ops.plan(spec, torch.arange(len(lens) + 1, dtype=torch.int32), lens, tables)
        ops.attention(query, kv, plan, scale=scale, alibi_slopes=alibi_slopes, out=out)


def paged_attention_v2(
    out: Tensor,  # [S, Hq, D], written
    exp_sums: Tensor,  # fp32 [S, Hq, P], written
    max_logits: Tensor,  # fp32 [S, Hq, P], written
    tmp_out: Tensor,  # [S, Hq, P, D], written
    query: Tensor,  # [S, Hq, D]
    key_cache: Tensor,  # [N, Hkv, D/x, B, x], x = 16 // bytes of a number
    value_cache: Tensor,  # [N, Hkv, D, B]
    head_mapping: Tensor,  # int [Hq], the KV head of each query head
    scale: float,  # factor of q·k
    block_tables: Tensor,  # int32 or int64 [S, M]
    context_lens: Tensor,  # int32 or int64 [S]: tokens of each sequence, the query token included
    block_size: int,  # B, a divisor of 512 up to 256
    max_context_len: int,  # at least the longest context in tokens
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    *,
    backend: str = "auto",  # name of a backend, as in `load`
) -> None:
    """Compute `paged_attention_v1` separately for partitions of 512 tokens, and merge them in ascending order.

    P is at least ceil(max_context_len / 512) and at least 1. The buffers receive the partitions' states: tmp_out their
    outputs, and max_logits + log(exp_sums) their LSE. (max_logits has the LSE and exp_sums is 1; for partitions after
    the context they are -inf and 0.)

    Raises:
        BadShape, BadDtype, BadStride, BadValue: as `paged_attention_v1`, and BadValue for a block size that does not
            divide 512.
    """
    tables, lens = _check(
        query, key_cache, value_cache, head_mapping, block_tables, context_lens, block_size, max_context_len
    )
    if PARTITION % block_size:
        raise BadValue(f"block_size is {block_size}; V2's partitions of {PARTITION} tokens consist of whole blocks")
    num_seqs, P = len(query), num_partitions(max_context_len)
    _check_buffers(query, P, out, exp_sums, max_logits, tmp_out)
    check_written(
        {"out": out, "exp_sums": exp_sums, "max_logits": max_logits, "tmp_out": tmp_out},
        {"query": query, "key_cache": key_cache, "value_cache": value_cache, "alibi_slopes": alibi_slopes},
    )
    kv, tables = _unpacked(key_cache, value_cache, head_mapping, tables, lens)
    # Every partition is a sequence of the batch, with its part of the table and of the length, and the same query.
    columns = PARTITION // block_size
    padded = torch.nn.functional.pad(tables, (0, max(0, P * columns - tables.shape[1])))[:, : P * columns]
    first = torch.arange(P) * PARTITION
    part_lens = (lens[:, None] - first).clamp(0, PARTITION)  # [S, P]
    rows = query[:, None].expand(-1, P, -1, -1).flatten(0, 1)
    starts = torch.arange(num_seqs * P + 1, dtype=torch.int32)
    with renamed(**NAMES):
        ops, spec = load(backend, query.device.type), describe(query, kv.k, kv.v)
        plan = ops.plan(spec, starts, part_lens.flatten(), padded.reshape(num_seqs * P, columns))
        slopes = alibi_slopes
        if slopes is not None:
            check_slopes(slopes, spec.num_heads, num_seqs, query.device)
            slopes = slopes.repeat_interleave(P, 0) if slopes.dim() == 2 else slopes
        parts, lse = ops.attention(rows, kv, plan, scale=scale, alibi_slopes=slopes, return_lse=True)
    states = [AttentionState(parts[p::P], lse[p::P].contiguous()) for p in range(P)]
    if alibi_slopes is not None:  # the query's position is not that of a partition's last token
        lag = (first + part_lens - lens[:, None]).to(lse.device)  # [S, P]
        states = [state.shifted(alibi_slopes * lag[:, p, None]) for p, state in enumerate(states)]
    for p, state in enumerate(states):
        tmp_out[:, :, p] = state.out
        max_logits[:, :, p] = state.lse
        exp_sums[:, :, p] = (state.lse > -torch.inf).to(exp_sums.dtype)
    out.copy_(states[0].merge(*states[1:], backend=backend).out)


def _check_buffers(query: Tensor, P: int, out: Tensor, exp_sums: Tensor, max_logits: Tensor, tmp_out: Tensor) -> None:
    """Check the tensors that V2 writes."""
    num_seqs, num_heads, head_dim = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    check_tensor("out", out, tuple(query.shape), query.dtype, query.device)
    tails: dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]] = {
        "exp_sums": (exp_sums, wide, ()),
        "max_logits": (max_logits, wide, ()),
        "tmp_out": (tmp_out, query.dtype, (head_dim,)),
    }
    for name, (buffer, dtype, tail) in tails.items():
        wanted = (num_seqs, num_heads, P, *tail)
        if buffer.dim() != len(wanted) or tuple(buffer[:, :, :P].shape) != wanted:
            raise BadShape(f"{name} has shape {tuple(buffer.shape)}; expected {wanted}, or more in its third dimension")
        if buffer.dtype != dtype:
            raise BadDtype(f"{name} has dtype {buffer.dtype}; expected {dtype}")


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    head_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    block_size: int,
    max_context_len: int,
) -> tuple[Tensor, Tensor]:
    """Check all arguments. Return the tables and lengths on the host."""
    if query.dim() != 3 or key_cache.dim() != 5:
        raise BadShape(
            f"query has shape {tuple(query.shape)} and key_cache {tuple(key_cache.shape)}; expected [S, Hq, D] and "
            f"[N, Hkv, D/x, B, x]"
        )
    check_integer(BadValue, "block_size", block_size, 1)
    check_integer(BadValue, "max_context_len", max_context_len, 0)
    if key_cache.dtype != query.dtype or value_cache.dtype != query.dtype:
        raise BadDtype(
            f"query has dtype {query.dtype}, key_cache {key_cache.dtype} and value_cache {value_cache.dtype}; they "
            f"must be the same"
        )
    num_blocks, num_kv_heads = key_cache.shape[:2]
    x, head_dim = layouts.vector_size(key_cache), query.shape[2]
    packed = (num_blocks, num_kv_heads, head_dim // x, block_size, x)
    if tuple(key_cache.shape) != packed or head_dim % x or 0 in packed:
        raise BadShape(
            f"key_cache has shape {tuple(key_cache.shape)}; expected [N, Hkv, D/x, B, x] with D = {head_dim}, "
            f"B = {block_size} and x = {x}, so x must divide D, and there must be a block"
        )
    if tuple(value_cache.shape) != (num_blocks, num_kv_heads, head_dim, block_size):
        wanted = (num_blocks, num_kv_heads, head_dim, block_size)
        raise BadShape(f"value_cache has shape {tuple(value_cache.shape)}; expected {wanted}")
    mapping = to_host("head_mapping", head_mapping, 1)
    if tuple(mapping.shape) != (query.shape[1],):
        raise BadShape(f"head_mapping has shape {tuple(mapping.shape)}; expected ({query.shape[1]},)")
    outside = ((mapping < 0) | (mapping >= num_kv_heads)).nonzero().flatten()
    if len(outside):
        h = int(outside[0])
        raise BadValue(f"head_mapping[{h}] is {mapping[h]}; it must be a KV head in 0..{num_kv_heads - 1}")
    tables, lens = to_host("block_tables", block_tables, 2), to_host("context_lens", context_lens, 1)
    if not len(query) == len(tables) == len(lens):
        raise BadShape(
            f"query has shape {tuple(query.shape)}, block_tables {tuple(tables.shape)} and context_lens "
            f"{tuple(lens.shape)}; expected [S, Hq, D], [S, M] and [S]"
        )
    longer = ((lens > max_context_len) | (lens < 0) | (lens > tables.shape[1] * block_size)).nonzero().flatten()
    if len(longer):
        s = int(longer[0])
        raise BadValue(
            f"context_lens[{s}] is {lens[s]}; it must lie in 0..{max_context_len}, the max_context_len, and fit "
            f"sequence {s}'s table of {tables.shape[1]} blocks of {block_size}"
        )
    return tables, lens


def _unpacked(
    key_cache: Tensor, value_cache: Tensor, head_mapping: Tensor, tables: Tensor, lens: Tensor
) -> tuple[PagedKV, Tensor]:
    """Unpack the blocks that the tables name to Quire's layout. Return them, and the tables with the new ids.

    If query heads are not mapped to KV heads in equal consecutive groups, every query head gets a separate copy.
    """
    block_size = key_cache.shape[3]
    read = torch.arange(tables.shape[1]) < -(-lens[:, None] // block_size)
    bad = (read & ((tables < 0) | (tables >= len(key_cache)))).nonzero()
    if len(bad):
        s, j = bad[0].tolist()
        raise BadValue(
            f"block_tables[{s}, {j}] is {tables[s, j]}; sequence {s} of {lens[s]} tokens reads that entry, so it must "
            f"be a block id in 0..{len(key_cache) - 1}"
        )
    used, new = np.unique(np.where(read, tables, tables[read][0] if read.any() else 0), return_inverse=True)
    blocks = torch.from_numpy(used if len(used) else np.zeros(1, dtype=np.int64)).to(key_cache.device)
    k, v = layouts.unpack_keys(key_cache[blocks]), layouts.unpack_values(value_cache[blocks])
    group = len(head_mapping) // k.shape[1]
    regular = torch.arange(k.shape[1]).repeat_interleave(max(1, group))
    if not torch.equal(head_mapping.cpu().long(), regular):
        heads = head_mapping.to(k.device)
        k, v = k[:, heads], v[:, heads]
    return PagedKV(k, v), torch.from_numpy(new.reshape(tables.shape))
