"""Granite: Llama with multipliers for the embeddings, the scores, each branch, and the logits."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families.llama import Sizes, read_sizes, weight_sources, whole_rope
from quire.models.hf_config import ConfigReader, reads

__all__ = ["decoder_config", "weight_sources"]


@reads("granite")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config)
    return read_decoder(config, sizes, MlpConfig(size=sizes.inner, bias=config.flag("mlp_bias")))


def read_decoder(config: ConfigReader, sizes: Sizes, mlp: MlpConfig | ExpertsConfig) -> DecoderConfig:
    """Return a decoder in which all layers have attention and this MLP, or these experts."""
    config.only("hidden_act", "silu")
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(
        **sizes.heads,
        rope=whole_rope(config),
        bias=attention_bias,
        output_bias=attention_bias,
        scale=config.number("attention_multiplier", 1.0),
    )
    return DecoderConfig(
        **sizes.decoder,
        layers=(LayerConfig(mixer=attention, mlp=mlp),) * sizes.num_layers,
        branch_scale=config.number("residual_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )
