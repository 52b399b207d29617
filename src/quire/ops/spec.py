"""The description of an attention call: the specification, the paged cache, and the limits of a backend.

Dimensions, used with these letters in every docstring of Quire:

| letter | is | letter | is |
|---|---|---|---|
| T | query tokens in the batch | D, Dv | head_dim of q and k, of v |
| S | sequences in the batch | N | blocks in the pool |
| R | rows that need logits | B | block_size, tokens a block |
| Hq, Hkv | query heads, KV heads | M | blocks in the widest block table |
| G | Hq / Hkv, the group size | L, V | layers, vocabulary |

Query row r of sequence s has the absolute position `p = context_lens[s] - q_len[s] + r` and sees the keys
`max(0, p - window + 1) .. p`, or all keys of its sequence if the attention is not causal. With `key_ends` of a plan it
sees the keys up to that one instead of up to p. With chunks of C positions it sees no key before the last multiple of
C, `p // C * C`. Scores are computed in the order
`q·k * scale → softcap → + alibi_slope * (key_pos - p) → mask → softmax with the sink as one more logit`. Slopes are
given per head or, [S, Hq], per sequence and head.
Sums and the LSE are in fp32 for every dtype (float64 for float64). A row that sees no key gives zeros and an LSE of
-inf. If the context is shorter than the query, the first rows have negative positions: causal ones see no key.
Keys below the window, but in a block that is not entirely below it, still belong to the sequence.

A cache of int8 holds rows of integers, each with one scale for K and one for V (`quire.ops.weights.rounding` defines
the rounding of a row). A score is then computed in the order `q·k_int * k_scale * scale → softcap → ...`, and a value
is weighted by `softmax weight * v_scale`. That product is rounded to the dtype of q where weights are; the sum of the
weights does not include v_scale. A backend may multiply 16-bit integers instead of q and these weights. Their unit is
1/32,512 of the largest number in a row of q (1/16,256 for heads longer than 512), and 1/65,535 of a row's largest
weight among 256 keys. Each is off by at most half a unit, except for one number of q, which may be off by 1.5 units.

In a latent cache V is the first Dv numbers of K, stored once. With int8 these are rounded as a row of V, and the other
D - Dv numbers of K as a separate row: in DeepSeek's models they are rotated keys, whose numbers may be a hundred times
as large. So a score begins with `q[:Dv]·v_int * v_scale + q[Dv:]·k_int[Dv:] * k_scale`, and one number of q in each
part may be off by 1.5 units.

Keys that a row does not see are not multiplied: an infinite or NaN entry of the cache affects the rows that see it and
no other. The result of a row that sees one is not finite, unless the key's score is -inf.

Any size may be 0 unless a spec documents otherwise; empty tensors give empty results. A tensor that an operator writes
(out, a residual, rope's q and k, the cache) must not share memory with itself or with another argument: that raises
BadStride. Interleaved views of one tensor share no element, for example q and k cut out of one projection. In a graph
of torch.compile, rope and add_rms_norm write to copies, and torch checks the tensors that these are copied to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.errors import BadDtype, BadShape, BadStride, BadValue, Unsupported
from quire.ops.checks.tensors import INT32_MAX, begin_alike, check_tensor

MAX_HEAD_DIM = 1024
MAX_BLOCK_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The properties of attention that are constant over all steps for the layers of one cache group.

    The fields are validated on construction.

    Raises:
        BadValue, BadDtype: naming the field that no backend could serve.

    Example:
        >>> ops.AttentionSpec(
        ...     num_heads=8, num_kv_heads=2, head_dim=64, block_size=16, num_blocks=32, dtype=torch.float32
        ... ).group_size
        4
    """

    num_heads: int  # Hq, a multiple of num_kv_heads
    num_kv_heads: int  # Hkv
    head_dim: int  # D, 1..1024
    block_size: int  # B, 1..256
    num_blocks: int  # N; N * B slots are numbered in an int32
    dtype: torch.dtype  # of q and of the output
    kv_dtype: torch.dtype | None = None  # of the cache: a floating-point dtype or int8; None: that of q
    head_dim_v: int | None = None  # Dv, 1..1024; None: D
    latent: bool = False  # V is the first Dv numbers of K; Dv < D, and with int8 a multiple of 4
    causal: bool = True  # a row sees no key after its own position
    window: int | None = None  # number of keys that a row sees, its own included; causal only; None: all
    device: str = "cpu"  # a device of torch, for example "cuda"
    reproducible: bool = False  # batch-invariant: a row's bits depend neither on its batch nor on its prefill chunk

    def __post_init__(self) -> None:
        _check_spec(self)

    @property
    def group_size(self) -> int:
        """G, the number of query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def dim_v(self) -> int:
        """Dv: `head_dim_v`, or D if that is `None`."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the cache: `kv_dtype`, or the dtype of q if that is `None`."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def is_scaled(self) -> bool:
        """True if rows of the cache have scales, that is for int8."""
        return self.cache_dtype == torch.int8

    @property
    def default_scale(self) -> float:
        """1 / sqrt(D), the scale of scaled dot-product attention (Vaswani et al. 2017)."""
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class PagedKV:
    """One layer's part of the paged cache.

    K and V may have any strides as long as the last one is 1, so HND and NHD views are both accepted. Only a cache of
    int8 has scales; they may have any strides. Slots that no sequence owns may hold any value, NaN included: they never
    affect a result.
    """

    k: torch.Tensor  # [N, Hkv, B, D]
    v: torch.Tensor  # [N, Hkv, B, Dv]; of a latent cache the first numbers of k's rows, in the same memory
    k_scale: torch.Tensor | None = None  # fp32 [N, Hkv, B]
    v_scale: torch.Tensor | None = None  # fp32 [N, Hkv, B]
    index: torch.Tensor | None = None  # [N, 1, B, Di]: keys of the indexer of sparse attention; None: it has none

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are not None, by name ("kv.k", ...)."""
        named = {"kv.k": self.k, "kv.v": self.v, "kv.k_scale": self.k_scale, "kv.v_scale": self.v_scale}
        named["kv.index"] = self.index
        return {name: x for name, x in named.items() if x is not None}


class Scores(NamedTuple):
    """The arguments of `attention` that define how scores are computed from q·k."""

    scale: float | None = None
    alibi_slopes: torch.Tensor | None = None  # fp32 [Hq] or [S, Hq]
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # fp32 [Hq]
    chunk: int | None = None


@dataclass(frozen=True)
class Limits:
    """The cases that a backend declares to serve. Every other case raises Unsupported."""

    kv_dtypes: Mapping[torch.dtype, frozenset[torch.dtype]]  # for each dtype of q, the dtypes its cache may have
    max_head_dim: int  # the largest D and Dv
    reproducible: bool  # True if it serves batch-invariant plans, `AttentionSpec.reproducible`
    case_budget: int  # number of random ragged cases that the conformance suite runs on this backend


def check_supported(spec: AttentionSpec, name: str, limits: Limits) -> None:
    """Raise Unsupported unless backend `name` declares that it serves the spec."""
    if spec.dtype not in limits.kv_dtypes:
        served = ", ".join(sorted(map(str, limits.kv_dtypes)))
        raise Unsupported(f"backend {name!r} does not serve dtype {spec.dtype}; it serves {served}")
    if spec.cache_dtype not in limits.kv_dtypes[spec.dtype]:
        served = ", ".join(sorted(map(str, limits.kv_dtypes[spec.dtype])))
        raise Unsupported(
            f"backend {name!r} does not serve a cache of {spec.cache_dtype} for dtype {spec.dtype}; it serves {served}"
        )
    if spec.reproducible and not limits.reproducible:
        raise Unsupported(
            f"backend {name!r} does not give the same bits in every batch; spec.reproducible must be False"
        )
    largest = max(spec.head_dim, spec.dim_v)
    if largest > limits.max_head_dim:
        raise Unsupported(
            f"backend {name!r} serves head dimensions up to {limits.max_head_dim}; the spec has {largest}"
        )


def check_kv(kv: PagedKV, spec: AttentionSpec) -> None:
    """Check a layer's cache against the spec."""
    lead = (spec.num_blocks, spec.num_kv_heads, spec.block_size)
    device = torch.device(spec.device)
    check_tensor("kv.k", kv.k, (*lead, spec.head_dim), spec.cache_dtype, device)
    check_tensor("kv.v", kv.v, (*lead, spec.dim_v), spec.cache_dtype, device)
    if spec.latent and not begin_alike(kv.k, kv.v):
        raise BadStride(
            f"kv.v has strides {kv.v.stride()} and separate memory; with spec.latent=True it must be "
            f"kv.k[..., :{spec.dim_v}]"
        )
    for name, scale in (("kv.k_scale", kv.k_scale), ("kv.v_scale", kv.v_scale)):
        if scale is None and spec.is_scaled:
            raise BadShape(f"{name} is None; a cache of {spec.cache_dtype} needs scales, fp32 {lead}")
        if scale is not None and not spec.is_scaled:
            raise BadShape(f"{name} has shape {tuple(scale.shape)}; a cache of {spec.cache_dtype} has no scales")
        if scale is not None:
            check_tensor(name, scale, lead, torch.float32, device, any_strides=True)


def _check_spec(spec: AttentionSpec) -> None:
    """Raise BadValue or BadDtype for a field of the spec that no backend could serve."""
    for name, upper in (
        ("num_heads", INT32_MAX),
        ("num_kv_heads", INT32_MAX),
        ("head_dim", MAX_HEAD_DIM),
        ("head_dim_v", MAX_HEAD_DIM),
        ("block_size", MAX_BLOCK_SIZE),
        ("num_blocks", INT32_MAX),
        ("window", INT32_MAX),
    ):
        value = getattr(spec, name)
        if value is None and name in ("head_dim_v", "window"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadValue(f"spec.{name} is {value!r}; it must be an integer")
        if not 1 <= value <= upper:
            raise BadValue(f"spec.{name} is {value}; it must lie in 1..{upper}")
    if spec.num_heads % spec.num_kv_heads:
        raise BadValue(f"spec.num_heads is {spec.num_heads}, no multiple of spec.num_kv_heads, {spec.num_kv_heads}")
    if spec.num_blocks * spec.block_size > INT32_MAX:
        raise BadValue(
            f"spec.num_blocks * spec.block_size is {spec.num_blocks * spec.block_size}; slots are numbered in an "
            f"int32, so at most {INT32_MAX}"
        )
    for name in ("reproducible", "latent"):
        if not isinstance(getattr(spec, name), bool):
            raise BadValue(f"spec.{name} is {getattr(spec, name)!r}; it must be True or False")
    if spec.latent and spec.dim_v >= spec.head_dim:
        raise BadValue(
            f"spec.head_dim_v is {spec.dim_v} with latent=True; it must lie below spec.head_dim, {spec.head_dim}"
        )
    if spec.latent and spec.kv_dtype == torch.int8 and spec.dim_v % 4:
        raise BadValue(f"spec.head_dim_v is {spec.dim_v} with latent=True; with int8 it must be a multiple of 4")
    if spec.window is not None and not spec.causal:
        raise BadValue(f"spec.window is {spec.window} with causal=False; a window needs causal attention")
    for name in ("dtype", "kv_dtype"):
        dtype = getattr(spec, name)
        if name == "kv_dtype" and dtype is None:
            continue
        if name == "kv_dtype" and dtype == torch.int8:
            continue
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            integers = " or torch.int8" if name == "kv_dtype" else ""
            raise BadDtype(f"spec.{name} is {dtype!r}; it must be a floating-point torch.dtype{integers}")
    try:
        torch.device(spec.device)
    except (RuntimeError, TypeError):
        raise BadValue(f"spec.device is {spec.device!r}; it must name a device of torch, as 'cpu' does") from None
