"""LFM3: LFM2 with windows and gates of heads in its attention, and a norm after each branch, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.lfm2 import ENDS, adapted
from quire.models.families.lfm2 import LAYER as LFM2_LAYER
from quire.models.families.llama import check_whole_heads, read_sizes
from quire.models.hf_config import ConfigReader, reads
from quire.models.rope import check_rope
from quire.models.state_config import ConvolutionConfig
from quire.models.weights import Sources

LAYER = LFM2_LAYER | {
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "output": ("self_attn.o_proj",),
    "output_norm": ("post_operator_norm",),
    "mlp_output_norm": ("post_ffn_norm",),
}
ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}  # the default


@reads("lfm3", norm_eps=1e-5, max_position_embeddings=128_000)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, num_kv_heads=4, head_dim=128, tied=True, norm_eps="norm_eps")
    bias, conv_bias = config.flag("attention_bias"), config.flag("conv_bias")
    gated, window, ropes = config.flag("use_attention_gate", True), config.window("sliding_window", 256), _ropes(config)
    mixers: dict[str, AttentionConfig | ConvolutionConfig] = {
        "conv": ConvolutionConfig(
            width=sizes.decoder["hidden_size"],
            taps=config.integer("conv_L_cache", 7),
            bias=conv_bias,
            conv_bias=conv_bias,
        )
    }
    for kind, own in (("full_attention", None), ("sliding_attention", window)):
        mixers[kind] = AttentionConfig(
            **sizes.heads, window=own, rope=ropes[kind], bias=bias, output_bias=bias, qk_norm="head", head_gated=gated
        )
    usual = [
        "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i else "conv"
        for i in range(sizes.num_layers)
    ]
    kinds = config.of_layers(mixers, config.texts("layer_types", usual), sizes.num_layers)
    mlp = MlpConfig(size=sizes.inner)
    layers = tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer in kinds)
    return DecoderConfig(**sizes.decoder, layers=layers, branch_norms=config.flag("use_sandwich_norm", True))


def _ropes(config: ConfigReader) -> Mapping[str, Mapping[str, Any]]:
    """Return the RoPE parameters of each kind of attention."""
    given = config.mapping("rope_parameters") or ROPES
    if not given.keys() <= ROPES.keys() or not all(isinstance(rope, dict) for rope in given.values()):
        wanted = f"an object for each of {', '.join(ROPES)}"
        raise config.error("rope_parameters", wanted, given)
    for rope in given.values():
        check_rope(rope)
        check_whole_heads(config, rope)
    return ROPES | given


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    layer = dict(LAYER)
    if any(mixer.head_gated for mixer in config.attention if isinstance(mixer, AttentionConfig)):
        gate = "gate_proj" if any(name.endswith(".self_attn.gate_proj.weight") for name in names) else "g_proj"
        layer["qkv"] = (*LAYER["qkv"], f"self_attn.{gate}")
    renamed = {"self_attn.gate_proj": "self_attn.g_proj"}
    return Sources(ENDS, "model.layers.{}.", layer, adapt=adapted, renamed=renamed)
