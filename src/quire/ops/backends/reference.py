"""The specification of every operator: plain PyTorch, short and slow.

All other backends are tested against this one. Sums are computed in fp32 (float64 for float64 inputs) and rounded
once, at the end. It runs on every device of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.errors import Unsupported
from quire.ops.activation import Activation
from quire.ops.backend import Backend
from quire.ops.backends.eager import EagerExecutor
from quire.ops.checks.small import check_positions
from quire.ops.plan import AttentionPlan
from quire.ops.program import Executor, Program
from quire.ops.recurrent import reference as reference_recurrent
from quire.ops.recurrent.calls import GatedNorm
from quire.ops.registry import load, unavailable
from quire.ops.sparse import reference_scores
from quire.ops.spec import AttentionSpec, Limits, PagedKV, Scores
from quire.ops.swap import HostSwap, Swap
from quire.ops.weights.linear import Linears
from quire.ops.weights.rounding import quantised_rows

_FLOATS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))


class ReferenceBackend(Backend):
    """Every operator in PyTorch."""

    name = "reference"
    limits = Limits(
        kv_dtypes=dict.fromkeys(_FLOATS, _FLOATS | {torch.int8}),
        max_head_dim=1024,
        reproducible=False,
        case_budget=2_000,
    )

    has_index = True

    def unavailable(self, device: str) -> str | None:
        """Return None for the CPU and for a GPU that torch supports, otherwise the reason."""
        kind = device.partition(":")[0]
        if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()):
            return None
        return f"torch has no device {device!r} here"

    # -------------------------------------------------------------------------------------- models and memory

    def linears(self, device: str, reproducible: bool = False) -> Linears:
        """Return the products of the fastest backend for the device, or torch's if that is this backend.

        Raises Unsupported if batch-invariant products are required and torch has none.
        """
        fastest = load("auto", device)
        if not isinstance(fastest, ReferenceBackend):
            return fastest.linears(device, reproducible)
        if reproducible and torch.device(device).type != "cpu":
            raise Unsupported(f"backend {self.name!r} has no batch-invariant products on {device}")
        return Linears()

    def compile(self, program: Program) -> Executor:
        """Return an executor that calls operator by operator."""
        return EagerExecutor(self, program)

    def swap(self, device: str, host: Sequence[Tensor]) -> Swap:
        """Return copies within the host's memory on the CPU, and the triton backend's on a GPU."""
        if device == "cpu":
            return HostSwap()
        if (reason := unavailable("triton", device)) is not None:
            raise Unsupported(f"blocks on {device} cannot be swapped: {reason}; give preemption='recompute'")
        return load("triton", device).swap(device, host)

    # ----------------------------------------------------------------------------------------------- attention

    def _attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: AttentionPlan,
        scores: Scores,
        out: Tensor,  # [T, Hq, Dv]
        lse: Tensor | None,  # fp32 [T, Hq]
    ) -> None:
        spec = plan.spec
        wide = torch.promote_types(spec.dtype, torch.float32)
        result = torch.empty(plan.num_tokens, spec.num_heads, spec.dim_v, dtype=wide, device=q.device)
        found = torch.empty(plan.num_tokens, spec.num_heads, dtype=wide, device=q.device)
        starts = plan.query_starts[: plan.num_seqs + 1].tolist()
        for s in range(plan.num_seqs):
            rows = slice(starts[s], starts[s + 1])
            if rows.stop > rows.start:
                context_len = int(plan.context_lens[s])
                table = plan.block_tables[s].tolist()
                slopes = scores.alibi_slopes
                if slopes is not None and slopes.dim() == 2:
                    slopes = slopes[s]
                own = scores._replace(alibi_slopes=slopes)
                ends = None if plan.key_ends is None else plan.key_ends[rows].to(q.device)
                result[rows], found[rows] = _attend(q[rows].to(wide), kv, table, context_len, spec, own, ends)
        if scores.sinks is not None:
            result = self._apply_sinks(result, found, scores.sinks)
        out.copy_(result)
        if lse is not None:
            lse.copy_(found)

    _index_scores = staticmethod(reference_scores)

    def _merge_states(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (e^lse_a · out_a + e^lse_b · out_b) / (e^lse_a + e^lse_b). A state without keys has the LSE -inf."""
        top = torch.maximum(lse_a, lse_b)
        shift = top.masked_fill(top == -torch.inf, 0.0)
        a, b = torch.exp(lse_a - shift), torch.exp(lse_b - shift)
        total = a + b
        # The output of a state without keys may be NaN, and zero times NaN is not zero: leave it out.
        seen_a, seen_b = (
            out.to(top.dtype).masked_fill((w == 0)[..., None], 0.0) for out, w in ((out_a, a), (out_b, b))
        )
        mix = a[..., None] * seen_a + b[..., None] * seen_b
        out = torch.where(total[..., None] == 0, 0.0, mix / total[..., None])  # NaN stays NaN
        return out.to(out_a.dtype), top + torch.log(total)

    def _apply_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        share = torch.sigmoid(lse - sinks.to(lse.dtype)).masked_fill(lse == -torch.inf, 0.0)
        return (out.to(lse.dtype) * share[..., None]).to(out.dtype)

    # ----------------------------------------------------------------------------------------------- the cache

    def _write_kv(self, k_new: Tensor, v_new: Tensor, kv: PagedKV, plan: AttentionPlan) -> None:
        slots = plan.slots[: plan.num_tokens].to(k_new.device).long()
        rows = torch.nonzero(slots >= 0).flatten()
        block, offset = slots[rows] // plan.spec.block_size, slots[rows] % plan.spec.block_size
        k = kv.k
        if plan.spec.latent:  # the part of K that is not in V
            k, k_new = k[..., plan.spec.dim_v :], k_new[..., plan.spec.dim_v :]
        for x, scales, new in ((k, kv.k_scale, k_new), (kv.v, kv.v_scale, v_new)):
            if scales is None:
                stored = new[rows].to(x.dtype)
                shown = stored.to(torch.promote_types(x.dtype, torch.float32))  # fp8 has no isfinite
            else:
                stored, shown = quantised_rows(new[rows])
                scales[block, :, offset] = shown
            x[block, :, offset] = stored
            seen = plan.nonfinite  # on the host
            seen[rows.to(seen.device)] |= (~shown.isfinite().flatten(1).all(-1)).int().to(seen.device)

    def _copy_blocks(self, kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
        for x in kv.tensors().values():
            x[list(dst)] = x[list(src)]

    # --------------------------------------------------------------------------------- operators of a decoder

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _widen(x)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (normed * weight.to(wide.dtype)).to(x.dtype)

    def _add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self._rms_norm(residual, weight, eps)

    def _layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide = _widen(x)
        centred = wide - wide.mean(-1, keepdim=True)
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
        return (normed if bias is None else normed + bias.to(wide.dtype)).to(x.dtype)

    def _rope(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        if positions.is_cpu:  # reading those on a GPU would synchronise
            check_positions(positions, len(cos))
        half = cos.shape[1]
        c, s = cos[positions][:, None], sin[positions][:, None]  # [T, 1, D_rot / 2]
        for x in (q, k):
            a, b = _widen(x[..., :half]), _widen(x[..., half : 2 * half])
            x[..., :half], x[..., half : 2 * half] = (a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)

    def _swiglu(self, gate_up: Tensor) -> Tensor:
        gate, up = _widen(gate_up).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def _activate(self, x: Tensor, activation: Activation) -> Tensor:
        return activation.of(_widen(x)).to(x.dtype)

    def _gelu(self, x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
        return F.gelu(_widen(x), approximate=approximate).to(x.dtype)

    def _gated_norm(self, x: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor:
        weight, eps, heads, first = norm
        wide, factor = _widen(x), F.silu(_widen(gate))
        if first == "gate":
            wide = wide * factor
        parts = wide.view(len(x), heads, x.shape[1] // heads)
        normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(1) * weight.to(wide.dtype)
        return (normed * factor if first == "norm" else normed).to(x.dtype)

    def _gate(self, x: Tensor, gate: Tensor) -> None:
        x.copy_(_widen(x) * torch.sigmoid(_widen(gate)))

    # --------------------------------------------------------------------------- of layers that keep a state

    _convolve = staticmethod(reference_recurrent.convolve)
    _recur = staticmethod(reference_recurrent.recur)
    _scan = staticmethod(reference_recurrent.scan)

    # -------------------------------------------------------------------------- for a sampler, and for a router

    def _logsumexp(self, logits: Tensor) -> Tensor:
        return torch.logsumexp(logits, -1)

    def _top_k(self, logits: Tensor, k: int) -> Tensor:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]

    def _top_k_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = self._top_k(logits, k)
        return ids, logits.softmax(-1).gather(1, ids)


BACKEND = ReferenceBackend()


def _attend(
    q: Tensor,  # [rows, Hq, D]
    kv: PagedKV,
    table: list[int],
    context_len: int,
    spec: AttentionSpec,
    scores: Scores,  # slopes [Hq]
    ends: Tensor | None,  # int32 [rows], the keys before which each row attends; None: its position + 1
) -> tuple[Tensor, Tensor]:
    """Compute attention of one sequence's rows by the online softmax over its blocks (Milakov & Gimelshein 2018).

    softmax(s)·V needs the largest score (or the exponentials overflow) and the sum of all exponentials (the
    denominator) before the first value can be weighted; but the keys arrive block by block. So three numbers are
    maintained, as if there were no further blocks:

        top    the largest score so far
        total  the sum of exp(score - top)
        mix    the sum of exp(score - top) * value

    If a block has a larger score, the sums under the old maximum are corrected by exp(old - new), which turns
    exp(score - old) into exp(score - new). At the end mix / total is the softmax-weighted mean, and top + log(total)
    is the log of the sum of all exponentials, which `merge_states` needs.
    """
    rows = len(q)
    scale, alibi_slopes, softcap, _, chunk = scores
    scale = spec.default_scale if scale is None else scale
    Hkv, G, B = spec.num_kv_heads, spec.group_size, spec.block_size
    q = q.reshape(rows, Hkv, G, spec.head_dim).permute(1, 2, 0, 3)  # [Hkv, G, rows, D]: G heads share a KV head
    position = torch.arange(context_len - rows, context_len, device=q.device)[:, None]  # [rows, 1]
    end = position + 1 if ends is None else ends[:, None]

    top = q.new_full((Hkv, G, rows), -torch.inf)
    total = q.new_zeros(Hkv, G, rows)
    mix = q.new_zeros(Hkv, G, rows, spec.dim_v)
    first = 0 if spec.window is None else max(0, context_len - rows - spec.window + 1) // B
    for j in range(first, -(-context_len // B)):
        filled = min(B, context_len - j * B)  # the last block may be partially filled; the rest may be NaN
        k = kv.k[table[j], :, None, :filled].to(q.dtype)  # [Hkv, 1, filled, D]
        v = kv.v[table[j], :, None, :filled].to(q.dtype)  # [Hkv, 1, filled, Dv]
        key = torch.arange(j * B, j * B + filled, device=q.device)  # [filled]

        scales = None
        if kv.k_scale is not None and kv.v_scale is not None:
            k_scale, v_scale = (x[table[j], :, None, None, :filled].to(q.dtype) for x in (kv.k_scale, kv.v_scale))
            scales = k_scale, v_scale
        score = products(q, k, scales, spec) * scale  # [Hkv, G, rows, filled]
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi_slopes is not None:
            score = score + alibi_slopes.view(Hkv, G, 1, 1).to(q.dtype) * (key - position)
        seen = torch.ones(rows, filled, dtype=torch.bool, device=q.device)
        if spec.causal:
            seen = key < end
            if spec.window is not None:
                seen &= key > position - spec.window
            if chunk is not None:
                seen &= key >= position // chunk * chunk
            score = score.masked_fill(~seen, -torch.inf)

        new_top = torch.maximum(top, score.amax(-1))
        # A row that has seen no key yet has the maximum -inf, and -inf - -inf is NaN: shift such rows by 0.
        shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
        weight = torch.exp(score - shift[..., None])
        correction = torch.exp(top - shift)
        total = total * correction + weight.sum(-1)
        if scales is not None:
            weight = scaled_weights(weight, scales[1], seen)
        mix = mix * correction[..., None] + weighted_sum(weight, v, seen)
        top = new_top

    out = torch.where(total[..., None] == 0, 0.0, mix / total[..., None])  # NaN stays NaN
    lse = top + torch.log(total)
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2)


def products(
    q: Tensor,  # [..., rows, D]
    k: Tensor,  # [..., keys, D]
    scales: tuple[Tensor, Tensor] | None,  # of K and V, [..., 1, keys] each
    spec: AttentionSpec,
) -> Tensor:
    """Compute q·k, multiplied by the scales if there are any: [..., rows, keys]."""
    if scales is None:
        return q @ k.mT
    k_scale, v_scale = scales
    if not spec.latent:
        return (q @ k.mT) * k_scale
    latent, others = slice(spec.dim_v), slice(spec.dim_v, None)
    return (q[..., latent] @ k[..., latent].mT) * v_scale + (q[..., others] @ k[..., others].mT) * k_scale


def scaled_weights(
    weight: Tensor,  # [..., rows, keys]
    v_scale: Tensor,  # [..., 1, keys]
    seen: Tensor,  # bool [..., rows, keys]
) -> Tensor:
    """Compute weight * v_scale: NaN for a visible value that was not finite, and 0 for keys that a row does not see."""
    return torch.where(seen, weight * v_scale, 0.0)


def weighted_sum(
    weight: Tensor,  # [..., rows, keys]
    v: Tensor,  # [..., keys, Dv]
    seen: Tensor,  # bool [..., rows, keys]
) -> Tensor:
    """Compute weight @ v without multiplying keys that a row does not see: 0 times an infinite value would be NaN."""
    finite = v.isfinite()
    if finite.all():
        return weight @ v
    mix = weight @ v.masked_fill(~finite, 0.0)
    others = v.masked_fill(finite, 0.0)
    for key in (~finite).any(-1).flatten(0, -2).any(0).nonzero().flatten().tolist():
        share = weight[..., key, None] * others[..., key, None, :]
        mix += torch.where(seen[..., key, None], share, 0.0)
    return mix


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
