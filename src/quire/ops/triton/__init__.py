"""Attention and the small operators on a GPU, in Triton: compiled on the machine for the chip that it has.

The plan, made on the host, says who computes what (`worklist`, `cutting`); one kernel does it (`attention`), with tiles
that suit the chip (`tiles`). Nothing waits for the device. The same call gives the same bits; what else does depends on
`AttentionSpec.reproducible`, see docs/gpu.md.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
import triton
from torch import Tensor

from quire.ops import registered, validate
from quire.ops.interface import AttentionSpec, Limits, PagedKV
from quire.ops.plan import AttentionPlan
from quire.ops.triton import attention as kernels
from quire.ops.triton.cache import copy_blocks, write_kv
from quire.ops.triton.launch import FLOATS, NAME, on_device_of
from quire.ops.triton.sampling import logsumexp, top_k, top_k_softmax
from quire.ops.triton.small import add_rms_norm, gelu, layer_norm, rms_norm, rope, swiglu
from quire.ops.triton.states import apply_sinks, merge_states
from quire.ops.triton.tiles import CHUNK, Tile, chip_of, precision
from quire.ops.triton.worklist import TritonPlan, own

__all__ = [
    "add_rms_norm",
    "apply_sinks",
    "attention",
    "copy_blocks",
    "gelu",
    "layer_norm",
    "logsumexp",
    "make_plan",
    "merge_states",
    "plan",
    "rms_norm",
    "rope",
    "swiglu",
    "top_k",
    "top_k_softmax",
    "unavailable",
    "write_kv",
]

LOG2_E = math.log2(math.e)


def _fp8() -> frozenset[torch.dtype]:
    """The fp8 dtypes that a cache may have on this machine's GPU; both where there is none."""
    if not torch.cuda.is_available():
        return frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
    if torch.version.hip is not None:
        return frozenset()
    newest = torch.cuda.get_device_capability() >= (8, 9)
    return frozenset((torch.float8_e4m3fn, torch.float8_e5m2) if newest else (torch.float8_e5m2,))


LIMITS = Limits(
    kv_dtypes={dtype: frozenset((dtype,)) | _fp8() for dtype in FLOATS},
    max_head_dim=1024,
    reproducible=True,
    case_budget=200,
)


def unavailable(device: str) -> str | None:
    """Why this backend cannot serve that device on this machine, or None where it can."""
    kind, _, index = device.partition(":")
    if kind == "cuda":
        if int(index or 0) >= torch.cuda.device_count():
            return f"torch finds {torch.cuda.device_count() or 'no'} GPUs here"
        if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < (8, 0):
            return f"it needs a GPU of compute capability 8.0, and {device!r} has {found[0]}.{found[1]}"
        return None
    if kind == "cpu" and triton.knobs.runtime.interpret:
        return None
    return f"it serves GPUs, the device 'cuda', not {device!r} (but in Triton's interpreter)"


def make_plan(spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> TritonPlan:
    """An empty plan with room for that many query tokens, sequences and blocks a sequence."""
    validate.check_supported(spec, NAME, LIMITS)
    return TritonPlan(spec, max_tokens, max_seqs, max_blocks)


def plan(
    spec: AttentionSpec,
    query_starts: Tensor,  # int32 [S+1], host
    context_lens: Tensor,  # int32 [S], host
    block_tables: Tensor,  # int32 [S, M], host
    slots: Tensor | None = None,  # int64 [T], host
) -> TritonPlan:
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
    """As `reference.attention`, every sum formed in fp32; softmax weights are rounded to the dtype of q.

    An fp8 cache has no scales of its own: a factor of K belongs into `scale`, one of V is applied to the output.
    """
    plan = own(plan)
    validate.check_attention(q, kv, plan, scale, alibi_slopes, softcap, sinks, out, return_lse)
    validate.check_beside(plan.rows, q=q, k=kv.k, v=kv.v, alibi_slopes=alibi_slopes, sinks=sinks, out=out)
    spec = plan.spec
    if out is None:
        out = torch.empty(plan.num_tokens, spec.num_heads, spec.dim_v, dtype=spec.dtype, device=q.device)
    lse = None
    if return_lse:
        lse = torch.empty(plan.num_tokens, spec.num_heads, dtype=torch.float32, device=q.device)
    factor = LOG2_E * (spec.default_scale if scale is None else scale)
    cap = None if softcap is None else LOG2_E * softcap
    if softcap is not None:
        factor *= 2.0 / softcap
    sequences, slope_seq = None, 0
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        sequences, slope_seq = plan.sequences, alibi_slopes.stride(0)
    G, fusion = spec.group_size, not spec.reproducible  # fused or not would depend on what surrounds an operation
    with on_device_of(q):
        num_few, num_many, num_merges = plan.launched
        parts = plan.parts()
        few_mixed, many_mixed = plan.launched_again
        for items, count, tile, mixed in (
            (plan.few, num_few, plan.cutter.few_tile, few_mixed),
            (plan.many, num_many, plan.cutter.many_tile, many_mixed),
        ):
            grid = count, spec.num_kv_heads, -(-G // tile.block_m)
            size = math.prod(grid) * tile.block_m
            reports = torch.empty(size, dtype=torch.int8, device=q.device) if mixed else None
            for finite in (False, True) if mixed else (False,):
                if count:
                    kernels.attend[grid](
                        *(q, kv.k, kv.v, out, lse, *parts, items, plan.rows, plan.positions, sequences),
                        *(plan.tables, alibi_slopes, sinks, reports, factor, cap, spec.window, slope_seq),
                        *(*q.stride()[:2], *kv.k.stride()[:3], *kv.v.stride()[:3], *out.stride()[:2]),
                        **_constants(spec, tile),
                        FINITE=finite,
                        num_warps=tile.num_warps,
                        num_stages=1 if finite else tile.num_stages,
                        enable_fp_fusion=fusion,
                    )
        if num_merges:
            kernels.merge[(num_merges, spec.num_heads)](
                *(out, lse, *parts, plan.merges, sinks, *out.stride()[:2]),
                DV=spec.dim_v,
                DIMS=triton.next_power_of_2(spec.dim_v),
                num_warps=1 if spec.dim_v <= 128 else 4,
                enable_fp_fusion=fusion,
            )
    return out if lse is None else (out, lse)


def _constants(spec: AttentionSpec, tile: Tile) -> dict[str, object]:
    """What the kernel is compiled for."""
    return {
        "G": spec.group_size,
        "B": spec.block_size,
        "D": spec.head_dim,
        "DV": spec.dim_v,
        "CAUSAL": spec.causal,
        "PRECISION": precision(chip_of(spec.device), spec),
        "BLOCK_M": tile.block_m,
        "TILE": tile.block_n,
        "CHUNK": CHUNK if spec.reproducible else 0,
    }
