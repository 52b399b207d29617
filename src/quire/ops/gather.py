"""The baseline that paging replaces: every call copies each sequence's K and V together and attends densely.

What is copied is [S, Hkv, longest context, D], padded to the longest sequence, and it is copied again in every layer of
every step. It serves the whole contract, so that paged and gathered attention can be compared in one command.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function

from quire.ops import reference, validate
from quire.ops.interface import AttentionSpec, Limits, PagedKV
from quire.ops.plan import AttentionPlan
from quire.ops.reference import (
    add_rms_norm,
    apply_sinks,
    copy_blocks,
    gelu,
    layer_norm,
    merge_states,
    rms_norm,
    rope,
    swiglu,
    unavailable,
    write_kv,
)

__all__ = [
    "add_rms_norm",
    "apply_sinks",
    "attention",
    "copy_blocks",
    "gelu",
    "layer_norm",
    "make_plan",
    "merge_states",
    "plan",
    "rms_norm",
    "rope",
    "swiglu",
    "unavailable",
    "write_kv",
]

NAME = "gather"
LIMITS = Limits(kv_dtypes=reference.LIMITS.kv_dtypes, max_head_dim=reference.LIMITS.max_head_dim, case_budget=600)


def make_plan(spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> AttentionPlan:
    """An empty plan with room for that many query tokens, sequences and blocks a sequence."""
    validate.check_supported(spec, NAME, LIMITS)
    return AttentionPlan(spec, max_tokens, max_seqs, max_blocks)


def plan(
    spec: AttentionSpec,
    query_starts: Tensor,  # int32 [S+1], host
    context_lens: Tensor,  # int32 [S], host
    block_tables: Tensor,  # int32 [S, M], host
    slots: Tensor | None = None,  # int64 [T], host
) -> AttentionPlan:
    """A plan for exactly this step."""
    plan = make_plan(spec, *validate.step_sizes(query_starts, context_lens, block_tables))
    plan.update(query_starts, context_lens, block_tables, slots)
    return plan


@overload
def attention(
    q: Tensor,  # [T, Hq, D]
    kv: PagedKV,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,  # [T, Hq, D]
    kv: PagedKV,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,  # [T, Hq, D]
    kv: PagedKV,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,  # fp32 [Hq]
    softcap: float | None = None,
    sinks: Tensor | None = None,  # fp32 [Hq]
    out: Tensor | None = None,  # [T, Hq, Dv]
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As `reference.attention`, over copies of the keys and values."""
    validate.check_attention(q, kv, plan, scale, alibi_slopes, softcap, sinks, out, return_lse)
    spec, device = plan.spec, q.device
    scale = spec.default_scale if scale is None else scale
    lens = plan.context_lens[: plan.num_seqs].long().to(device)
    starts = plan.query_starts[: plan.num_seqs + 1].long().to(device)
    rows = starts.diff()
    longest, most_rows = (int(x.max()) if len(x) else 0 for x in (lens, rows))
    with record_function("quire::gather"):
        k, v = gather(kv, plan, longest, q.dtype)  # [S, Hkv, longest, D or Dv]
    at = (starts[:-1, None] + torch.arange(most_rows, device=device)).clamp(max=max(0, len(q) - 1))
    real = torch.arange(most_rows, device=device) < rows[:, None]  # [S, most_rows]: which are rows, not padding
    padded = q[at].transpose(1, 2) if len(q) else q.new_zeros(plan.num_seqs, spec.num_heads, 0, spec.head_dim)
    position = (lens - rows)[:, None] + torch.arange(most_rows, device=device)  # [S, most_rows]
    key = torch.arange(longest, device=device)
    visible = (key < lens[:, None])[:, None].expand(-1, most_rows, -1)  # [S, most_rows, longest]
    if spec.causal:
        visible = visible & (key <= position[..., None])
    if spec.window is not None:
        visible = visible & (key > position[..., None] - spec.window)
    if alibi_slopes is None and softcap is None and sinks is None and not return_lse:
        result, lse = _fused(padded, k, v, visible, scale), None
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        slopes = torch.zeros(spec.num_heads, device=device) if alibi_slopes is None else alibi_slopes
        bias = slopes.to(wide).view(-1, 1, 1) * (key - position[..., None])[:, None]  # [S, Hq, most_rows, longest]
        result, lse = _plain(padded, k, v, visible, bias, scale, softcap)
    result = result.transpose(1, 2)[real]  # [T, Hq, Dv]
    lse = None if lse is None else lse.transpose(1, 2)[real]  # [T, Hq]
    if sinks is not None and lse is not None:
        result = apply_sinks(result, lse, sinks)
    out = result.to(spec.dtype) if out is None else out.copy_(result)
    return (out, lse) if return_lse and lse is not None else out


def gather(kv: PagedKV, plan: AttentionPlan, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each sequence's K and V in a row: [S, Hkv, longest, D] and [S, Hkv, longest, Dv], zero where there is none."""
    spec, device = plan.spec, kv.k.device
    lens = plan.context_lens[: plan.num_seqs, None]
    first_row = lens - plan.query_starts[: plan.num_seqs + 1].diff()[:, None]
    position = torch.arange(longest)
    held = position < lens
    if spec.window is not None:  # blocks wholly below the window may belong to others by now
        first = (first_row.long() - spec.window + 1).clamp(min=0) // spec.block_size * spec.block_size
        held = held & (position >= first)
    table = plan.block_tables[: plan.num_seqs]
    block = torch.where(held, table[:, position // spec.block_size], 0).long().to(device)
    offset = (position % spec.block_size).to(device)
    empty = ~held[..., None, None].to(device)
    k, v = (x[block, :, offset].to(dtype).masked_fill_(empty, 0.0).transpose(1, 2).contiguous() for x in (kv.k, kv.v))
    return k, v


def _fused(
    q: Tensor,  # [S, Hq, rows, D]
    k: Tensor,  # [S, Hkv, longest, D]
    v: Tensor,  # [S, Hkv, longest, Dv]
    visible: Tensor,  # bool [S, rows, longest]
    scale: float,
) -> Tensor:
    """PyTorch's own attention: [S, Hq, rows, Dv]."""
    result = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], scale=scale, enable_gqa=True)
    return result.masked_fill(~visible.any(-1)[:, None, :, None], 0.0)


def _plain(
    q: Tensor,  # [S, Hq, rows, D]
    k: Tensor,  # [S, Hkv, longest, D]
    v: Tensor,  # [S, Hkv, longest, Dv]
    visible: Tensor,  # bool [S, rows, longest]
    bias: Tensor,  # fp32 [S, Hq, rows, longest], ALiBi's
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """What the fused form lacks, ALiBi as exact as scores, softcap, LSE: [S, Hq, rows, Dv], [S, Hq, rows]."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = q.to(bias.dtype), k.to(bias.dtype), v.to(bias.dtype)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    score = (q @ k.mT) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = (score + bias).masked_fill(~visible[:, None], -torch.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    return weight @ v, lse
