"""Falcon-H1: Mamba-2 and attention read the same input in each layer, and their results are added and then an MLP's.

The decoder has two layers for each of them: the first is the state space, the second has the rest.
"""

from __future__ import annotations

from dataclasses import replace

from quire.errors import ModelError
from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import bamba
from quire.models.families.bamba import read_limits
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, is_number, reads
from quire.models.state_config import StateSpaceConfig
from quire.models.weights import Sources


@reads("falcon_h1", max_position_embeddings=8192, rms_norm_eps=1e-5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=8), whole_rope(config)
    config.only("hidden_act", "silu")
    config.only("mamba_use_mlp", True)
    config.only("attn_layer_indices")  # all layers have attention
    for key in ("num_logits_to_keep", "mlp_expansion_factor", "auto_map"):
        config.get(key)
    bias, scale_in = config.flag("attention_bias"), config.number("attention_in_multiplier", 1.0)
    if bias and scale_in != 1.0:
        raise config.error("attention_in_multiplier", "1.0 with attention_bias", scale_in)
    attention = AttentionConfig(
        **sizes.heads,
        rope=rope,
        bias=bias,
        output_bias=bias,
        scale=sizes.heads["head_dim"] ** -0.5 * config.number("key_multiplier", 1.0) * scale_in**2,
    )
    gate, down = _numbers(config, "mlp_multipliers", 2)
    mlp = MlpConfig(size=sizes.inner, bias=config.flag("mlp_bias"), gate_scale=gate)
    state = LayerConfig(
        mixer=_state(config, sizes.decoder["hidden_size"]),
        mlp=None,
        mixer_scales=(1.0, config.number("ssm_out_multiplier", 1.0)),
    )
    rest = LayerConfig(
        mixer=attention,
        mlp=mlp,
        joined=True,
        mixer_scales=(1.0, config.number("attention_out_multiplier", 1.0) * scale_in),
        mlp_scales=(1.0, down),
    )
    return DecoderConfig(
        **sizes.decoder,
        layers=(state, rest) * sizes.num_layers,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )


def _state(config: ConfigReader, hidden_size: int) -> StateSpaceConfig:
    inner = config.integer("mamba_expand", 2) * hidden_size
    if not config.is_null("mamba_d_ssm"):
        inner = config.integer("mamba_d_ssm", 1024)
    num_heads, groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    if inner % num_heads:
        raise ModelError(f"config.json: mamba_n_heads is {num_heads}, which does not divide the {inner} inner channels")
    config.only("mamba_d_head", "auto", inner // num_heads)
    config.get("mamba_chunk_size")  # for a kernel
    bias, scale_in = config.flag("mamba_proj_bias"), config.number("ssm_in_multiplier", 1.0)
    config.only("projectors_bias", bias)
    if bias and scale_in != 1.0:
        raise config.error("ssm_in_multiplier", "1.0 with mamba_proj_bias", scale_in)
    first = config.flag("mamba_norm_before_gate", True)
    return StateSpaceConfig(
        num_heads=num_heads,
        num_groups=groups,
        head_dim=inner // num_heads,
        state_dim=config.integer("mamba_d_state", 256),
        taps=config.integer("mamba_d_conv", 4),
        bias=bias,
        conv_bias=config.flag("mamba_conv_bias", True),
        dt_limits=read_limits(config),
        norm_groups=groups if config.flag("mamba_rms_norm") else 0,
        first="norm" if first else "gate",
        in_scales=tuple(scale_in * factor for factor in _numbers(config, "ssm_multipliers", 5)),
    )


def _numbers(config: ConfigReader, key: str, count: int) -> list[float]:
    """Return that count of factors, by default ones."""
    numbers = config.get(key, [1.0] * count)
    if not isinstance(numbers, list) or len(numbers) != count or not all(map(is_number, numbers)):
        raise config.error(key, f"{count} positive numbers", numbers)
    return [float(number) for number in numbers]


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    return replace(bamba.weight_sources(config, names), numbers=[i // 2 for i in range(config.num_layers)])
