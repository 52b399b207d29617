"""One decoder for all families: what differs between them is configuration and the names of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from quire.batch import Batch
from quire.cache.storage import KVCache
from quire.errors import ModelError
from quire.models.embedding import Embedding, PlainEmbedding
from quire.models.experts import Experts, ExpertsConfig, Mlp
from quire.models.linear import Linear, LinearFactory
from quire.models.model import ModelShape
from quire.models.native import NativeLayers
from quire.models.norm import LayerNorm, NoNorm, Norm, RMSNorm
from quire.models.rope import rope_tables
from quire.ops import AttentionPlan, Ops


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelShape):
    """The decoder's sizes and variations, in Quire's own words. The defaults are Llama's."""

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
    def mlp_width(self) -> int:
        """As of every model; experts also gather rows and results, some of them in fp32. There is room for both."""
        if self.experts is None:
            return super().mlp_width
        dense = super().mlp_width if len(self.experts.layers) < self.num_layers else 0
        return dense + self.experts.per_token * (5 * self.experts.size + 6 * self.hidden_size)


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


def _mlp_linears(config: DecoderConfig, layer: int) -> list[tuple[str, tuple[int, int], bool]]:
    """Name, shape and whether there is a bias of the linears behind the layer's attention."""
    H, inner, experts = config.hidden_size, config.intermediate_size, config.experts
    if experts is None or layer not in experts.layers:
        rows = (2 if config.gated_mlp else 1) * inner
        return [("mlp_in", (rows, H), config.mlp_bias), ("mlp_out", (H, inner), config.mlp_bias)]
    linears = [("router", (experts.count, H), False)]
    for i in range(experts.count):
        linears.append((f"experts.{i}.mlp_in", (2 * experts.size, H), False))
        linears.append((f"experts.{i}.mlp_out", (H, experts.size), False))
    return linears


@dataclass(frozen=True)
class Layer:
    """One layer's weights. Where a family lacks a norm, that of an input does nothing, and another is None."""

    input_norm: Norm
    qkv: Linear  # H -> (Hq + 2 Hkv) D
    q_norm: Norm | None
    k_norm: Norm | None
    output: Linear  # Hq D -> H
    output_norm: Norm | None
    mlp_norm: Norm
    mlp: Mlp | Experts
    mlp_output_norm: Norm | None


class Decoder:
    """Token ids to logits through a paged cache."""

    origin = "own decoder"
    rows_keep_bits = True

    @property
    def capturable(self) -> bool:
        """Experts ask the host who chose whom."""
        return self.config.experts is None

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        ops: Ops,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        reproducible: bool = False,
    ) -> None:
        """Take the weights of `weight_shapes` as they are: norms in fp32, the others of one dtype, on one device.

        reproducible: a row's bits do not depend on the others; on a CPU they never do.
        """
        self.config = config
        self.ops = ops
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        make_linear = LinearFactory(reproducible)
        embedding = weights["embedding"]  # [V, H]
        self.dtype, self.device = embedding.dtype, embedding.device
        self.embedding: Embedding
        if config.tied_embeddings:
            self.embedding, self.lm_head = make_linear.tied(embedding)
        else:
            self.embedding = PlainEmbedding(embedding, self.dtype)
            self.lm_head = make_linear.head(weights["lm_head"])
        del embedding  # else it would be held beside its packed form until all layers are read
        self.positions = weights.get("positions")  # [max_position_embeddings, H]
        self.embedding_scale = config.embedding_scale
        if config.embedding_scale is not None and config.rounds_embedding_scale:
            self.embedding_scale = float(torch.tensor(config.embedding_scale, dtype=self.dtype))
        self.embedding_norm = _norm(config, weights, ops, "embedding_norm")
        self.final_norm = _required_norm(config, weights, ops, "final_norm")
        self.layers = [_layer(config, weights, ops, make_linear, f"layers.{i}.") for i in range(config.num_layers)]
        self.alibi_slopes = (
            None if config.alibi_slopes is None else torch.tensor(config.alibi_slopes, device=self.device)
        )  # fp32 [Hq]
        tables = rope_tables(config.ropes, config.head_dim, config.max_position_embeddings, max_model_len, self.device)
        self.rotations = tables or [None] * config.num_layers  # [L], cos and sin: fp32 [max_model_len, D_rot / 2] each
        groups = {layer: g for g, group in enumerate(config.groups) for layer in group.layers}
        self.group_of_layer = [groups[layer] for layer in range(config.num_layers)]
        self.native_layers = NativeLayers(self) if NativeLayers.serves(self) else None

    def forward(
        self, batch: Batch, cache: KVCache, plans: Sequence[AttentionPlan], rows: Tensor | None = None
    ) -> Tensor:
        """Hidden states after the final norm: [T, H]. Writes the batch's K and V to the cache.

        plans: one a cache group, updated for this batch.
        rows: int64 [R], ascending. If given, the result is these rows, [R, H]: the others end with the last attention.
        """
        positions = batch.positions.to(self.device)
        residual = self._embed(batch.token_ids.to(self.device), positions)
        if self.native_layers is not None:
            return self.native_layers(residual, positions, cache, plans, rows)
        hidden = self.layers[0].input_norm(residual)
        norms_after = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for i, (layer, norm_after) in enumerate(zip(self.layers, norms_after, strict=True)):
            attended = self._attention(layer, i, hidden, positions, cache, plans[self.group_of_layer[i]])
            if rows is not None and i == len(self.layers) - 1:
                attended, residual = attended[rows], residual[rows]
            branch = self._ended(layer.output(attended), layer.output_norm)
            if self.config.parallel_branches:
                hidden = layer.mlp_norm(residual)
                residual += branch
            else:
                hidden = layer.mlp_norm.of_sum(branch, residual)
            branch = self._mlp(layer.mlp, hidden)
            hidden = norm_after.of_sum(self._ended(branch, layer.mlp_output_norm), residual)
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [R, H]
    ) -> Tensor:
        """Logits over the vocabulary: fp32 [R, V]."""
        logits = self.lm_head(hidden).float()
        if self.config.logit_scale is not None:
            logits = logits * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        embedded = self.embedding(token_ids)
        if self.embedding_scale is not None:
            embedded = embedded * self.embedding_scale
        if self.positions is not None:
            embedded = embedded + self.positions[positions]
        return embedded if self.embedding_norm is None else self.embedding_norm(embedded)

    def _attention(
        self, layer: Layer, index: int, hidden: Tensor, positions: Tensor, cache: KVCache, plan: AttentionPlan
    ) -> Tensor:
        config, ops, kv = self.config, self.ops, cache.layer(index)
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        packed = layer.qkv(hidden).view(len(hidden), sum(heads), config.head_dim)
        q, k, v = torch.split(packed, heads, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            if config.qk_norm == "all heads":
                q, k = layer.q_norm(q.flatten(1)).view(q.shape), layer.k_norm(k.flatten(1)).view(k.shape)
            else:
                q, k = layer.q_norm(q), layer.k_norm(k)
        if (rotation := self.rotations[index]) is not None:
            ops.rope(q, k, positions, *rotation)
        ops.write_kv(k, v, kv, plan)
        attended = ops.attention(
            q,
            kv,
            plan,
            scale=config.attention_scale,
            alibi_slopes=self.alibi_slopes,
            softcap=config.attention_softcap,
        )
        return attended.flatten(1)

    def _ended(self, branch: Tensor, norm: Norm | None) -> Tensor:
        """The branch as it is added to the residual: [T, H]."""
        if norm is not None:
            branch = norm(branch)
        return branch if self.config.branch_scale is None else branch * self.config.branch_scale

    def _mlp(
        self,
        mlp: Mlp | Experts,
        hidden: Tensor,  # [T, H]
    ) -> Tensor:
        """What a layer adds behind its attention: [T, H]."""
        return mlp(hidden) if isinstance(mlp, Experts) else mlp.mlp_out(self._activate(mlp.mlp_in(hidden)))

    def _activate(
        self,
        x: Tensor,  # [T, 2 I], or [T, I] without a gate
    ) -> Tensor:
        """The MLP's activation: [T, I]."""
        activation = self.config.activation
        if activation == "silu":
            return self.ops.swiglu(x)
        approximate: Literal["none", "tanh"] = "none" if activation == "gelu" else "tanh"
        if not self.config.gated_mlp:
            return self.ops.gelu(x, approximate)
        gate, up = x.chunk(2, dim=-1)
        return self.ops.gelu(gate, approximate) * up


def _norm(config: DecoderConfig, weights: Mapping[str, Tensor], ops: Ops, name: str) -> Norm | None:
    """The norm of that name, if the family has it."""
    return _required_norm(config, weights, ops, name) if f"{name}.weight" in weights else None


def _required_norm(config: DecoderConfig, weights: Mapping[str, Tensor], ops: Ops, name: str) -> Norm:
    if config.norm == "rms":
        return RMSNorm(weights[f"{name}.weight"], config.norm_eps, ops)
    return LayerNorm(weights[f"{name}.weight"], weights[f"{name}.bias"], config.norm_eps, ops)


def _layer(
    config: DecoderConfig, weights: Mapping[str, Tensor], ops: Ops, make_linear: LinearFactory, prefix: str
) -> Layer:
    def linear(name: str) -> Linear:
        return make_linear(weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    def mlp(name: str) -> Mlp:
        return Mlp(linear(f"{name}mlp_in"), linear(f"{name}mlp_out"))

    def mlp_or_experts() -> Mlp | Experts:
        experts = config.experts
        if experts is None or f"{prefix}router.weight" not in weights:
            return mlp("")
        router = make_linear.head(weights[f"{prefix}router.weight"])  # whose logits are as exact as they can be
        mlps = [mlp(f"experts.{i}.") for i in range(experts.count)]
        return Experts(router, mlps, experts.per_token, experts.renormalised, ops)

    def norm(name: str) -> Norm | None:
        return _norm(config, weights, ops, prefix + name)

    return Layer(
        input_norm=norm("input_norm") or NoNorm(),
        qkv=linear("qkv"),
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        output=linear("output"),
        output_norm=norm("output_norm"),
        mlp_norm=norm("mlp_norm") or NoNorm(),
        mlp=mlp_or_experts(),
        mlp_output_norm=norm("mlp_output_norm"),
    )
