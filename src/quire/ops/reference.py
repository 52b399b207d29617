"""The specification of every operator: plain PyTorch, short and slow.

All other backends are measured against this one. Sums are formed in fp32 (float64 for float64 inputs) and rounded
once, at the end. It runs on whatever device torch runs on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.ops import registered, validate, validate_small
from quire.ops.interface import AttentionSpec, Limits, PagedKV
from quire.ops.plan import AttentionPlan

NAME = "reference"

_FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
LIMITS = Limits(kv_dtypes=dict.fromkeys(_FLOATS, _FLOATS), max_head_dim=1024, reproducible=False, case_budget=2_000)


def unavailable(device: str) -> str | None:
    """None wherever torch runs: on the CPU, and on a GPU that torch sees."""
    kind = device.partition(":")[0]
    if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
        return None
    return f"torch has no device {device!r} here"


# ------------------------------------------------------------------------------------------------- the plan


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


# ---------------------------------------------------------------------------------------------- the cache


@registered.operator(NAME)
def write_kv(
    k_new: Tensor,  # [T, Hkv, D]
    v_new: Tensor,  # [T, Hkv, Dv]
    kv: PagedKV,
    plan: AttentionPlan,
) -> None:
    """Store row t's K and V at slot plan.slots[t], that is at offset slot % B of block slot // B; -1 skips it."""
    validate.check_write(k_new, v_new, kv, plan)
    slots = plan.slots[: plan.num_tokens].to(k_new.device).long()
    rows = torch.nonzero(slots >= 0).flatten()
    block, offset = slots[rows] // plan.spec.block_size, slots[rows] % plan.spec.block_size
    for x, new in ((kv.k, k_new), (kv.v, v_new)):
        stored = new[rows].to(x.dtype)
        x[block, :, offset] = stored
        widened = stored.to(torch.promote_types(x.dtype, torch.float32))  # fp8 has no isfinite
        plan.nonfinite[rows] |= (~widened.isfinite().all(-1).all(-1)).int().to(plan.nonfinite.device)


@registered.operator(NAME)
def copy_blocks(kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy block src[i] to block dst[i]: what copy-on-write does when a shared block is about to be written."""
    validate.check_copy(kv, src, dst)
    kv.k[list(dst)] = kv.k[list(src)]
    kv.v[list(dst)] = kv.v[list(src)]


# --------------------------------------------------------------------------------------------- attention


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
@registered.operator(NAME)
def attention(
    q: Tensor,  # [T, Hq, D]
    kv: PagedKV,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,  # fp32 [Hq] or [S, Hq]
    softcap: float | None = None,
    sinks: Tensor | None = None,  # fp32 [Hq]
    out: Tensor | None = None,  # [T, Hq, Dv]
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of every query row over its sequence's paged keys: out [T, Hq, Dv] (, LSE fp32 [T, Hq]).

    scale: factor of q·k; None is 1 / sqrt(D).
    alibi_slopes: each head adds slope * (key position - query position) to its scores (Press et al. 2022). Those of
        [S, Hq] are each sequence's own.
    softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
    sinks: one more logit a head in the softmax's denominator, without a value (gpt-oss).
    out: written and returned where given.

    Raises BadShape, BadDtype, BadStride or BadValue, naming the argument.
    """
    validate.check_attention(q, kv, plan, scale, alibi_slopes, softcap, sinks, out, return_lse)
    spec = plan.spec
    acc = torch.promote_types(spec.dtype, torch.float32)
    result = torch.empty(plan.num_tokens, spec.num_heads, spec.dim_v, dtype=acc, device=q.device)
    lse = torch.empty(plan.num_tokens, spec.num_heads, dtype=acc, device=q.device)
    starts = plan.query_starts[: plan.num_seqs + 1].tolist()
    for s in range(plan.num_seqs):
        rows = slice(starts[s], starts[s + 1])
        if rows.stop > rows.start:
            context_len = int(plan.context_lens[s])
            table = plan.block_tables[s].tolist()
            slopes = alibi_slopes[s] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
            result[rows], lse[rows] = _attend(q[rows].to(acc), kv, table, context_len, spec, scale, slopes, softcap)
    if sinks is not None:
        result = apply_sinks(result, lse, sinks)
    out = result.to(spec.dtype) if out is None else out.copy_(result)
    return (out, lse) if return_lse else out


def _attend(
    q: Tensor,  # [rows, Hq, D]
    kv: PagedKV,
    table: list[int],
    context_len: int,
    spec: AttentionSpec,
    scale: float | None,
    alibi_slopes: Tensor | None,  # [Hq]
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence's rows, by the online softmax over its blocks (Milakov & Gimelshein 2018).

    softmax(s)·V needs the largest score (or the exponentials overflow) and the sum of all exponentials (the
    denominator) before the first value can be weighted; but the keys come block by block. So three things are
    carried along, as if the blocks seen so far were all there are:

        top    the largest score so far
        total  the sum of exp(score - top)
        mix    the sum of exp(score - top) * value

    When a block brings a larger score, what was summed under the old maximum is corrected by exp(old - new), which
    turns exp(score - old) into exp(score - new). At the end mix / total is the softmax-weighted mean, and
    top + log(total) is the log of the sum of all exponentials, which `merge_states` needs.
    """
    rows = len(q)
    Hkv, G, B = spec.num_kv_heads, spec.group_size, spec.block_size
    q = q.reshape(rows, Hkv, G, spec.head_dim).permute(1, 2, 0, 3)  # [Hkv, G, rows, D]: G heads share a KV head
    position = torch.arange(context_len - rows, context_len, device=q.device)[:, None]  # [rows, 1]

    top = q.new_full((Hkv, G, rows), -torch.inf)
    total = q.new_zeros(Hkv, G, rows)
    mix = q.new_zeros(Hkv, G, rows, spec.dim_v)
    first = 0 if spec.window is None else max(0, context_len - rows - spec.window + 1) // B
    for j in range(first, -(-context_len // B)):
        filled = min(B, context_len - j * B)  # the last block may be filled in part; what follows may be NaN
        k = kv.k[table[j], :, None, :filled].to(q.dtype)  # [Hkv, 1, filled, D]
        v = kv.v[table[j], :, None, :filled].to(q.dtype)  # [Hkv, 1, filled, Dv]
        key = torch.arange(j * B, j * B + filled, device=q.device)  # [filled]

        score = (q @ k.mT) * (spec.default_scale if scale is None else scale)  # [Hkv, G, rows, filled]
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score + alibi_slopes.view(Hkv, G, 1, 1).to(q.dtype) * (key - position)
        seen = torch.ones(rows, filled, dtype=torch.bool, device=q.device)
        if spec.causal:
            seen = key <= position
            if spec.window is not None:
                seen &= key > position - spec.window
            score = score.masked_fill(~seen, -torch.inf)

        new_top = torch.maximum(top, score.amax(-1))
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN: shift such rows by 0.
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weight = torch.exp(score - shift[..., None])
        correction = torch.exp(top - shift)
        total = total * correction + weight.sum(-1)
        mix = mix * correction[..., None] + weighted_sum(weight, v, seen)
        top = new_top

    out = torch.where(total[..., None] == 0, 0.0, mix / total[..., None])  # NaN stays NaN
    lse = top + torch.log(total)
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)


def weighted_sum(
    weight: Tensor,  # [..., rows, keys]
    v: Tensor,  # [..., keys, Dv]
    seen: Tensor,  # bool [..., rows, keys]
) -> Tensor:
    """weight @ v, where a row is not multiplied with what it does not see: 0 times an infinite value would be NaN."""
    finite = v.isfinite()
    if finite.all():
        return weight @ v
    mix = weight @ v.masked_fill(~finite, 0.0)
    others = v.masked_fill(finite, 0.0)
    for key in (~finite).any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist():
        share = weight[..., key, None] * others[..., key, None, :]
        mix += torch.where(seen[..., key, None], share, 0.0)
    return mix


# ------------------------------------------------------------------------------------- states of attention


@registered.operator(NAME)
def merge_states(
    out_a: Tensor,  # [T, Hq, Dv]
    lse_a: Tensor,  # fp32 [T, Hq]
    out_b: Tensor,  # [T, Hq, Dv]
    lse_b: Tensor,  # fp32 [T, Hq]
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each: out [T, Hq, Dv], LSE fp32 [T, Hq].

    out = (e^lse_a · out_a + e^lse_b · out_b) / (e^lse_a + e^lse_b); a state that saw nothing (-inf) weighs nothing.
    """
    validate.check_states(out_a, lse_a, out_b, lse_b)
    top = torch.maximum(lse_a, lse_b)
    shift = top.masked_fill(top == -torch.inf, 0.0)
    a, b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
    total = a + b
    # Zero times what a state that saw nothing may hold, NaN for one, is not zero: leave it out.
    seen_a, seen_b = (out.to(top.dtype).masked_fill((w == 0)[..., None], 0.0) for out, w in ((out_a, a), (out_b, b)))
    mix = a[..., None] * seen_a + b[..., None] * seen_b
    out = torch.where(total[..., None] == 0, 0.0, mix / total[..., None])  # NaN stays NaN
    return out.to(out_a.dtype), top + torch.log(total)


@registered.operator(NAME)
def apply_sinks(
    out: Tensor,  # [T, Hq, Dv]
    lse: Tensor,  # fp32 [T, Hq]
    sinks: Tensor,  # fp32 [Hq]
) -> Tensor:
    """Close a state with one more logit a head that carries no value: out · e^lse / (e^lse + e^sink)."""
    validate.check_state("out", out, "lse", lse)
    validate.check_tensor("sinks", sinks, (out.shape[1],), torch.float32, out.device)
    share = torch.sigmoid(lse - sinks.to(lse.dtype)).masked_fill(lse == -torch.inf, 0.0)
    return (out.to(lse.dtype) * share[..., None]).to(out.dtype)


# ---------------------------------------------------------------------------- small operators of a decoder


@registered.operator(NAME)
def rms_norm(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [H]
    eps: float,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension (Zhang & Sennrich 2019)."""
    validate_small.check_norm(x, eps, weight=weight)
    wide = _widen(x)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(wide.dtype)).to(x.dtype)


@registered.operator(NAME)
def add_rms_norm(
    x: Tensor,  # [T, H]
    residual: Tensor,  # [T, H], becomes x + residual in place
    weight: Tensor,  # [H]
    eps: float,
) -> Tensor:
    """rms_norm of the new residual."""
    validate_small.check_residual(x, residual, weight)
    validate_small.check_norm(x, eps, weight=weight)
    residual += x
    return rms_norm(residual, weight, eps)


@registered.operator(NAME)
def layer_norm(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [H]
    bias: Tensor | None,  # [H]
    eps: float,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last dimension (Ba et al. 2016)."""
    validate_small.check_norm(x, eps, weight=weight, bias=bias)
    wide = _widen(x)
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return (normed if bias is None else normed + bias.to(wide.dtype)).to(x.dtype)


@registered.operator(NAME)
def rope(
    q: Tensor,  # [T, Hq, D], rotated in place
    k: Tensor,  # [T, Hkv, D], rotated in place
    positions: Tensor,  # int32 or int64 [T]
    cos: Tensor,  # fp32 [P, D_rot / 2]
    sin: Tensor,  # fp32 [P, D_rot / 2]
) -> None:
    """Rotate the pairs (i, i + D_rot/2) of the first D_rot dimensions by their position's angle (Su et al. 2021)."""
    validate_small.check_rope(q, k, positions, cos, sin)
    if positions.is_cpu:  # to look at those on a GPU would wait for it
        validate_small.check_positions(positions, len(cos))
    half = cos.shape[1]
    c, s = cos[positions][:, None], sin[positions][:, None]  # [T, 1, D_rot / 2]
    for x in (q, k):
        a, b = _widen(x[..., :half]), _widen(x[..., half : 2 * half])
        x[..., :half], x[..., half : 2 * half] = (a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)


@registered.operator(NAME)
def swiglu(
    gate_up: Tensor,  # [T, 2 * I]: gates, then ups
) -> Tensor:
    """silu(gate) * up: [T, I] (Shazeer 2020)."""
    validate_small.check_swiglu(gate_up)
    gate, up = _widen(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


@registered.operator(NAME)
def gelu(
    x: Tensor,  # [..., I]
    approximate: Literal["none", "tanh"],
) -> Tensor:
    """GELU in its exact (erf) or its tanh form (Hendrycks & Gimpel 2016)."""
    validate_small.check_gelu(x, approximate)
    return F.gelu(_widen(x), approximate=approximate).to(x.dtype)


# ----------------------------------------------------------------------------------------------- for a sampler


@registered.operator(NAME)
def logsumexp(
    logits: Tensor,  # fp32 [R, V]
) -> Tensor:
    """log(sum(exp(logits))) of each row: fp32 [R]."""
    validate_small.check_logits(logits)
    return torch.logsumexp(logits, -1)


@registered.operator(NAME)
def top_k(
    logits: Tensor,  # fp32 [R, V], no NaN
    k: int,
) -> Tensor:
    """The ids of the k largest logits of each row, the largest first, of equal ones the lower id: int64 [R, k]."""
    validate_small.check_logits(logits, k)
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]


@registered.operator(NAME)
def top_k_softmax(
    logits: Tensor,  # fp32 [R, V], no NaN, the largest of a row finite
    k: int,
) -> tuple[Tensor, Tensor]:
    """top_k's ids, int64 [R, k], and what each of them has of the row's softmax, fp32 [R, k]: a router's choice."""
    ids = top_k(logits, k)
    return ids, logits.softmax(-1).gather(1, ids)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
