"""Bamba: Mamba-2 in most layers, attention in a few."""

from __future__ import annotations

import math

from torch import Tensor

from quire.errors import ModelError
from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.llama import ENDS, read_sizes, rope_parameters
from quire.models.hf_config import ConfigReader, is_number, reads
from quire.models.state_config import StateSpaceConfig
from quire.models.weights import Sources

MIXER = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "state_in": ("mamba.in_proj",),
    "conv": ("mamba.conv1d",),
    "": ("mamba",),  # vectors of the state
    "gate_norm": ("mamba.norm",),
    "state_out": ("mamba.out_proj",),
}
LAYER = MIXER | {
    "input_norm": ("input_layernorm",),
    "mlp_norm": ("pre_ff_layernorm",),
    "mlp_in": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp_out": ("feed_forward.down_proj",),
}


@reads("bamba")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, num_kv_heads=8)
    sizes.decoder["norm_eps"] = config.number("rms_norm_eps", 1e-5)
    sizes.decoder["max_position_embeddings"] = config.integer("max_position_embeddings", 262_144)
    config.only("hidden_act", "silu")
    for key in ("num_logits_to_keep", "z_loss_coefficient"):
        config.get(key)
    # transformers' code of Bamba always rotates half of each head.
    rope = rope_parameters(config, share_key="attn_rotary_share") | {"partial_rotary_factor": 0.5}
    config.only("attn_rotary_emb", sizes.heads["head_dim"] // 2)
    config.only("partial_rotary_factor", 0.5)
    bias = config.flag("attention_bias")
    attention = AttentionConfig(**sizes.heads, rope=rope, bias=bias, output_bias=bias)
    indices = config.layers("attn_layer_indices", [])
    state = read_state_space(config, sizes.decoder["hidden_size"])
    mlp = MlpConfig(size=sizes.inner, bias=config.flag("mlp_bias"))
    mixers = [attention if i in indices else state for i in range(sizes.num_layers)]
    return DecoderConfig(**sizes.decoder, layers=tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer in mixers))


def read_state_space(config: ConfigReader, hidden_size: int) -> StateSpaceConfig:
    """Read Mamba-2's sizes under the names that Bamba and Granite use."""
    num_heads, num_groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    width = config.integer("mamba_expand", 2) * hidden_size
    config.only("mamba_d_head", "auto", width // num_heads)
    config.get("mamba_chunk_size")  # for a kernel
    if width % num_heads:
        raise ModelError(f"config.json: mamba_n_heads is {num_heads}, which does not divide the {width} inner channels")
    return StateSpaceConfig(
        num_heads=num_heads,
        num_groups=num_groups,
        head_dim=width // num_heads,
        state_dim=config.integer("mamba_d_state", 256),
        taps=config.integer("mamba_d_conv", 4),
        bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias", True),
        dt_limits=read_limits(config),
        norm_groups=num_groups,
    )


def read_limits(config: ConfigReader) -> tuple[float, float]:
    """Return the limits of dt."""
    limits = config.get("time_step_limit", [0.0, float("inf")])
    if not isinstance(limits, list) or len(limits) != 2 or not all(_is_limit(x) for x in limits):
        raise config.error("time_step_limit", "two numbers from 0 on", limits)
    for key in ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank"):
        config.get(key)  # for the initial weights
    return float(limits[0]), float(limits[1])


def _is_limit(value: object) -> bool:
    return is_number(value) or (type(value) in (int, float) and value in (0, math.inf))


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    ends = {**ENDS, "final_norm.weight": "model.final_layernorm.weight"}
    return Sources(ends, "model.layers.{}.", LAYER, adapt=adapted)


def adapted(name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: a convolution has one weight per channel and tap."""
    return tensor.squeeze(1) if ".conv." in name and tensor.dim() == 3 else tensor
