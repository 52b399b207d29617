"""The baseline that paging replaces: every call copies each sequence's K and V together and attends densely.

The copies are [S, Hkv, longest context, D], padded to the longest sequence, and are made again in every layer of every
step. Then PyTorch's attention runs over them: in one call for all sequences with a single row, and in one call for each
prompt. The backend serves the whole contract, so that one flag turns a paged run into a gathered one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function

from quire.ops.backends.reference import ReferenceBackend, products, scaled_weights, weighted_sum
from quire.ops.plan import AttentionPlan
from quire.ops.spec import AttentionSpec, PagedKV, Scores


class GatherBackend(ReferenceBackend):
    """The reference's operators, except for attention."""

    name = "gather"
    limits = replace(ReferenceBackend.limits, case_budget=600)

    def _attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: AttentionPlan,
        scores: Scores,
        out: Tensor,  # [T, Hq, Dv]
        lse: Tensor | None,  # fp32 [T, Hq]
    ) -> None:
        """Attend over copies of the keys and values."""
        spec = plan.spec
        scale, alibi_slopes, softcap, sinks, chunk = scores
        scale = spec.default_scale if scale is None else scale
        wide = torch.promote_types(spec.dtype, torch.float32)
        result = torch.zeros(plan.num_tokens, spec.num_heads, spec.dim_v, dtype=wide, device=q.device)
        found = torch.full((plan.num_tokens, spec.num_heads), -torch.inf, dtype=wide, device=q.device)
        with record_function("quire::gather"):
            k, v, *gathered = self.gather(kv, plan, q.dtype)  # [S, Hkv, longest, D or Dv], scales [S, Hkv, longest]
        starts = plan.query_starts[: plan.num_seqs + 1].long()
        rows, lens = starts.diff(), plan.context_lens[: plan.num_seqs].long()
        decoding = torch.nonzero((rows == 1) & (lens > 0)).flatten()
        prompts = torch.nonzero((rows > 1) & (lens > 0)).flatten()
        for s in (
            decoding,
            *prompts[:, None],
        ):  # [s]: sequences with equal numbers of rows, so that no row is padding
            if len(s) == 0:
                continue
            count, longest = int(rows[s[0]]), int(lens[s].max())
            own = starts[s, None] + torch.arange(count)
            at = own.to(q.device)  # [s, count]
            position = (lens - rows)[s, None, None] + torch.arange(count)[:, None]  # [s, count, 1]
            key = torch.arange(longest)
            visible = (key < lens[s, None, None]).expand(-1, count, -1)  # [s, count, longest]
            if spec.causal:
                end = position + 1 if plan.key_ends is None else plan.key_ends[own, None]
                visible = visible & (key < end)
            if spec.window is not None:
                visible = visible & (key > position - spec.window)
            if chunk is not None:
                visible = visible & (key >= position // chunk * chunk)
            bias = None
            if alibi_slopes is not None:
                distance = (key - position)[:, None].to(q.device)
                slopes = alibi_slopes[s.to(q.device)] if alibi_slopes.dim() == 2 else alibi_slopes
                bias = slopes.to(wide)[..., None, None] * distance  # [s, Hq, count, longest]
            parts = q[at].transpose(1, 2), k[s.to(q.device), :, :longest], v[s.to(q.device), :, :longest]
            scales = [x[s.to(q.device), :, :longest] for x in gathered]
            if bias is None and softcap is None and sinks is None and lse is None and not scales:
                result[at] = _fused(spec, *parts, visible.to(q.device), scale).transpose(1, 2).to(wide)
            else:
                part, part_lse = _plain(spec, *parts, visible.to(q.device), bias, scale, softcap, *scales)
                result[at], found[at] = part.transpose(1, 2), part_lse.transpose(1, 2)
        if sinks is not None:
            result = self._apply_sinks(result, found, sinks)
        out.copy_(result)
        if lse is not None:
            lse.copy_(found)

    def gather(self, kv: PagedKV, plan: AttentionPlan, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Copy each sequence's K and V, zero after its end: [S, Hkv, longest, D] and [S, Hkv, longest, Dv].

        If the cache has scales, those of K and V follow, fp32 [S, Hkv, longest].
        """
        spec, device = plan.spec, kv.k.device
        lens = plan.context_lens[: plan.num_seqs, None].long()
        first_row = lens - plan.query_starts[: plan.num_seqs + 1].long().diff()[:, None]
        position = torch.arange(int(lens.max()) if plan.num_seqs else 0)
        held = position < lens
        if spec.window is not None:  # blocks entirely below the window may belong to other sequences
            first = (first_row - spec.window + 1).clamp(min=0) // spec.block_size * spec.block_size
            held = held & (position >= first)
        table = plan.block_tables[: plan.num_seqs]
        block = torch.where(held, table[:, position // spec.block_size], 0).long().to(device)
        offset = (position % spec.block_size).to(device)
        empty = ~held[..., None].to(device)
        k, v = (
            x[block, :, offset].to(dtype).masked_fill_(empty[..., None], 0.0).transpose(1, 2).contiguous()
            for x in (kv.k, kv.v)
        )
        if kv.k_scale is None or kv.v_scale is None:
            return k, v
        scales = (x[block, :, offset].masked_fill_(empty, 0.0).transpose(1, 2) for x in (kv.k_scale, kv.v_scale))
        return k, v, *scales


BACKEND = GatherBackend()


def _fused(
    spec: AttentionSpec,
    q: Tensor,  # [S, Hq, rows, D]
    k: Tensor,  # [S, Hkv, longest, D]
    v: Tensor,  # [S, Hkv, longest, Dv]
    visible: Tensor,  # bool [S, rows, longest]
    scale: float,
) -> Tensor:
    """Compute PyTorch's attention: [S, Hq, rows, Dv].

    It multiplies keys that a row does not see. So if a result is not finite, keys that are not finite are left out, and
    rows that see one of them are computed by `_plain`.
    """

    def fused(k: Tensor, v: Tensor) -> Tensor:
        result = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None], scale=scale, enable_gqa=True)
        return result.masked_fill(~visible.any(-1)[:, None, :, None], 0.0)

    result = fused(k, v)
    if result.isfinite().all():
        return result
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1))  # [S, Hkv, longest]
    sees_one = (visible[:, None] & bad[:, :, None]).any(-1).repeat_interleave(q.shape[1] // k.shape[1], 1)
    plain, _ = _plain(spec, q, k, v, visible, None, scale, None)
    without = fused(*(x.masked_fill(bad[..., None], 0.0) for x in (k, v)))
    return torch.where(sees_one[..., None], plain.to(q.dtype), without)


def _plain(
    spec: AttentionSpec,
    q: Tensor,  # [S, Hq, rows, D]
    k: Tensor,  # [S, Hkv, longest, D]
    v: Tensor,  # [S, Hkv, longest, Dv]
    visible: Tensor,  # bool [S, rows, longest]
    bias: Tensor | None,  # fp32 [S, Hq, rows, longest], ALiBi's
    scale: float,
    softcap: float | None,
    k_scale: Tensor | None = None,  # fp32 [S, Hkv, longest]
    v_scale: Tensor | None = None,  # fp32 [S, Hkv, longest]
) -> tuple[Tensor, Tensor]:
    """Compute attention with exact ALiBi, softcap, scales and LSE, which `_fused` lacks.

    Returns out [S, Hq, rows, Dv] and the LSE [S, Hq, rows].
    """
    wide, groups = torch.promote_types(q.dtype, torch.float32), q.shape[1] // k.shape[1]
    k, v = k.to(wide).repeat_interleave(groups, 1), v.to(wide).repeat_interleave(groups, 1)
    scales = None
    if k_scale is not None and v_scale is not None:
        k_scale, v_scale = (x.to(wide).repeat_interleave(groups, 1)[:, :, None] for x in (k_scale, v_scale))
        scales = k_scale, v_scale
    score = products(q.to(wide), k, scales, spec) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    score = score.masked_fill(~visible[:, None], -torch.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp(score - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    if scales is not None:
        weight = scaled_weights(weight, scales[1], visible[:, None])
    return weighted_sum(weight, v, visible[:, None]), lse
