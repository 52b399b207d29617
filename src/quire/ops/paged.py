"""Attention over a paged cache in one call, without an explicit plan."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape
from quire.ops.checks.tensors import check_integers, renamed, to_host
from quire.ops.registry import load
from quire.ops.spec import AttentionSpec, PagedKV


def paged_prefill(
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [N, Hkv, B, D]
    v_cache: Tensor,  # [N, Hkv, B, Dv]
    block_tables: Tensor,  # int32 or int64 [S, M]
    seq_lens: Tensor,  # int32 or int64 [S]: KV tokens of each sequence, the query tokens included
    cum_seq_lens_q: Tensor,  # int32 or int64 [S+1]: sequence s has the query rows cum_seq_lens_q[s]:[s+1]
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    scale: float | None = None,  # factor of q·k; None: 1 / sqrt(D)
    *,
    backend: str = "auto",  # name of a backend, as in `load`
) -> Tensor:
    """Compute causal attention of ragged query rows over a paged cache that already has their keys.

    The query rows of a sequence are the last ones of its seq_lens[s] KV tokens, so a prompt can be prefilled in chunks.
    Integer tensors on a GPU are copied to the host, which synchronises: for a step with many layers, make one plan.

    Returns:
        out, [T, Hq, Dv].

    Raises:
        BadShape, BadDtype, BadStride, BadValue: naming the argument, the sequence and the value.

    Example:
        >>> q, kv = torch.randn(3, 4, 64), torch.randn(2, 8, 2, 16, 64)
        >>> tables, lens, starts = torch.tensor([[5, 0]]), torch.tensor([20]), torch.tensor([0, 3])
        >>> ops.paged_prefill(q, kv[0], kv[1], tables, lens, starts).shape
        torch.Size([3, 4, 64])
    """
    with renamed(query_starts="cum_seq_lens_q", context_lens="seq_lens", k="k_cache", v="v_cache"):
        return _attend(q, k_cache, v_cache, block_tables, seq_lens, cum_seq_lens_q, alibi_slopes, scale, backend)


def paged_decode(
    q: Tensor,  # [S, Hq, D]
    k_cache: Tensor,  # [N, Hkv, B, D]
    v_cache: Tensor,  # [N, Hkv, B, Dv]
    block_tables: Tensor,  # int32 or int64 [S, M]
    context_lens: Tensor,  # int32 or int64 [S]: KV tokens of each sequence, the query token included
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    scale: float | None = None,  # factor of q·k; None: 1 / sqrt(D)
    *,
    backend: str = "auto",  # name of a backend, as in `load`
) -> Tensor:
    """Compute attention of one query row per sequence over all of its context_lens[s] KV tokens.

    Integer tensors on a GPU are copied to the host, as in `paged_prefill`.

    Returns:
        out, [S, Hq, Dv].

    Raises:
        BadShape, BadDtype, BadStride, BadValue: naming the argument, the sequence and the value.

    Example:
        >>> q, kv = torch.randn(2, 4, 64), torch.randn(2, 8, 2, 16, 64)
        >>> tables, lens = torch.tensor([[5, 0], [1, -1]]), torch.tensor([20, 3])
        >>> ops.paged_decode(q, kv[0], kv[1], tables, lens).shape
        torch.Size([2, 4, 64])
    """
    check_integers("context_lens", context_lens, 1)
    if len(q) != len(context_lens):
        raise BadShape(f"q has {len(q)} rows and context_lens {len(context_lens)} entries; decode takes one row each")
    one_row_each = torch.arange(len(q) + 1, dtype=torch.int32)
    with renamed(k="k_cache", v="v_cache"):
        return _attend(q, k_cache, v_cache, block_tables, context_lens, one_row_each, alibi_slopes, scale, backend)


def _attend(
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [N, Hkv, B, D]
    v_cache: Tensor,  # [N, Hkv, B, Dv]
    block_tables: Tensor,  # int [S, M]
    context_lens: Tensor,  # int [S]
    query_starts: Tensor,  # int [S+1]
    alibi_slopes: Tensor | None,
    scale: float | None,
    backend: str,
) -> Tensor:
    ops, spec = load(backend, q.device.type), describe(q, k_cache, v_cache)
    starts, lens = (to_host(name, x, 1) for name, x in (("query_starts", query_starts), ("context_lens", context_lens)))
    plan = ops.plan(spec, starts, lens, to_host("block_tables", block_tables, 2))
    return ops.attention(q, PagedKV(k_cache, v_cache), plan, scale=scale, alibi_slopes=alibi_slopes)


def describe(
    q: Tensor,  # [T, Hq, D]
    k_cache: Tensor,  # [N, Hkv, B, D]
    v_cache: Tensor,  # [N, Hkv, B, Dv]
    *,
    causal: bool = True,
    window: int | None = None,
) -> AttentionSpec:
    """Derive the spec of a call from its tensors. Raises BadShape, BadDtype or BadValue."""
    for name, tensor, dims in (("q", q, 3), ("k_cache", k_cache, 4), ("v_cache", v_cache, 4)):
        if tensor.dim() != dims:
            raise BadShape(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimensions")
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype != q.dtype:
            raise BadDtype(f"{name} has dtype {tensor.dtype} and q {q.dtype}; they must be the same")
    return AttentionSpec(
        num_heads=q.shape[1],
        num_kv_heads=k_cache.shape[1],
        head_dim=q.shape[2],
        head_dim_v=v_cache.shape[3],
        block_size=k_cache.shape[2],
        num_blocks=k_cache.shape[0],
        dtype=q.dtype,
        device=str(q.device),
        causal=causal,
        window=window,
    )
