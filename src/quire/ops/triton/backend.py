"""The GPU backend, in Triton: kernels compiled on the machine for its chip.

The plan, made on the host, assigns the work to programs (`worklist`, `partition`); one kernel executes it
(`attention`), with tiles that depend on the chip (`tiles`). No operator synchronises with the device. The same call
gives the same bits; docs/gpu.md describes the further guarantees of `AttentionSpec.reproducible`.

Sums are in fp32; softmax weights are rounded to the dtype of q. An fp8 cache has no scales: pass a factor of K in
attention's `scale`, and apply a factor of V to the output. A cache of int8 has one scale per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from quire.errors import Unsupported
from quire.ops.backend import Backend
from quire.ops.backends.eager import EagerExecutor
from quire.ops.checks.tensors import check_beside
from quire.ops.program import Executor, Program
from quire.ops.registry import load, unavailable
from quire.ops.side_stream import SideStream
from quire.ops.spec import AttentionSpec, Limits, PagedKV, Scores
from quire.ops.swap import HostSwap, Swap
from quire.ops.triton import attention as kernels
from quire.ops.triton import cache, recurrent, sampling, scan, small, states
from quire.ops.triton.launch import FLOATS, NAME, on_device_of
from quire.ops.triton.linear import TiledLinears
from quire.ops.triton.quantised import IntegerLinears
from quire.ops.triton.recurrent_plan import TritonRecurrentPlan
from quire.ops.triton.tiles import CHUNK, Tile, chip_of, launchable, pairs_of, pieces, precision
from quire.ops.triton.worklist import TritonPlan
from quire.ops.weights.linear import Linears

LOG2_E = math.log2(math.e)


def _narrow() -> frozenset[torch.dtype]:
    """Return the 8-bit dtypes that a cache may have on this machine's GPU, or all of them without a GPU.

    AMD's GPUs have none: triton (3.6) cannot compile a loop there that loads scales and prefetches two tiles ahead.
    """
    if torch.version.hip is not None and torch.cuda.is_available():
        return frozenset()
    newest = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 9)
    return frozenset((torch.int8, torch.float8_e5m2, *((torch.float8_e4m3fn,) if newest else ())))


class Call(NamedTuple):
    """The arguments of one call of attention."""

    q: Tensor  # [T, Hq, D]
    kv: PagedKV
    plan: TritonPlan
    scores: Scores
    out: Tensor  # [T, Hq, Dv]
    lse: Tensor | None  # fp32 [T, Hq]
    parts: tuple[Tensor, Tensor]  # of `TritonPlan.parts`


class TritonBackend(Backend):
    """Triton kernels for NVIDIA and AMD GPUs."""

    name = NAME
    limits = Limits(
        kv_dtypes={dtype: frozenset((dtype,)) | _narrow() for dtype in FLOATS},
        max_head_dim=1024,
        reproducible=True,
        case_budget=200,
    )
    plan_type = TritonPlan
    recurrent_plan_type = TritonRecurrentPlan
    graphable = True

    def unavailable(self, device: str) -> str | None:
        """Return the reason why this backend cannot serve the device on this machine, or None if it can."""
        kind, _, index = device.partition(":")
        if kind == "cuda":
            if int(index or 0) >= torch.cuda.device_count():
                return f"torch finds {torch.cuda.device_count() or 'no'} GPUs here"
            if torch.version.hip is None and (found := torch.cuda.get_device_capability(device)) < (8, 0):
                return f"it needs a GPU of compute capability 8.0, and {device!r} has {found[0]}.{found[1]}"
            return None
        if kind == "cpu" and triton.knobs.runtime.interpret:
            return None
        return f"it serves GPUs, the device 'cuda', not {device!r} (except in Triton's interpreter)"

    # -------------------------------------------------------------------------------------- models and memory

    def linears(self, device: str, reproducible: bool = False) -> Linears:
        """Return torch's products on a GPU, or Quire's if they must be batch-invariant; always Quire's for integers."""
        if device == "cpu":  # in the interpreter
            return Linears() if unavailable("cpu") else load("cpu").linears(device, reproducible)
        return TiledLinears() if reproducible else IntegerLinears()

    def compile(self, program: Program) -> Executor:
        """Return an executor that calls operator by operator. A CUDA graph may capture the calls."""
        return EagerExecutor(self, program)

    def swap(self, device: str, host: Sequence[Tensor]) -> Swap:
        """Return copies on a stream separate from the computation."""
        return HostSwap() if device == "cpu" else SideStream(torch.device(device), host, cache.block_swapper)

    def _make_plan(self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> TritonPlan:
        main = max(16, 1 << (spec.head_dim.bit_length() - 1))  # the main part of a head, see `attention`
        if spec.latent and spec.is_scaled and spec.dim_v != main:
            raise Unsupported(
                f"spec.head_dim_v is {spec.dim_v} and spec.head_dim {spec.head_dim}; the {self.name} backend serves "
                f"latent caches of int8 whose V is the largest power of two in head_dim, here {main}"
            )
        return TritonPlan(spec, max_tokens, max_seqs, max_blocks)

    # -------------------------------------------------------------------------------------------- operators

    def _check_attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: TritonPlan,
        scores: Scores,
        out: Tensor | None,  # [T, Hq, Dv]
        return_lse: bool,
    ) -> None:
        super()._check_attention(q, kv, plan, scores, out, return_lse)
        slopes, sinks = scores.alibi_slopes, scores.sinks
        check_beside(plan.rows, q=q, k=kv.k, v=kv.v, alibi_slopes=slopes, sinks=sinks, out=out)

    def _attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: TritonPlan,
        scores: Scores,
        out: Tensor,  # [T, Hq, Dv]
        lse: Tensor | None,  # fp32 [T, Hq]
    ) -> None:
        with on_device_of(q):
            call = Call(q, kv, plan, scores, out, lse, plan.parts())
            num_few, num_many, num_merges = plan.launched
            few_mixed, many_mixed = plan.launched_again
            self._attend(call, plan.few, num_few, plan.partitioner.few_tile, few_mixed)
            self._attend_many(call, plan.many, num_many, many_mixed)
            if num_merges:
                spec = plan.spec
                kernels.merge[(num_merges, spec.num_heads)](
                    out,
                    lse,
                    *call.parts,
                    plan.merges,
                    scores.sinks,
                    *out.stride()[:2],
                    DV=spec.dim_v,
                    DIMS=triton.next_power_of_2(spec.dim_v),
                    num_warps=1 if spec.dim_v <= 128 else 4,
                    enable_fp_fusion=not spec.reproducible,
                )

    def _attend_many(self, call: Call, items: Tensor, count: int, mixed: bool) -> None:
        """Compute the items of many rows."""
        self._attend(call, items, count, call.plan.partitioner.many_tile, mixed)

    def _attend(
        self,
        call: Call,
        items: Tensor,  # int32 [items * ITEM]
        count: int,
        tile: Tile,
        mixed: bool,  # rows of an item may see different keys
        rows: int | None = None,  # of an item at most; None: those of the tile
    ) -> None:
        """Compute items, and those with reported rows again."""
        spec = call.plan.spec
        rows = tile.block_m if rows is None else rows
        tile = launchable(spec, tile, aligned=cache.unit(call.kv) > 1)
        grid = count, spec.num_kv_heads, pieces(spec.group_size, rows, tile)
        mixed = mixed and not spec.is_scaled  # integers are finite
        size = math.prod(grid) * tile.block_m
        reports = torch.empty(size, dtype=torch.int8, device=call.q.device) if mixed else None
        for finite in (False, True) if mixed else (False,):
            if count:
                launch_attend(call, items, grid, tile, reports, finite)

    _merge_states = staticmethod(states.merge_states)
    _apply_sinks = staticmethod(states.apply_sinks)
    _write_kv = staticmethod(cache.write_kv)
    _copy_blocks = staticmethod(cache.copy_blocks)
    _rms_norm = staticmethod(small.rms_norm)
    _add_rms_norm = staticmethod(small.add_rms_norm)
    _layer_norm = staticmethod(small.layer_norm)
    _rope = staticmethod(small.rope)
    _swiglu = staticmethod(small.swiglu)
    _gelu = staticmethod(small.gelu)
    _activate = staticmethod(small.activate)
    _gate = staticmethod(small.gate)
    _gated_norm = staticmethod(small.gated_norm)
    _convolve = staticmethod(recurrent.convolve)
    _recur = staticmethod(recurrent.recur)
    _scan = staticmethod(scan.scan)
    _logsumexp = staticmethod(sampling.logsumexp)
    _top_k = staticmethod(sampling.top_k)
    _top_k_softmax = staticmethod(sampling.top_k_softmax)


def launch_attend(
    call: Call,
    items: Tensor,  # int32 [items * ITEM]
    grid: tuple[int, int, int],  # items, KV heads, pieces of an item
    tile: Tile,
    reports: Tensor | None,  # int8 [programs * block_m]
    finite: bool,
) -> None:
    """Launch `attention.attend`."""
    q, kv, plan, out, spec = call.q, call.kv, call.plan, call.out, call.plan.spec
    scale, alibi_slopes, softcap, sinks, chunk = call.scores
    factor = LOG2_E * (spec.default_scale if scale is None else scale)
    cap = None if softcap is None else LOG2_E * softcap
    if softcap is not None:
        factor *= 2.0 / softcap
    sequences, slope_seq = None, 0
    if alibi_slopes is not None and alibi_slopes.dim() == 2:
        sequences, slope_seq = plan.sequences, alibi_slopes.stride(0)
    unit = cache.unit(kv)
    v_strides: tuple[int | None, ...] = kv.v.stride()[:3]
    if kv.k.stride()[:3:2] == v_strides[::2]:  # one address serves both
        v_strides = (None, v_strides[1], None)
    kernels.attend[grid](
        q,
        kv.k,
        kv.v,
        kv.k_scale,
        kv.v_scale,
        out,
        call.lse,
        *call.parts,
        items,
        plan.rows,
        plan.positions,
        plan.ends,
        sequences,
        plan.tables,
        alibi_slopes,
        sinks,
        reports,
        factor,
        cap,
        spec.window,
        chunk,
        slope_seq,
        *q.stride()[:2],
        *kv.k.stride()[:3],
        *v_strides,
        *cache.scale_strides(kv),
        *out.stride()[:2],
        **_constants(spec, tile),
        UNIT=unit,
        FINITE=finite,
        PAIRS=pairs_of(spec, tile, unit),
        num_warps=tile.num_warps,
        num_stages=1 if finite else tile.num_stages,
        enable_fp_fusion=not spec.reproducible,  # fusion depends on the code around an operation
    )


def _constants(spec: AttentionSpec, tile: Tile) -> dict[str, object]:
    """Return the compile-time constants of the kernel."""
    return {
        "G": spec.group_size,
        "B": spec.block_size,
        "D": spec.head_dim,
        "DV": spec.dim_v,
        "LATENT": spec.latent and spec.is_scaled,
        "CAUSAL": spec.causal,
        "PRECISION": precision(chip_of(spec.device), spec),
        "BLOCK_M": tile.block_m,
        "TILE": tile.block_n,
        "CHUNK": CHUNK if spec.reproducible else 0,
    }
