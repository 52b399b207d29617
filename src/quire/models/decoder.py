"""One decoder for all families: what differs between them is configuration and the names of weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.batch import Batch
from quire.cache.manager import CacheGroup
from quire.cache.storage import KVCache
from quire.models.linear import Linear
from quire.models.rope import rope_table
from quire.ops import AttentionPlan, Ops


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The decoder's sizes and variations, in Quire's own words."""

    vocab_size: int  # V
    hidden_size: int  # H
    intermediate_size: int  # I, of the gated MLP
    num_layers: int  # L
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    norm_eps: float
    rope: Mapping[str, Any]  # the checkpoint's rope parameters, see rope.py
    max_position_embeddings: int
    tied_embeddings: bool  # the output projection is the embedding
    qkv_bias: bool
    output_bias: bool  # of attention's output projection
    mlp_bias: bool
    windows: tuple[int | None, ...]  # [L], keys that a row of the layer sees; None: all before it

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The layers by window, in order of first appearance."""
        return tuple(
            CacheGroup(tuple(i for i, w in enumerate(self.windows) if w == window), window)
            for window in dict.fromkeys(self.windows)
        )


def stacked_rows(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Rows of each part of the weights that are stacked of several."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {"qkv": (q, kv, kv), "gate_up": (config.intermediate_size, config.intermediate_size)}


def weight_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight. q, k and v are one matrix, and so are the MLP's gate and up projections."""
    H, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (config.vocab_size, H), "final_norm": (H,)}
    if not config.tied_embeddings:
        shapes["lm_head"] = (config.vocab_size, H)
    for i in range(config.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "input_norm": (H,),
            "qkv.weight": (q + 2 * kv, H),
            "output.weight": (H, q),
            "mlp_norm": (H,),
            "gate_up.weight": (2 * inner, H),
            "down.weight": (H, inner),
        }
        if config.qkv_bias:
            layer["qkv.bias"] = (q + 2 * kv,)
        if config.output_bias:
            layer["output.bias"] = (H,)
        if config.mlp_bias:
            layer["gate_up.bias"] = (2 * inner,)
            layer["down.bias"] = (H,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


@dataclass(frozen=True)
class Layer:
    """One layer's weights."""

    input_norm: Tensor  # [H]
    qkv: Linear  # H -> (Hq + 2 Hkv) D
    output: Linear  # Hq D -> H
    mlp_norm: Tensor  # [H]
    gate_up: Linear  # H -> 2 I
    down: Linear  # I -> H


class Decoder:
    """Token ids to logits through a paged cache."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        ops: Ops,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Take the weights of `weight_shapes`, all of one dtype and on one device, as they are."""
        self.config = config
        self.ops = ops
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.embedding = weights["embedding"]  # [V, H]
        self.lm_head = Linear(weights["embedding" if config.tied_embeddings else "lm_head"])
        self.final_norm = weights["final_norm"]  # [H]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        table = rope_table(config.rope, config.head_dim, config.max_position_embeddings, max_model_len)
        self.cos, self.sin = (part.to(self.device) for part in table)  # fp32 [max_model_len, D / 2]
        self.layers = [_layer(weights, f"layers.{i}.") for i in range(config.num_layers)]
        self._group_of_layer = {layer: g for g, group in enumerate(config.groups) for layer in group.layers}

    def forward(self, batch: Batch, cache: KVCache, plans: Sequence[AttentionPlan]) -> Tensor:
        """Hidden states after the final norm: [T, H]. Writes the batch's K and V to the cache.

        plans: one a cache group, updated for this batch.
        """
        config, ops = self.config, self.ops
        positions = batch.positions.to(self.device)
        num_tokens = len(positions)
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        residual = self.embedding[batch.token_ids.to(self.device)]
        hidden = ops.rms_norm(residual, self.layers[0].input_norm, config.norm_eps)
        norms_after = [*(layer.input_norm for layer in self.layers[1:]), self.final_norm]
        for i, (layer, norm_after) in enumerate(zip(self.layers, norms_after, strict=True)):
            kv, plan = cache.layer(i), plans[self._group_of_layer[i]]
            q, k, v = torch.split(layer.qkv(hidden).view(num_tokens, sum(heads), config.head_dim), heads, dim=1)
            ops.rope(q, k, positions, self.cos, self.sin)
            ops.write_kv(k, v, kv, plan)
            attended = ops.attention(q, kv, plan)
            hidden = ops.add_rms_norm(layer.output(attended.flatten(1)), residual, layer.mlp_norm, config.norm_eps)
            mlp = layer.down(ops.swiglu(layer.gate_up(hidden)))
            hidden = ops.add_rms_norm(mlp, residual, norm_after, config.norm_eps)
        return hidden

    def logits(
        self,
        hidden: Tensor,  # [R, H]
    ) -> Tensor:
        """Logits over the vocabulary: fp32 [R, V]."""
        return self.lm_head(hidden).float()


def _layer(weights: Mapping[str, Tensor], prefix: str) -> Layer:
    def linear(name: str) -> Linear:
        return Linear(weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    return Layer(
        input_norm=weights[f"{prefix}input_norm"],
        qkv=linear("qkv"),
        output=linear("output"),
        mlp_norm=weights[f"{prefix}mlp_norm"],
        gate_up=linear("gate_up"),
        down=linear("down"),
    )
