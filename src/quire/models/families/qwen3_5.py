"""Qwen3.5's text part: the gated delta rule in most layers, gated attention in the others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import Sizes, read_sizes, rope_parameters
from quire.models.families.mtp import own_tensors
from quire.models.hf_config import ConfigReader, reads
from quire.models.state_config import GatedDeltaConfig
from quire.models.weights import Sources

LAYER = {
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "conv": ("linear_attn.conv1d",),
    "": ("linear_attn",),  # vectors of the state
    "gate_norm": ("linear_attn.norm",),
    "state_in": (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    ),
    "state_out": ("linear_attn.out_proj",),
}


@reads("qwen3_5")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_text_sizes(config)
    config.only("hidden_act", "silu")
    config.only("mlp_only_layers", [])
    mlp = MlpConfig(size=sizes.inner)
    layers = tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer in read_mixers(config, sizes))
    return DecoderConfig(**sizes.decoder, layers=layers)


def read_text_sizes(config: ConfigReader, num_kv_heads: int = 4) -> Sizes:
    """Read the sizes that this family shares with Llama, with other defaults."""
    sizes = read_sizes(config, num_kv_heads=num_kv_heads, head_dim=256)
    sizes.decoder["max_position_embeddings"] = config.integer("max_position_embeddings", 32768)
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):  # of layers that predict draft tokens
        config.get(key)
    return sizes


def read_mixers(config: ConfigReader, sizes: Sizes, in_pairs: bool = False) -> list[AttentionConfig | GatedDeltaConfig]:
    """Return the mixer of each layer. in_pairs: as in GatedDeltaConfig."""
    rope = {"partial_rotary_factor": 0.25} | rope_parameters(config)
    config.only("attn_output_gate", True)
    config.only("mamba_ssm_dtype", "float32")  # of the states
    bias = config.flag("attention_bias")
    attention = AttentionConfig(**sizes.heads, rope=rope, bias=bias, output_bias=bias, gated=True, qk_norm="head")
    state = GatedDeltaConfig(
        num_heads=config.integer("linear_num_value_heads", 32),
        num_k_heads=config.integer("linear_num_key_heads", 16),
        dim_k=config.integer("linear_key_head_dim", 128),
        dim_v=config.integer("linear_value_head_dim", 128),
        taps=config.integer("linear_conv_kernel_dim", 4),
        in_pairs=in_pairs,
    )
    every = config.integer("full_attention_interval", 4)
    usual = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(sizes.num_layers)]
    mixers: dict[str, AttentionConfig | GatedDeltaConfig] = {"full_attention": attention, "linear_attention": state}
    return config.of_layers(mixers, config.texts("layer_types", usual), sizes.num_layers)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    return replace(theirs, layer={**theirs.layer, **LAYER}, adapt=partial(adapted, config))


def adapted(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: add 1 to norms, and put all gates of an attention after all queries."""
    if ".conv." in name:
        return tensor.squeeze(1)
    if "gate_norm." in name:
        return tensor
    if "norm." in name:
        return tensor.float() + 1.0
    if ".q_proj." in part:
        by_head = tensor.view(config.attention[0].num_heads, 2, -1, *tensor.shape[1:])
        return by_head.transpose(0, 1).reshape(tensor.shape)
    return tensor


draft_head = own_tensors(weight_sources, adapted)
