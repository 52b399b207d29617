"""The CPU backend: native kernels, limited by the bandwidth of the memory and the speed of the vector units.

The kernels are a C++ library without torch (csrc/), one source compiled for each instruction set; this module passes
it addresses. They run on torch's threads. Results depend on the instruction set only, not on the number of threads, the
batch, or the prefill chunk of a row.

Sums are in fp32. If the CPU multiplies bf16, the softmax weights of bf16 queries are rounded to bf16.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from ctypes import byref
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from quire.errors import Unsupported
from quire.ops import fetching, native
from quire.ops.activation import Activation
from quire.ops.backend import Backend
from quire.ops.backends.eager import EagerExecutor
from quire.ops.checks import overlap
from quire.ops.checks.small import bad_position
from quire.ops.choice import Choice
from quire.ops.cpu import recurrent
from quire.ops.cpu.chain import NativeChain
from quire.ops.cpu.exchange import MemoryExchange, shared_bytes
from quire.ops.cpu.executor import NativeExecutor
from quire.ops.cpu.linear import PackedLinears
from quire.ops.cpu.worklist import CpuPlan
from quire.ops.program import Executor, Program
from quire.ops.recurrent.calls import Convolution, GatedNorm, Recurrence, Scan
from quire.ops.recurrent.records import RecurrentCache
from quire.ops.rows import as_rows, count_rows, row_strides, used_strides
from quire.ops.spec import MAX_HEAD_DIM, AttentionSpec, Limits, PagedKV, Scores
from quire.ops.swap import HostSwap, Swap
from quire.ops.weights.linear import Embedding, Linear, Linears


class CpuBackend(Backend):
    """Native kernels for x86-64 and 64-bit Arm."""

    name = "cpu"
    limits = Limits(
        kv_dtypes={dtype: frozenset((dtype, torch.int8)) for dtype in native.DTYPES},
        max_head_dim=1024,
        reproducible=True,
        case_budget=2_000,
    )
    has_index = True
    device_type = "cpu"
    plan_type = CpuPlan
    recurrent_plan_type = recurrent.CpuRecurrentPlan

    @property
    def instruction_set(self) -> str:
        """The instruction set of the kernels in use."""
        return native.default().isa

    def set_prefetch(self, choice: str) -> None:
        """Set the prefetching of weights (kind and distance) and of keys and values (kind), as in `t0:2560:t1`."""
        fetching.apply(ctypes.CDLL(str(native.default().path)), fetching.parse(choice))

    def unavailable(self, device: str) -> str | None:
        """Return None for the CPU of a machine that runs the kernels, otherwise the reason."""
        return native.unavailable() if device == "cpu" else f"it serves the device 'cpu', not {device!r}"

    # -------------------------------------------------------------------------------------- models and memory

    def linears(self, device: str, reproducible: bool = False) -> Linears:
        """Return an object that packs weights for the native kernels, which are always batch-invariant."""
        return PackedLinears()

    def compile(self, program: Program) -> Executor:
        """Return an executor that runs the program in one call of the library, if all linears are packed for it."""
        return NativeExecutor(program) if NativeExecutor.serves(program) else EagerExecutor(self, program)

    def chain(
        self,
        executor: Executor,
        embedding: Embedding,
        head: Linear,
        targets: Tensor | None = None,  # int64 [V]
    ) -> NativeChain | None:
        """Return the drafts of a head in one call of the library, if all parts are packed for it."""
        return NativeChain.of(executor, embedding, head, targets)

    def exchange(self, memory: Tensor, rank: int, size: int) -> MemoryExchange:
        """Return the collectives of a group that shares the memory."""
        return MemoryExchange(memory, rank, size)

    def exchange_bytes(self, size: int) -> int:
        """Return the number of bytes of memory that `size` ranks share."""
        return shared_bytes(size)

    def swap(self, device: str, host: Sequence[Tensor]) -> Swap:
        """Return copies within the host's memory."""
        return HostSwap()

    def _make_plan(self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> CpuPlan:
        return CpuPlan(spec, max_tokens, max_seqs, max_blocks, native.default())

    # ----------------------------------------------------------------------------------------------- attention

    def _check_attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: CpuPlan,
        scores: Scores,
        out: Tensor | None,  # [T, Hq, Dv]
        return_lse: bool,
    ) -> None:
        plan.check(kv)
        plain = all(option is None for option in scores)
        fits = out is None or (
            _fits(out, plan.out_shape, plan)
            and out.is_contiguous()
            and overlap.apart((out,), (q, *kv.tensors().values()))
        )
        if not (plain and fits and _fits(q, plan.q_shape, plan)):
            super()._check_attention(q, kv, plan, scores, out, return_lse)

    def _attention(
        self,
        q: Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: CpuPlan,
        scores: Scores,
        out: Tensor,  # [T, Hq, Dv]
        lse: Tensor | None,  # fp32 [T, Hq]
    ) -> None:
        scale, alibi_slopes, softcap, sinks, chunk = scores
        p = plan.checked(kv).attention
        p.q, p.out, p.lse = q.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr()
        p.alibi_slopes = None if alibi_slopes is None else alibi_slopes.data_ptr()
        p.slope_seq = 0 if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes.stride(0)
        p.sinks = None if sinks is None else sinks.data_ptr()
        p.q_token, p.q_head, _ = q.stride()
        p.out_token, p.out_head, _ = out.stride()
        p.scale = plan.spec.default_scale if scale is None else scale
        p.softcap, p.chunk = softcap or 0.0, chunk or 0
        plan.library("attention", plan.view, byref(p))

    def _index_scores(
        self,
        q: Tensor,  # [R, Hi, Di]
        weights: Tensor,  # fp32 [R, Hi]
        index: Tensor,  # [N, 1, B, Di]
        tables: Tensor,  # int32 [S, M]
        sequences: Tensor,  # int64 [R]
        counts: Tensor,  # int64 [R]
    ) -> Tensor:
        rows, heads, dim = q.shape
        dtype, q, weights = _dtype("q", q), q.contiguous(), weights.contiguous()
        width = int(counts.max()) if rows else 0
        if dim > MAX_HEAD_DIM:
            raise Unsupported(
                f"q has heads of {dim} numbers; the cpu backend serves an indexer of up to {MAX_HEAD_DIM}"
            )
        sequences, counts = sequences.contiguous(), counts.contiguous()
        room = torch.empty(rows, dim + 1, heads + native.MOST_LANES)
        out = torch.empty(rows, width)
        addresses = (x.data_ptr() for x in (q, weights, index, tables, sequences, counts, room, out))
        block, _, slot, *_ = index.stride()
        sizes = block, slot, tables.stride(0), rows, heads, dim, width, index.shape[2]
        native.default()("index_scores", byref(native.IndexParams(*addresses, *sizes, dtype)))
        return out

    def _merge_states(self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
        dtype = _dtype("out_a", out_a)
        out_a, lse_a, out_b, lse_b = (x.contiguous() for x in (out_a, lse_a, out_b, lse_b))
        out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
        states = (x.data_ptr() for x in (out_a, lse_a, out_b, lse_b, out, lse))
        native.default()("merge_states", *states, lse.numel(), out.shape[-1], dtype)
        return out, lse

    def _apply_sinks(self, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
        dtype = _dtype("out", out)
        out, lse = out.contiguous(), lse.contiguous()
        closed = torch.empty_like(out)
        addresses = (x.data_ptr() for x in (out, lse, sinks, closed))
        native.default()("apply_sinks", *addresses, lse.numel(), out.shape[1], out.shape[2], dtype)
        return closed

    # ----------------------------------------------------------------------------------------------- the cache

    def _check_write(self, k_new: Tensor, v_new: Tensor, kv: PagedKV, plan: CpuPlan) -> None:
        cache = plan.check(kv)
        fits = _fits(k_new, plan.k_shape, plan) and _fits(v_new, plan.v_shape, plan)
        if not (plan.writable and cache.separate and fits and overlap.apart(kv.tensors().values(), (k_new, v_new))):
            super()._check_write(k_new, v_new, kv, plan)

    def _write_kv(self, k_new: Tensor, v_new: Tensor, kv: PagedKV, plan: CpuPlan) -> None:
        p = plan.checked(kv).write
        p.k_new, p.v_new = k_new.data_ptr(), v_new.data_ptr()
        p.k_new_token, p.k_new_head, _ = k_new.stride()
        p.v_new_token, p.v_new_head, _ = v_new.stride()
        plan.library("write_kv", plan.view, byref(p))

    def _copy_blocks(self, kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
        if not (kv.k.is_cpu and kv.v.is_cpu):
            raise Unsupported(f"the cache is on {kv.k.device} and {kv.v.device}; the cpu backend copies on the CPU")
        library = native.default()
        sources, targets = torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
        for x in kv.tensors().values():
            size = x.element_size()
            block, head, slot, *_ = (stride * size for stride in used_strides(x))
            _, heads, slots, *dims = x.shape
            sizes = heads, slots, math.prod(dims) * size
            ids = sources.data_ptr(), targets.data_ptr(), len(src)
            library.copy_blocks(library.parallel_for, x.data_ptr(), block, head, slot, *sizes, *ids)

    # --------------------------------------------------------------------------------- operators of a decoder

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm("rms_norm", x, None, (weight,), eps)

    def _add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm("rms_norm", x, residual, (weight,), eps)

    def _layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._norm("layer_norm", x, None, (weight, bias), eps)

    def _norm(
        self, kernel: str, x: Tensor, residual: Tensor | None, weights: Sequence[Tensor | None], eps: float
    ) -> Tensor:
        dtype, x, size = _dtype("x", x), as_rows(x), x.shape[-1]
        out, kept = torch.empty(x.shape, dtype=x.dtype), [None if w is None else _fp32(w) for w in weights]
        added = (None, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
        addresses = (None if w is None else w.data_ptr() for w in (*kept, out))
        outer_stride, inner, inner_stride = row_strides(x)
        rows = x.data_ptr(), outer_stride, inner, inner_stride
        native.default()(kernel, *rows, *added, *addresses, inner * size, count_rows(x), size, eps, dtype)
        return out

    def _rope(self, q: Tensor, k: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> None:
        dtype, positions = _dtype("q", q), positions.to("cpu", torch.int64).contiguous()
        cos, sin = _fp32(cos), _fp32(sin)
        places = (y for x in (q, k) for y in (x.data_ptr(), x.stride(0), x.shape[1], x.stride(1)))
        tables = (x.data_ptr() for x in (positions, cos, sin))
        beyond = native.default()("rope", *places, *tables, len(q), *cos.shape, dtype)
        if beyond >= 0:
            raise bad_position(positions, beyond, len(cos))

    def _swiglu(self, gate_up: Tensor) -> Tensor:
        dtype, size = _dtype("gate_up", gate_up), gate_up.shape[-1] // 2
        rows = gate_up
        if gate_up.dim() != 2 or gate_up.stride(1) != 1:
            rows = gate_up.contiguous().view(count_rows(gate_up), 2 * size)
        out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype)
        native.default()("swiglu", rows.data_ptr(), rows.stride(0), out.data_ptr(), size, len(rows), size, dtype)
        return out

    def _activate(self, x: Tensor, activation: Activation) -> Tensor:
        dtype, size = _dtype("x", x), activation.out_size(x.shape[1])
        rows = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty(len(x), size, dtype=x.dtype)
        params = native.ActivationParams.of(activation, size)
        native.default()("activate", rows.data_ptr(), rows.stride(0), out.data_ptr(), size, len(rows), params, dtype)
        return out

    def _choose(self, logits: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
        count, k = len(logits), choice.num_chosen
        room = logits.clone(memory_format=torch.contiguous_format), torch.empty(logits.shape, dtype=torch.float32)
        heaps = torch.empty(count, max(k, choice.groups), dtype=torch.int64)
        ids = torch.empty(count, k, dtype=torch.int64)
        shares = torch.empty(count, k, dtype=torch.float32)
        addresses = (x.data_ptr() for x in (*room, heaps, ids, shares))
        bias, scales = (None if x is None else x.contiguous() for x in (choice.bias, choice.scales))
        choice = replace(choice, bias=bias, scales=scales)
        native.default()("choose", *addresses, count, native.ChoiceParams.of(choice, logits.shape[1]))
        return ids, shares

    def _gelu(self, x: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
        dtype, x, size = _dtype("x", x), as_rows(x), x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype)
        outer_stride, inner, inner_stride = row_strides(x)
        rows = x.data_ptr(), outer_stride, inner, inner_stride
        native.default()("gelu", *rows, out.data_ptr(), inner * size, count_rows(x), size, approximate == "tanh", dtype)
        return out

    # --------------------------------------------------------------------------- of layers that keep a state

    def _convolve(
        self,
        x: Tensor,  # [T, W]
        convolution: Convolution,
        cache: RecurrentCache,
        plan: recurrent.CpuRecurrentPlan,
    ) -> Tensor:
        convolution = convolution._replace(weight=convolution.weight.T.contiguous())
        return recurrent.convolve(recurrent.convolution_params(convolution), x, cache, plan)

    def _recur(
        self,
        x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv]
        gates: Tensor,  # [T, 2 * Hv] or [T, Hv]
        recurrence: Recurrence,
        cache: RecurrentCache,
        plan: recurrent.CpuRecurrentPlan,
    ) -> Tensor:
        return recurrent.recur(recurrent.recurrence_params(recurrence), x, gates, cache, plan)

    def _scan(
        self,
        x: Tensor,  # [T, 2 * Hk * Dk + Hv * Dv] or [T, Hv * Dv]
        gates: Tensor,  # [T, Hv * Dk] or [T, Hv * Dv]
        side: Tensor,  # [T, Hv], [T, 2 * Hk * Dk] or [T, Hv * Dv]
        weights: Scan,
        cache: RecurrentCache,
        plan: recurrent.CpuRecurrentPlan,
    ) -> Tensor:
        held = weights._replace(rate=weights.rate.contiguous(), bias=weights.bias.contiguous())
        return recurrent.scan(recurrent.scan_params(held), x, gates, side, cache, plan)

    def _gated_norm(self, x: Tensor, gate: Tensor, norm: GatedNorm) -> Tensor:
        dtype, weight, heads = _dtype("x", x), _fp32(norm.weight), norm.heads
        out = torch.empty(x.shape, dtype=x.dtype)
        params = native.GatedNormParams(weight.data_ptr(), heads, x.shape[1] // heads, norm.eps, norm.first == "gate")
        rows = (y for z in (x, gate, out) for y in (z.data_ptr(), z.stride(0)))
        native.default()("gated_norm", *rows, len(x), byref(params), dtype)
        return out

    def _gate(self, x: Tensor, gate: Tensor) -> None:
        rows = (y for z in (gate, x) for y in (z.data_ptr(), z.stride(0)))
        native.default()("gate", *rows, len(x), native.GateParams(gate.shape[1], x.shape[1]), _dtype("x", x))

    # -------------------------------------------------------------------------- for a sampler, and for a router

    def _logsumexp(self, logits: Tensor) -> Tensor:
        _dtype("logits", logits)
        out = torch.empty(len(logits), dtype=torch.float32)
        native.default()("logsumexp", logits.data_ptr(), logits.stride(0), out.data_ptr(), *logits.shape)
        return out

    def _top_k(self, logits: Tensor, k: int) -> Tensor:
        _dtype("logits", logits)
        ids = torch.empty(len(logits), k, dtype=torch.int64)
        heaps = torch.empty(len(logits), k, dtype=torch.int64)
        addresses = (x.data_ptr() for x in (heaps, ids))
        native.default()("top_k", logits.data_ptr(), logits.stride(0), *addresses, *logits.shape, k)
        return ids

    def _top_k_softmax(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        _dtype("logits", logits)
        heaps, ids = (torch.empty(len(logits), k, dtype=torch.int64) for _ in range(2))
        shares = torch.empty(len(logits), k, dtype=torch.float32)
        addresses = (x.data_ptr() for x in (heaps, ids, shares))
        native.default()("top_k_softmax", logits.data_ptr(), logits.stride(0), *addresses, *logits.shape, k)
        return ids, shares


def _fits(x: Tensor, shape: tuple[int, ...], plan: CpuPlan) -> bool:
    """Return True if a tensor passes a quick check. Otherwise the full check determines the error."""
    return x.shape == shape and x.dtype is plan.spec.dtype and x.is_cpu and x.stride(2) == 1


def _dtype(name: str, x: Tensor) -> int:
    """Return the kernels' number of the dtype. Raises Unsupported for other dtypes and devices."""
    number = native.DTYPES.get(x.dtype)
    if number is None or not x.is_cpu:
        served = ", ".join(map(str, native.DTYPES))
        raise Unsupported(f"{name} is {x.dtype} on {x.device}; the cpu backend serves {served} on the CPU")
    return number


def _fp32(x: Tensor) -> Tensor:
    """Return x as contiguous fp32, without a copy if it is already."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()
