"""What every backend offers: the `Ops` protocol and the two structures that describe a call.

Dimensions, used with these letters in every docstring of Quire:

| letter | is | letter | is |
|---|---|---|---|
| T | query tokens in the batch | D, Dv | head_dim of q and k, of v |
| S | sequences in the batch | N | blocks in the pool |
| R | rows that need logits | B | block_size, tokens a block |
| Hq, Hkv | query heads, KV heads | M | blocks in the widest block table |
| G | Hq / Hkv, the group size | L, V | layers, vocabulary |

Query row r of sequence s stands at the absolute position `p = context_lens[s] - q_len[s] + r` and sees the keys
`max(0, p - window + 1) .. p`, or all keys of its sequence when the attention is not causal. Scores are formed in the
order `q·k * scale → softcap → + alibi_slope * (key_pos - p) → mask → softmax with the sink as one more logit`, where
the slopes are each head's or, [S, Hq], each sequence's and head's.
Sums and the LSE are in fp32 whatever the dtype (float64 for float64). A row that sees nothing gives zeros and an LSE
of -inf. Where the context is shorter than the query, the first rows stand before the sequence's start: causal ones see
nothing. Keys below the window but in a block that is not wholly below it still belong to the sequence.

What a row does not see is not multiplied: an infinite or NaN entry of the cache reaches the rows that see it and no
other. A row that sees one shows it: its result is not finite, unless the key's score is -inf.

Any size may be 0 where a spec does not say otherwise: what has no element is computed without one. What an operator
writes (out, a residual, rope's q and k, the cache) must not share memory with itself or with another argument: that
raises BadStride. Views of one tensor that interleave share none, as q and k cut out of one projection. In a graph of
torch.compile, rope and add_rms_norm write to copies, and torch looks at what these are copied to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, overload

import torch

from quire.ops import validate

if TYPE_CHECKING:
    from quire.ops.plan import AttentionPlan


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What stays the same from step to step for the layers of one cache group. Validated on construction.

    Raises BadValue or BadDtype, naming the field.
    """

    num_heads: int  # Hq, a multiple of num_kv_heads
    num_kv_heads: int  # Hkv
    head_dim: int  # D, 1..1024
    block_size: int  # B, 1..256
    num_blocks: int  # N; N * B slots are numbered in an int32
    dtype: torch.dtype  # of q and of the output
    kv_dtype: torch.dtype | None = None  # of the cache; None: that of q
    head_dim_v: int | None = None  # Dv, 1..1024; None: D
    causal: bool = True
    window: int | None = None  # keys that a row sees, its own included; causal only
    device: str = "cpu"
    reproducible: bool = False  # a row's bits must not depend on its batch, nor on the chunk that it came in

    def __post_init__(self) -> None:
        validate.check_spec(self)

    @property
    def group_size(self) -> int:
        """G: query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def dim_v(self) -> int:
        """Dv, resolved."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of the cache, resolved."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def default_scale(self) -> float:
        """1 / sqrt(D), the scale of scaled dot-product attention (Vaswani et al. 2017)."""
        return 1.0 / math.sqrt(self.head_dim)


@dataclass(frozen=True, eq=False)  # tensors do not compare as a whole
class PagedKV:
    """One layer's share of the paged cache. Any strides as long as the last one is 1: HND and NHD views both serve.

    Slots that no sequence owns may hold anything, NaN included: no backend lets them reach a result.
    """

    k: torch.Tensor  # [N, Hkv, B, D]
    v: torch.Tensor  # [N, Hkv, B, Dv]


@dataclass(frozen=True)
class Limits:
    """What a backend declares that it serves; every other case raises Unsupported."""

    kv_dtypes: Mapping[torch.dtype, frozenset[torch.dtype]]  # for each dtype of q, the dtypes its cache may have
    max_head_dim: int  # the largest D and Dv
    reproducible: bool  # whether it serves plans that ask for it
    case_budget: int  # random ragged cases that the conformance suite spends on this backend


class Ops(Protocol):
    """A backend: a module with these names. `quire.ops.reference` says what each of them computes."""

    NAME: str
    LIMITS: Limits

    def unavailable(self, device: str) -> str | None:
        """Why this backend cannot serve that device on this machine, or None where it can."""

    def make_plan(self, spec: AttentionSpec, max_tokens: int, max_seqs: int, max_blocks: int) -> AttentionPlan:
        """An empty plan with room for `max_tokens` T, `max_seqs` S and `max_blocks` M; call its `update`."""

    def plan(
        self,
        spec: AttentionSpec,
        query_starts: torch.Tensor,  # int32 [S+1], host
        context_lens: torch.Tensor,  # int32 [S], host
        block_tables: torch.Tensor,  # int32 [S, M], host
        slots: torch.Tensor | None = None,  # int64 [T], host
    ) -> AttentionPlan:
        """`make_plan` of exactly this size, updated once."""

    def write_kv(
        self,
        k_new: torch.Tensor,  # [T, Hkv, D]
        v_new: torch.Tensor,  # [T, Hkv, Dv]
        kv: PagedKV,
        plan: AttentionPlan,
    ) -> None:
        """Store each row's K and V at its slot of the plan; rows with slot -1 are skipped.

        K and V may share memory only as those of a latent cache do: the rows of one begin with those of the other, in
        the cache and in what is new. Raises BadShape, BadDtype, BadStride or BadValue, as all operators do.
        """

    @overload
    def attention(
        self,
        q: torch.Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: AttentionPlan,
        *,
        scale: float | None = None,
        alibi_slopes: torch.Tensor | None = None,  # fp32 [Hq] or [S, Hq]
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,  # fp32 [Hq]
        out: torch.Tensor | None = None,  # [T, Hq, Dv]
        return_lse: Literal[False] = False,
    ) -> torch.Tensor: ...
    @overload
    def attention(
        self,
        q: torch.Tensor,  # [T, Hq, D]
        kv: PagedKV,
        plan: AttentionPlan,
        *,
        scale: float | None = None,
        alibi_slopes: torch.Tensor | None = None,  # fp32 [Hq] or [S, Hq]
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,  # fp32 [Hq]
        out: torch.Tensor | None = None,  # [T, Hq, Dv], apart from q and the cache
        return_lse: Literal[True],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def merge_states(
        self,
        out_a: torch.Tensor,  # [T, Hq, Dv]
        lse_a: torch.Tensor,  # fp32 [T, Hq]
        out_b: torch.Tensor,  # [T, Hq, Dv]
        lse_b: torch.Tensor,  # fp32 [T, Hq]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the union of two disjoint sets of keys, from attention over each: out, LSE."""

    def apply_sinks(
        self,
        out: torch.Tensor,  # [T, Hq, Dv]
        lse: torch.Tensor,  # fp32 [T, Hq]
        sinks: torch.Tensor,  # fp32 [Hq]
    ) -> torch.Tensor:
        """Close a state with one more logit a head that carries no value: out [T, Hq, Dv]."""

    def copy_blocks(self, kv: PagedKV, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] to block dst[i], K and V. No block may be written twice, or be in src and in dst."""

    def rms_norm(
        self,
        x: torch.Tensor,  # [..., H]
        weight: torch.Tensor,  # [H]
        eps: float,
    ) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) * weight, over the last dimension (Zhang & Sennrich 2019)."""

    def add_rms_norm(
        self,
        x: torch.Tensor,  # [T, H]
        residual: torch.Tensor,  # [T, H], becomes x + residual in place; apart from x and weight
        weight: torch.Tensor,  # [H]
        eps: float,
    ) -> torch.Tensor:
        """rms_norm of the new residual."""

    def layer_norm(
        self,
        x: torch.Tensor,  # [..., H]
        weight: torch.Tensor,  # [H]
        bias: torch.Tensor | None,  # [H]
        eps: float,
    ) -> torch.Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias, over the last dimension (Ba et al. 2016)."""

    def rope(
        self,
        q: torch.Tensor,  # [T, Hq, D], rotated in place
        k: torch.Tensor,  # [T, Hkv, D], rotated in place; apart from q
        positions: torch.Tensor,  # int32 or int64 [T]
        cos: torch.Tensor,  # fp32 [P, D_rot / 2]
        sin: torch.Tensor,  # fp32 [P, D_rot / 2]
    ) -> None:
        """Rotate dimension pairs (i, i + D_rot/2) of the first D_rot dimensions by their position's angle.

        Raises BadValue for a position on the host that the tables do not hold.
        """

    def swiglu(
        self,
        gate_up: torch.Tensor,  # [T, 2 * I]: gates, then ups
    ) -> torch.Tensor:
        """silu(gate) * up: [T, I] (Shazeer 2020)."""

    def gelu(
        self,
        x: torch.Tensor,  # [..., I]
        approximate: Literal["none", "tanh"],
    ) -> torch.Tensor:
        """GELU in its exact (erf) or its tanh form (Hendrycks & Gimpel 2016). Raises BadValue for another form."""

    def logsumexp(
        self,
        logits: torch.Tensor,  # fp32 [R, V]
    ) -> torch.Tensor:
        """log(sum(exp(logits))) of each row: fp32 [R]."""

    def top_k(
        self,
        logits: torch.Tensor,  # fp32 [R, V], no NaN
        k: int,
    ) -> torch.Tensor:
        """The ids of the k largest logits of each row, the largest first, of equal ones the lower id: int64 [R, k]."""

    def top_k_softmax(
        self,
        logits: torch.Tensor,  # fp32 [R, V], no NaN, the largest of a row finite
        k: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """top_k's ids, int64 [R, k], and what each of them has of the row's softmax, fp32 [R, k]: a router's choice."""
