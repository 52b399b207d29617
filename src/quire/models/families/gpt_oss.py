"""gpt-oss: sinks in the softmax, windows in every other layer, experts with biases and a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, MlpConfig, layers_with
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader
from quire.models.weights import Sources
from quire.ops.activation import Activation

DEFAULTS = {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
ROPE |= {"original_max_position_embeddings": 4096}  # the default
LAYER = {"sinks": ("self_attn.sinks",), "router": ("mlp.router",)}
JOINED = {
    # One tensor has the weights of all experts.
    "experts.mlp_in.weight": ("mlp.experts.gate_up_proj[{}]",),
    "experts.mlp_in.bias": ("mlp.experts.gate_up_proj_bias[{}]",),
    "experts.mlp_out.weight": ("mlp.experts.down_proj[{}]",),
    "experts.mlp_out.bias": ("mlp.experts.down_proj_bias[{}]",),
}
APART = {  # in GGUF files
    "experts.mlp_in": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "experts.mlp_out": ("mlp.experts.{}.down_proj",),
}


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    scaled = any(raw.get(key) for key in ("rope_scaling", "rope_parameters"))
    config = ConfigReader({**DEFAULTS, **raw, **({} if scaled else {"rope_scaling": ROPE})}, "gpt_oss")
    sizes, rope = read_sizes(config, num_kv_heads=8, head_dim=64), {"rope_theta": 150_000.0} | whole_rope(config)
    config.only("hidden_act", "silu")
    config.only("initial_context_length", rope.get("original_max_position_embeddings"))  # repeats this value
    for key in ("router_aux_loss_coef", "experts_per_token"):  # for training; repeats num_experts_per_tok
        config.get(key)
    activation = Activation(
        "silu",
        slope=config.number("swiglu_alpha", 1.702),
        limit=config.number("swiglu_limit", 7.0),
        offset=1.0,
    )
    experts = ExpertsConfig(
        count=config.integer("num_local_experts", 128),
        per_token=config.integer("num_experts_per_tok", 4),
        mlp=MlpConfig(size=sizes.inner, activation=activation, bias=True),
        renormalised=True,
        router_bias=True,
    )
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(sizes.num_layers)]
    window = config.window("sliding_window", 128)
    windows = config.windows(config.texts("layer_types", alternating), window, sizes.num_layers)
    bias = config.flag("attention_bias", True)
    attention = AttentionConfig(**sizes.heads, bias=bias, output_bias=bias, sinks=True)
    layers = layers_with(attention, experts, windows, (rope,) * sizes.num_layers)
    decoder = DecoderConfig(**sizes.decoder, layers=layers)
    config.finish()
    return decoder


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    if any("experts.0.gate_proj." in name for name in names):
        return replace(theirs, layer={**theirs.layer, **LAYER, **APART})
    return replace(theirs, layer={**theirs.layer, **LAYER, **JOINED}, adapt=_adapt)


def _adapt(name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert experts' weights from [in, out], and separate their gates and ups, which alternate."""
    if ".experts." not in name:
        return tensor
    ours = tensor.T if tensor.dim() == 2 else tensor
    return torch.cat([ours[::2], ours[1::2]]) if ".mlp_in." in name else ours
