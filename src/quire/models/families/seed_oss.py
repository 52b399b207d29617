"""Seed-OSS: Llama with biases of q, k and v, and optionally of other projections."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.llama import read_sizes, weight_sources, whole_rope
from quire.models.hf_config import ConfigReader, reads

__all__ = ["decoder_config", "weight_sources"]


@reads("seed_oss", max_position_embeddings=524_288)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=8, head_dim=128), whole_rope(config)
    config.only("hidden_act", "silu")
    config.get("residual_dropout")  # training
    attention = AttentionConfig(
        **sizes.heads,
        rope=rope,
        bias=config.flag("attention_bias", True),
        output_bias=config.flag("attention_out_bias"),
    )
    layer = LayerConfig(mixer=attention, mlp=MlpConfig(size=sizes.inner, bias=config.flag("mlp_bias")))
    return DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers)
