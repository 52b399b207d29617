"""LFM2: short convolutions between gates in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.llama import Sizes, read_sizes, whole_rope
from quire.models.hf_config import ConfigReader
from quire.models.state_config import ConvolutionConfig
from quire.models.weights import Sources

LAYER = {
    "input_norm": ("operator_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_layernorm",),
    "k_norm": ("self_attn.k_layernorm",),
    "output": ("self_attn.out_proj",),
    "state_in": ("conv.in_proj",),
    "conv": ("conv.conv",),
    "state_out": ("conv.out_proj",),
    "mlp_norm": ("ffn_norm",),
    "mlp_in": ("feed_forward.w1", "feed_forward.w3"),
    "mlp_out": ("feed_forward.w2",),
}
ENDS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm.weight": "model.embedding_norm.weight",
    "lm_head": "lm_head.weight",
}


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    size = raw.get("block_ff_dim")  # the name in older configs, which takes precedence
    raw = {"intermediate_size": 12288, **raw, **({} if size is None else {"intermediate_size": size})}
    config = ConfigReader(raw, "lfm2")
    sizes = read_lfm2_sizes(config)
    config.get("block_ff_dim")
    config.only("use_pos_enc", True)
    size, multiple = sizes.inner, config.integer("block_multiple_of", 256)
    factor = config.number("block_ffn_dim_multiplier", 1.0)
    if config.flag("block_auto_adjust_ff_dim", True):
        size = multiple * -(-int(factor * (2 * size // 3)) // multiple)
    mlp = MlpConfig(size=size)
    attention = config.layers("full_attn_idxs", list(range(sizes.num_layers)))
    usual = ["full_attention" if i in attention else "conv" for i in range(sizes.num_layers)]
    kinds = config.texts("layer_types", usual)
    layers = tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer in read_mixers(config, sizes, kinds))
    decoder = DecoderConfig(**sizes.decoder, layers=layers)
    config.finish()
    return decoder


def read_lfm2_sizes(config: ConfigReader) -> Sizes:
    """Read the sizes that this family shares with Llama, with other defaults and names."""
    sizes = read_sizes(config, num_kv_heads=8, tied=True, norm_eps="norm_eps")
    tied = config.flag("tie_embedding", sizes.decoder["tied_embeddings"])
    decoder = sizes.decoder | {
        "tied_embeddings": tied,
        "norm_eps": config.number("norm_eps", 1e-5),
        "max_position_embeddings": config.integer("max_position_embeddings", 128_000),
    }
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        config.only(key, decoder["hidden_size"])
    for key in ("block_mlp_init_scale", "block_out_init_scale"):
        config.get(key)  # for training
    config.only("block_use_swiglu", True)
    config.only("block_use_xavier_init", True)
    config.only("conv_use_xavier_init", True)
    config.only("block_norm_eps", decoder["norm_eps"])
    config.only("num_heads", sizes.heads["num_heads"])
    return sizes._replace(decoder=decoder)


def read_mixers(config: ConfigReader, sizes: Sizes, kinds: list[str]) -> list[AttentionConfig | ConvolutionConfig]:
    """Return the mixer of each layer, by its kind."""
    bias = config.flag("conv_bias")
    rope = {"rope_theta": config.number("theta", 1_000_000.0)} | whole_rope(config)
    mixers: dict[str, AttentionConfig | ConvolutionConfig] = {
        "full_attention": AttentionConfig(**sizes.heads, rope=rope, qk_norm="head"),
        "conv": ConvolutionConfig(
            width=sizes.decoder["hidden_size"],
            taps=config.integer("conv_L_cache", 3),
            bias=bias,
            conv_bias=bias,
        ),
    }
    return config.of_layers(mixers, kinds, sizes.num_layers)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    return Sources(ENDS, "model.layers.{}.", LAYER, adapt=adapted)


def adapted(name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: a convolution has one weight per channel and tap."""
    return tensor.squeeze(1) if part.endswith("conv.conv.weight") else tensor
