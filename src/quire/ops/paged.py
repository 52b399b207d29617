"""Attention over a paged cache in one call, without an explicit plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.errors import BadDtype, BadShape
from quire.ops.backend import Backend
from quire.ops.checks.attention import check_attention
from quire.ops.checks.metadata import check_lengths
from quire.ops.checks.tensors import check_integers, has_values, renamed, to_host
from quire.ops.plan import Outline
from quire.ops.registered import one_call
from quire.ops.registry import load
from quire.ops.spec import AttentionSpec, PagedKV, Scores, check_supported


def empty_state(
    q: Tensor,  # [..., D]
    k: Tensor,  # [..., D]
    v: Tensor,  # [..., Dv]
    *args: object,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """Return empty tensors for the attention of q, [..., Dv], and its LSE."""
    lse = q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


def empty_rows(*args: Any, **options: Any) -> Tensor:
    """Return the first of `empty_state`."""
    return empty_state(*args, **options)[0]


@one_call(
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor seq_lens, Tensor cum_seq_lens_q, "
    'Tensor? alibi_slopes=None, float? scale=None, *, str backend="auto") -> Tensor',
    empty_rows,
)
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
        Unsupported: for a tensor that requires gradients, except under torch.no_grad() or torch.inference_mode().

    Example:
        >>> q, kv = torch.randn(3, 4, 64), torch.randn(2, 8, 2, 16, 64)
        >>> tables, lens, starts = torch.tensor([[5, 0]]), torch.tensor([20]), torch.tensor([0, 3])
        >>> ops.paged_prefill(q, kv[0], kv[1], tables, lens, starts).shape
        torch.Size([3, 4, 64])
    """
    with renamed(query_starts="cum_seq_lens_q", context_lens="seq_lens", k="k_cache", v="v_cache"):
        return _attend(q, k_cache, v_cache, block_tables, seq_lens, cum_seq_lens_q, alibi_slopes, scale, backend)


@one_call(
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_tables, Tensor context_lens, "
    'Tensor? alibi_slopes=None, float? scale=None, *, str backend="auto") -> Tensor',
    empty_rows,
)
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
        Unsupported: for a tensor that requires gradients, except under torch.no_grad() or torch.inference_mode().

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
    tables, kv = to_host("block_tables", block_tables, 2), PagedKV(k_cache, v_cache)
    if not has_values(q):
        return check_sizes(ops, spec, q, kv, starts, lens, tables, Scores(scale, alibi_slopes))[0]
    return ops.attention(q, kv, ops.plan(spec, starts, lens, tables), scale=scale, alibi_slopes=alibi_slopes)


def check_sizes(
    ops: Backend,
    spec: AttentionSpec,
    q: Tensor,  # [T, Hq, D]
    kv: PagedKV,
    query_starts: Tensor,  # int [S+1]
    context_lens: Tensor,  # int [S]
    block_tables: Tensor,  # int [S, M]
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """Check everything that a plan and `attention` would check, except for values. Return empty results."""
    check_supported(spec, ops.name, ops.limits)
    check_lengths(len(query_starts), len(context_lens), len(block_tables))
    check_attention(q, kv, Outline(spec, len(q), len(context_lens)), scores, None, False)
    return empty_state(q, kv.k, kv.v)


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
