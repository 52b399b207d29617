"""Kimi Linear: Kimi delta attention in most layers, latent attention without positions in the others; experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from quire.models.decoder_config import DecoderConfig, ExpertsConfig, LatentConfig, LayerConfig, MlpConfig
from quire.models.families import deepseek
from quire.models.families.glm4_moe import listed_mlps
from quire.models.families.llama import read_sizes
from quire.models.hf_config import ConfigReader
from quire.models.state_config import KeyDecayConfig
from quire.models.weights import Sources

LAYER = {
    "state_in": tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "f_a", "g_a", "b")),
    "state_decay": ("self_attn.f_b_proj",),
    "state_gate": ("self_attn.g_b_proj",),
    "conv": tuple(f"self_attn.{name}_conv1d" for name in "qkv"),
    "": ("self_attn",),  # vectors of the state
    "gate_norm": ("self_attn.o_norm",),
    "state_out": ("self_attn.o_proj",),
    "router": ("block_sparse_moe.gate",),
    "correction": ("block_sparse_moe.gate.e_score_correction_bias",),
    "experts.mlp_in": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "experts.mlp_out": ("block_sparse_moe.experts.{}.w2",),
    "shared.mlp_in": ("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
    "shared.mlp_out": ("block_sparse_moe.shared_experts.down_proj",),
}
DEFAULTS = {"rms_norm_eps": 1e-5, "vocab_size": 163_840, "hidden_size": 2304, "num_attention_heads": 32}


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    named = raw.get("model_max_length") or raw.get("max_position_embeddings") or 2**20
    config = ConfigReader({**DEFAULTS, **raw, "max_position_embeddings": named}, "kimi_linear")
    sizes = read_sizes(config)
    config.only("hidden_act", "silu")
    config.only("tie_word_embeddings", False)  # transformers ties nothing
    config.only("q_lora_rank")
    config.only("mla_use_nope", True)
    config.only("num_nextn_predict_layers", 0)
    for key in ("model_max_length", "head_dim", "qk_head_dim", "auto_map", "rope_theta", "rope_scaling"):
        config.get(key)  # they follow from other keys, or are for rotations, which no layer has
    plain_dim, rope_dim = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    latent = LatentConfig(
        num_heads=sizes.heads["num_heads"],
        latent=config.integer("kv_lora_rank", 512),
        rope_dim=rope_dim,
        plain_dim=plain_dim,
        v_dim=config.integer("v_head_dim", 128),
        q_rank=None,
        rope=None,
        bias=config.flag("attention_bias"),
        scale=(plain_dim + rope_dim) ** -0.5,
    )
    own = ConfigReader(config.mapping("linear_attn_config"), "kimi_linear", place="config.json: linear_attn_config")
    state = KeyDecayConfig(
        num_heads=own.integer("num_heads", config.integer("linear_num_heads", 32)),
        head_dim=(dim := own.integer("head_dim", config.integer("linear_head_dim", 128))),
        taps=own.integer("short_conv_kernel_size", config.integer("linear_conv_kernel_dim", 4)),
        rank=dim,
        floor=0.0,
        norm_eps=sizes.decoder["norm_eps"],
    )
    mixers: dict[str, LatentConfig | KeyDecayConfig] = {"full_attention": latent, "linear_attention": state}
    kinds = config.texts("layer_types", _kinds(own, sizes.num_layers))
    own.finish()
    first = config.count("first_k_dense_replace", 1)
    mlps = listed_mlps(config, sizes.inner, read_experts(config), first, sizes.num_layers)
    both = zip(config.of_layers(mixers, kinds, sizes.num_layers), mlps, strict=True)
    layers = tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in both)
    decoder = DecoderConfig(**sizes.decoder, layers=layers)
    config.finish()
    return decoder


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """Return the kind of each layer, which linear_attn_config lists from 1 on."""
    every = [i + 1 for i in range(1, num_layers) if i % 4 == 0]
    full = config.layers("full_attn_layers", every)
    config.layers("kda_layers", [])
    return ["full_attention" if i + 1 in full else "linear_attention" for i in range(num_layers)]


def read_experts(config: ConfigReader) -> ExpertsConfig:
    """Read the experts of a family that has the names of Kimi Linear."""
    config.only("moe_router_activation_func", "sigmoid")
    config.only("moe_layer_freq", 1)
    config.only("use_grouped_topk", True)
    size, shared = config.integer("moe_intermediate_size", 1024), config.count("num_shared_experts", 1)
    return ExpertsConfig(
        count=config.integer("num_experts", 256),
        per_token=config.integer("num_experts_per_token", 8),
        mlp=MlpConfig(size=size),
        renormalised=config.flag("moe_renormalize", True),
        scores="sigmoid",
        corrected=True,
        groups=config.integer("num_expert_group", 1),
        groups_chosen=config.integer("topk_group", 1),
        factor=config.number("routed_scaling_factor", 2.446),
        shared=MlpConfig(size=size * shared) if shared else None,
    )


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = deepseek.weight_sources(config, names)
    mlp = "block_sparse_moe" if any(".block_sparse_moe.up_proj." in name for name in names) else "mlp"  # transformers
    dense = {"mlp_in": (f"{mlp}.gate_proj", f"{mlp}.up_proj"), "mlp_out": (f"{mlp}.down_proj",)}
    renamed = {"block_sparse_moe.": "mlp.", "self_attn.f_": "self_attn.forget_gate.f_"}
    return replace(theirs, layer={**theirs.layer, **LAYER, **dense}, adapt=partial(_adapt, config), renamed=renamed)


def _adapt(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: a convolution has one weight per channel and tap, and a head one rate."""
    if ".conv." in name:
        return tensor.squeeze(1)
    if name.endswith(".A_log"):
        return tensor.flatten()
    return deepseek.adapted(config, name, part, tensor)
