"""What a decoder is, in Quire's own words: sizes, variations, and the shapes of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quire.cache.groups import CacheGroup, Heads
from quire.errors import ModelError
from quire.models.model import attention_width, cache_groups, mlp_width


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Which layers have experts in place of an MLP, and what these are: MLPs with silu, a gate and no biases."""

    layers: frozenset[int]
    count: int  # E
    per_token: int  # k, that each row goes through
    size: int  # I, of each of them
    renormalised: bool  # a row's shares are those among its own experts, not among all

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ModelError(f"{self.per_token} experts a token cannot be chosen of {self.count}")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The decoder's sizes and variations, in Quire's own words. The defaults are Llama's."""

    vocab_size: int  # V
    hidden_size: int  # H
    intermediate_size: int  # I, of the MLP
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    windows: tuple[int | None, ...]  # [L], keys that a row of the layer sees; None: all before it
    num_layers: int  # L
    max_position_embeddings: int
    tied_embeddings: bool  # the output projection is the embedding
    # Positions: exactly one of the three.
    ropes: tuple[Mapping[str, Any] | None, ...] = ()  # [L], rope parameters as rope.py reads them; None: no RoPE
    learned_positions: bool = False  # an embedding of each position is added to the token's
    alibi_slopes: tuple[float, ...] | None = None  # [Hq]
    # Normalisation.
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    embedding_norm: bool = False  # the embeddings are normalised
    qk_norm: Literal["head", "all heads"] | None = None  # what of q, and of k, is normalised before RoPE
    input_norms: bool = True  # what a branch sees is normalised
    branch_norms: bool = False  # each branch is normalised before it is added to the residual
    # Branches.
    parallel_branches: bool = False  # attention and MLP see the same residual; else the MLP sees what attention added
    branch_scale: float | None = None  # multiplies what a branch adds to the residual
    # Attention and MLP.
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output projection
    mlp_bias: bool = False
    gated_mlp: bool = True  # activation(gate) * up, else activation(up)
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    experts: ExpertsConfig | None = None  # in place of some layers' MLPs
    attention_scale: float | None = None  # None: 1 / sqrt(D)
    attention_softcap: float | None = None
    # Both ends.
    embedding_scale: float | None = None  # multiplies the embeddings
    rounds_embedding_scale: bool = False  # to the weights' dtype first, as Gemma was trained
    logit_scale: float | None = None  # multiplies the logits
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        rotated = any(rope is not None for rope in self.ropes)
        positions = [rotated, self.learned_positions, self.alibi_slopes is not None]
        if sum(positions) != 1:
            raise ModelError(f"a decoder knows positions in exactly one way; this one in {sum(positions)}")
        if len(self.windows) != self.num_layers or len(self.ropes) not in (0, self.num_layers):
            raise ModelError(
                f"a decoder of {self.num_layers} layers has {len(self.windows)} windows and {len(self.ropes)} ropes"
            )
        if self.parallel_branches and not self.input_norms:
            raise ModelError("parallel branches without norms of their inputs are not served")
        if self.activation == "silu" and not self.gated_mlp:
            raise ModelError("an MLP with silu and without a gate is not served")
        if self.experts is not None and self.activation != "silu":
            raise ModelError(f"experts with the activation {self.activation} are not served; they have silu")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} KV heads evenly")

    @property
    def heads(self) -> Heads:
        """Of every layer."""
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim)

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The layers with memory of their own, by window and heads."""
        return cache_groups([(self.heads, window) for window in self.windows])

    @property
    def layer_width(self) -> int:
        """Numbers that a layer computes of a row at most, besides the residual, its norm and a branch.

        Experts also gather rows and results, some of them in fp32. There is room for both.
        """
        width = attention_width(self.heads)
        if self.experts is None or len(self.experts.layers) < self.num_layers:
            width += mlp_width(self.intermediate_size)
        if self.experts is not None:
            width += self.experts.per_token * (mlp_width(self.experts.size) + 6 * self.hidden_size)
        return width


def stacked_rows(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Rows of each part of the weights that may be stacked of several, by their name within a layer."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"qkv": (q, kv, kv), "mlp_in": (config.intermediate_size, config.intermediate_size)}
    return rows | ({} if config.experts is None else {"experts.mlp_in": (config.experts.size, config.experts.size)})


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight. q, k and v are one matrix, and so are the gate and up projections of an MLP."""
    H, D = config.hidden_size, config.head_dim
    q, kv = config.num_heads * D, config.num_kv_heads * D
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, H)}
    if config.learned_positions:
        shapes["positions"] = (config.max_position_embeddings, H)
    if not config.tied_embeddings:
        shapes["lm_head"] = (config.vocab_size, H)
    norms = {"final_norm": H} | ({"embedding_norm": H} if config.embedding_norm else {})
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        for name, (rows, columns), bias in (
            ("qkv", (q + 2 * kv, H), config.qkv_bias),
            ("output", (H, q), config.output_bias),
            *_mlp_linears(config, i),
        ):
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.input_norms:
            norms |= {f"{prefix}input_norm": H, f"{prefix}mlp_norm": H}
        if config.qk_norm is not None:
            sizes = (D, D) if config.qk_norm == "head" else (q, kv)
            norms |= {f"{prefix}q_norm": sizes[0], f"{prefix}k_norm": sizes[1]}
        if config.branch_norms:
            norms |= {f"{prefix}output_norm": H, f"{prefix}mlp_output_norm": H}
    for name, size in norms.items():
        shapes[f"{name}.weight"] = (size,)
        if config.norm == "layer":
            shapes[f"{name}.bias"] = (size,)
    return shapes


def weight_use(config: DecoderConfig, name: str) -> Literal["layers", "experts", "head", "looked_up"]:
    """What a step reads of the weight of that name, as `WeightBytes` has it."""
    if name == ("embedding" if config.tied_embeddings else "lm_head"):
        return "head"
    if name in ("embedding", "positions"):
        return "looked_up"
    return "experts" if ".experts." in name else "layers"


def _mlp_linears(config: DecoderConfig, layer: int) -> list[tuple[str, tuple[int, int], bool]]:
    """Name, shape and whether there is a bias of the linears after the layer's attention."""
    H, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    if experts is None or layer not in experts.layers:
        rows = (2 if config.gated_mlp else 1) * inner
        return [("mlp_in", (rows, H), config.mlp_bias), ("mlp_out", (H, inner), config.mlp_bias)]
    linears = [("router", (experts.count, H), False)]
    for i in range(experts.count):
        linears.append((f"experts.{i}.mlp_in", (2 * experts.size, H), False))
        linears.append((f"experts.{i}.mlp_out", (H, experts.size), False))
    return linears
