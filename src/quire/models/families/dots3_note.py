"""dots.note: latent attention whose heads are gated, sparse in some layers and to a window of keys in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.models.decoder_config import DecoderConfig, IndexConfig, LatentConfig, LayerConfig, MlpConfig
from quire.models.families import deepseek
from quire.models.families.glm4_moe import listed_mlps, sigmoid_experts
from quire.models.families.llama import read_sizes
from quire.models.hf_config import ConfigReader
from quire.models.rope import check_rope
from quire.models.weights import Sources

KINDS = ("indexed_attention", "sliding_attention")
DEFAULTS = {
    "vocab_size": 152_064, "hidden_size": 5120, "intermediate_size": 13_824, "num_hidden_layers": 46,
    "num_attention_heads": 128, "max_position_embeddings": 2**19, "rms_norm_eps": 1e-5, "n_routed_experts": 256,
    "moe_intermediate_size": 1536, "q_lora_rank": 1024,
}  # fmt: skip
OWN = (
    "head_dim kv_lora_rank num_attention_heads num_key_value_heads q_lora_rank qk_nope_head_dim qk_rope_head_dim "
    "v_head_dim"
).split()  # sizes that per_layer_config may have


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    config = ConfigReader({**DEFAULTS, **raw}, "dots3_note")
    sizes, ropes = read_sizes(config), config.mapping("rope_parameters")
    count = sizes.num_layers
    config.only("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias"):
        config.only(key, False)
    for key in OWN:
        config.get(key)
    if not ropes.keys() >= {*KINDS} or not all(isinstance(rope, dict) for rope in ropes.values()):
        raise config.error("rope_parameters", f"an object for each of {', '.join(KINDS)}", ropes)
    kinds = config.of_layers({kind: kind for kind in KINDS}, config.texts("layer_types"), count)
    index = IndexConfig(
        num_heads=config.integer("index_n_heads", 64),
        head_dim=config.integer("index_head_dim", 128),
        top_k=config.integer("index_topk", 2048),
        interleaved=True,
    )
    window, given = config.integer("sliding_window", 512), config.mapping("per_layer_config")
    own = {int(layer): values for layer, values in given.items() if str(layer).isdecimal() and isinstance(values, dict)}
    mixers = []
    for i, kind in enumerate(kinds):
        layer = ConfigReader({**{key: config.get(key) for key in OWN}, **own.get(i, {})}, "dots3_note")
        sparse = kind == "indexed_attention"
        rope = {**ropes[kind]}
        rope.pop("partial_rotary_factor", None)  # it follows from the sizes
        check_rope(rope)
        mixer = _attention(layer, rope, sizes.decoder["norm_eps"])
        mixers.append(replace(mixer, index=index) if sparse else replace(mixer, window=window))
    size, shared = config.integer("shared_experts_intermediate_size", 1536), config.integer("n_shared_experts", 1)
    experts = replace(sigmoid_experts(config), shared=MlpConfig(size=size * shared))
    mlps = listed_mlps(config, sizes.inner, experts, 1, count)
    layers = tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True))
    decoder = DecoderConfig(**sizes.decoder, layers=layers)
    config.finish()
    return decoder


def _attention(config: ConfigReader, rope: Mapping[str, Any], eps: float) -> LatentConfig:
    """Return a layer's attention but for its keys. config: the sizes of this layer. eps: of its norms."""
    plain_dim, rope_dim = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    mixer = LatentConfig(
        num_heads=config.integer("num_attention_heads"),
        latent=config.integer("kv_lora_rank", 512),
        rope_dim=rope_dim,
        plain_dim=plain_dim,
        v_dim=config.integer("v_head_dim", 128),
        q_rank=config.integer("q_lora_rank"),
        rope=rope,
        bias=False,
        scale=(plain_dim + rope_dim) ** -0.5,
        head_gated=True,
        norm_eps=eps,
        rope_norm=True,
    )
    for key in OWN:
        config.get(key)
    config.finish()
    return mixer


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = deepseek.weight_sources(config, names)
    layer = {**theirs.layer, "rope_norm": ("self_attn.k_rope_only_layernorm",)}
    return replace(theirs, layer=layer, adapt=partial(_adapt, config))


def _adapt(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: the weights of the two norms include the factors of their rows."""
    mixer = config.layers[int(name.split(".")[1])].mixer if name.startswith("layers.") else None
    if isinstance(mixer, LatentConfig) and name.endswith((".q_norm.weight", ".latent_norm.weight")):
        factor: float = (config.hidden_size / len(tensor)) ** 0.5
        return tensor.float() * factor
    if name.endswith(".rope_norm.weight"):
        return torch.cat([tensor[::2], tensor[1::2]])
    return deepseek.adapted(config, name, part, tensor)
