"""Attention and the small operators on an ordinary CPU, native, at the speed of its memory and its vector units.

The kernels are a C++ library without torch (csrc/), one source compiled for each instruction set; this module checks
the arguments and hands over addresses. They run on torch's own threads. Results depend on the instruction set, and on
nothing else: not on the threads, the batch, or the chunk that a row came in.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from typing import Literal, overload

import torch
from torch import Tensor

from quire.errors import BadValue, Unsupported
from quire.ops import overlap, registered, validate, validate_small
from quire.ops.cpu import native
from quire.ops.cpu.worklist import CpuPlan
from quire.ops.interface import AttentionSpec, Limits, PagedKV
from quire.ops.plan import AttentionPlan
from quire.ops.rows import as_rows, count_rows, row_strides, used_strides

NAME = "cpu"
LIMITS = Limits(
    kv_dtypes={dtype: frozenset((dtype,)) for dtype in native.DTYPES},
    max_head_dim=1024,
    reproducible=True,
    case_budget=2_000,
)


def unavailable(device: str) -> str | None:
    """Why this backend cannot serve that device on this machine, or None where it can."""
    return native.unavailable() if device == "cpu" else f"it serves the device 'cpu', not {device!r}"


# ------------------------------------------------------------------------------------------------- the plan


def make_plan(spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> CpuPlan:
    """An empty plan with room for that many query tokens, sequences and blocks a sequence."""
    validate.check_supported(spec, NAME, LIMITS)
    if torch.device(spec.device).type != "cpu":
        raise Unsupported(f"backend {NAME!r} does not serve device {spec.device!r}; it serves 'cpu'")
    return CpuPlan(spec, max_tokens, max_seqs, max_blocks, native.default())


def plan(
    spec: AttentionSpec,
    query_starts: Tensor,  # int32 [S+1], host
    context_lens: Tensor,  # int32 [S], host
    block_tables: Tensor,  # int32 [S, M], host
    slots: Tensor | None = None,  # int64 [T], host
) -> CpuPlan:
    """A plan for exactly this step."""
    plan = make_plan(spec, *validate.step_sizes(query_starts, context_lens, block_tables))
    plan.update(query_starts, context_lens, block_tables, slots)
    return plan


def _own(plan: AttentionPlan) -> CpuPlan:
    if not isinstance(plan, CpuPlan):
        raise BadValue(f"the plan is of another backend (a {type(plan).__name__}); make it with the cpu backend's plan")
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
    plan = _own(plan)
    cache = plan.cache(kv)
    fits = _fits(k_new, plan.k_shape, plan) and _fits(v_new, plan.v_shape, plan)
    if not (plan.writable and cache.separate and fits and overlap.apart((kv.k, kv.v), (k_new, v_new))):
        validate.check_write(k_new, v_new, kv, plan)
    p = cache.write
    p.k_new, p.v_new = k_new.data_ptr(), v_new.data_ptr()
    p.k_new_token, p.k_new_head, _ = k_new.stride()
    p.v_new_token, p.v_new_head, _ = v_new.stride()
    plan.library.write_kv(plan.library.parallel_for, plan.view, byref(p))


@registered.operator(NAME)
def copy_blocks(kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy block src[i] to block dst[i]: what copy-on-write does when a shared block is about to be written."""
    validate.check_copy(kv, src, dst)
    if not (kv.k.is_cpu and kv.v.is_cpu):
        raise Unsupported(f"the cache lies on {kv.k.device} and {kv.v.device}; the cpu backend copies on the CPU")
    library = native.default()
    sources, targets = torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
    for x in (kv.k, kv.v):
        size = x.element_size()
        block, head, slot, _ = (stride * size for stride in used_strides(x))
        _, heads, slots, dim = x.shape
        library.copy_blocks(
            library.parallel_for,
            *(x.data_ptr(), block, head, slot, heads, slots, dim * size),
            *(sources.data_ptr(), targets.data_ptr(), len(src)),
        )


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
    """As `reference.attention`, every sum formed in fp32.

    Where the CPU multiplies bf16, the softmax weights over a bf16 cache are rounded to bf16.
    """
    plan = _own(plan)
    cache = plan.cache(kv)
    plain = scale is None and alibi_slopes is None and softcap is None and sinks is None
    fits = out is None or (
        _fits(out, plan.out_shape, plan) and out.is_contiguous() and overlap.apart((out,), (q, kv.k, kv.v))
    )
    if not (plain and fits and _fits(q, plan.q_shape, plan)):
        validate.check_attention(q, kv, plan, scale, alibi_slopes, softcap, sinks, out, return_lse)
    if out is None:
        out = torch.empty(plan.out_shape, dtype=plan.spec.dtype)
    lse = torch.empty(plan.out_shape[:2], dtype=torch.float32) if return_lse else None
    p = cache.attention
    p.q, p.out, p.lse = q.data_ptr(), out.data_ptr(), None if lse is None else lse.data_ptr()
    p.alibi_slopes = None if alibi_slopes is None else alibi_slopes.data_ptr()
    p.slope_seq = 0 if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes.stride(0)
    p.sinks = None if sinks is None else sinks.data_ptr()
    p.q_token, p.q_head, _ = q.stride()
    p.out_token, p.out_head, _ = out.stride()
    p.scale = plan.spec.default_scale if scale is None else scale
    p.softcap = softcap or 0.0
    plan.library("attention", plan.view, byref(p))
    return out if lse is None else (out, lse)


def _fits(x: Tensor, shape: tuple[int, ...], plan: CpuPlan) -> bool:
    """Whether a tensor is as it should be, told at a glance; where it is not, the full check names what is wrong."""
    return x.shape == shape and x.dtype is plan.spec.dtype and x.is_cpu and x.stride(2) == 1


# ------------------------------------------------------------------------------------- states of attention


@registered.operator(NAME)
def merge_states(
    out_a: Tensor,  # [T, Hq, Dv]
    lse_a: Tensor,  # fp32 [T, Hq]
    out_b: Tensor,  # [T, Hq, Dv]
    lse_b: Tensor,  # fp32 [T, Hq]
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from attention over each: out [T, Hq, Dv], LSE fp32 [T, Hq]."""
    validate.check_states(out_a, lse_a, out_b, lse_b)
    dtype = _dtype("out_a", out_a)
    out_a, lse_a, out_b, lse_b = (x.contiguous() for x in (out_a, lse_a, out_b, lse_b))
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    states = (x.data_ptr() for x in (out_a, lse_a, out_b, lse_b, out, lse))
    native.default()("merge_states", *states, lse.numel(), out.shape[-1], dtype)
    return out, lse


@registered.operator(NAME)
def apply_sinks(
    out: Tensor,  # [T, Hq, Dv]
    lse: Tensor,  # fp32 [T, Hq]
    sinks: Tensor,  # fp32 [Hq]
) -> Tensor:
    """Close a state with one more logit a head that carries no value: out · e^lse / (e^lse + e^sink)."""
    validate.check_state("out", out, "lse", lse)
    validate.check_tensor("sinks", sinks, (out.shape[1],), torch.float32, out.device)
    dtype = _dtype("out", out)
    out, lse = out.contiguous(), lse.contiguous()
    closed = torch.empty_like(out)
    addresses = (x.data_ptr() for x in (out, lse, sinks, closed))
    native.default()("apply_sinks", *addresses, lse.numel(), out.shape[1], out.shape[2], dtype)
    return closed


# ---------------------------------------------------------------------------- small operators of a decoder


@registered.operator(NAME)
def rms_norm(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [H]
    eps: float,
) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension (Zhang & Sennrich 2019)."""
    validate_small.check_norm(x, eps, weight=weight)
    dtype, x, weight = _dtype("x", x), as_rows(x), _fp32(weight)
    out = torch.empty(x.shape, dtype=x.dtype)
    native.default()(
        "rms_norm",
        x.data_ptr(),
        *row_strides(x),
        None,
        0,
        weight.data_ptr(),
        out.data_ptr(),
        count_rows(x),
        x.shape[-1],
        eps,
        dtype,
    )
    return out


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
    dtype, x, weight = _dtype("x", x), as_rows(x), _fp32(weight)
    out = torch.empty(x.shape, dtype=x.dtype)
    native.default()(
        *(
            "rms_norm",
            x.data_ptr(),
            *row_strides(x),
            residual.data_ptr(),
            residual.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
        ),
        *(count_rows(x), x.shape[-1], eps, dtype),
    )
    return out


@registered.operator(NAME)
def layer_norm(
    x: Tensor,  # [..., H]
    weight: Tensor,  # [H]
    bias: Tensor | None,  # [H]
    eps: float,
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, over the last dimension (Ba et al. 2016)."""
    validate_small.check_norm(x, eps, weight=weight, bias=bias)
    dtype, x, weight = _dtype("x", x), as_rows(x), _fp32(weight)
    bias = None if bias is None else _fp32(bias)
    out = torch.empty(x.shape, dtype=x.dtype)
    native.default()(
        *(
            "layer_norm",
            x.data_ptr(),
            *row_strides(x),
            None,
            0,
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
        ),
        *(count_rows(x), x.shape[-1], eps, dtype),
    )
    return out


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
    dtype, positions = _dtype("q", q), positions.to("cpu", torch.int64).contiguous()
    cos, sin = _fp32(cos), _fp32(sin)
    beyond = native.default()(
        *("rope", q.data_ptr(), q.stride(0), q.shape[1], q.stride(1), k.data_ptr(), k.stride(0), k.shape[1]),
        *(k.stride(1), positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), len(q), *cos.shape, dtype),
    )
    if beyond >= 0:
        raise validate_small.bad_position(positions, beyond, len(cos))


@registered.operator(NAME)
def swiglu(
    gate_up: Tensor,  # [T, 2 * I]: gates, then ups
) -> Tensor:
    """silu(gate) * up: [T, I] (Shazeer 2020)."""
    validate_small.check_swiglu(gate_up)
    dtype, size = _dtype("gate_up", gate_up), gate_up.shape[-1] // 2
    rows = gate_up
    if gate_up.dim() != 2 or gate_up.stride(1) != 1:
        rows = gate_up.contiguous().view(count_rows(gate_up), 2 * size)
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype)
    native.default()("swiglu", rows.data_ptr(), rows.stride(0), out.data_ptr(), len(rows), size, dtype)
    return out


@registered.operator(NAME)
def gelu(
    x: Tensor,  # [..., I]
    approximate: Literal["none", "tanh"],
) -> Tensor:
    """GELU in its exact (erf) or its tanh form (Hendrycks & Gimpel 2016)."""
    validate_small.check_gelu(x, approximate)
    dtype, x = _dtype("x", x), as_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    native.default()(
        "gelu", x.data_ptr(), *row_strides(x), out.data_ptr(), count_rows(x), x.shape[-1], approximate == "tanh", dtype
    )
    return out


# --------------------------------------------------------------------------- for a sampler, and for a router


@registered.operator(NAME)
def logsumexp(
    logits: Tensor,  # fp32 [R, V]
) -> Tensor:
    """log(sum(exp(logits))) of each row: fp32 [R]."""
    validate_small.check_logits(logits)
    _dtype("logits", logits)
    out = torch.empty(len(logits), dtype=torch.float32)
    native.default()("logsumexp", logits.data_ptr(), logits.stride(0), out.data_ptr(), *logits.shape)
    return out


@registered.operator(NAME)
def top_k(
    logits: Tensor,  # fp32 [R, V], no NaN
    k: int,
) -> Tensor:
    """The ids of the k largest logits of each row, the largest first, of equal ones the lower id: int64 [R, k]."""
    validate_small.check_logits(logits, k)
    _dtype("logits", logits)
    ids = torch.empty(len(logits), k, dtype=torch.int64)
    heaps = torch.empty(len(logits), k, dtype=torch.int64)
    native.default()("top_k", logits.data_ptr(), logits.stride(0), heaps.data_ptr(), ids.data_ptr(), *logits.shape, k)
    return ids


@registered.operator(NAME)
def top_k_softmax(
    logits: Tensor,  # fp32 [R, V], no NaN, the largest of a row finite
    k: int,
) -> tuple[Tensor, Tensor]:
    """top_k's ids, int64 [R, k], and what each of them has of the row's softmax, fp32 [R, k]: a router's choice."""
    validate_small.check_logits(logits, k)
    _dtype("logits", logits)
    heaps, ids = (torch.empty(len(logits), k, dtype=torch.int64) for _ in range(2))
    shares = torch.empty(len(logits), k, dtype=torch.float32)
    addresses = (x.data_ptr() for x in (heaps, ids, shares))
    native.default()("top_k_softmax", logits.data_ptr(), logits.stride(0), *addresses, *logits.shape, k)
    return ids, shares


# -------------------------------------------------------------------------------------------------- arguments


def _dtype(name: str, x: Tensor) -> int:
    """The number that the kernels know the dtype by."""
    number = native.DTYPES.get(x.dtype)
    if number is None or not x.is_cpu:
        served = ", ".join(map(str, native.DTYPES))
        raise Unsupported(f"{name} is {x.dtype} on {x.device}; the cpu backend serves {served} on the CPU")
    return number


def _fp32(x: Tensor) -> Tensor:
    """x itself where it is as the kernels take it."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()
