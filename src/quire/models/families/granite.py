"""Granite: Llama with a multiplier for the embeddings, the scores, what each branch adds, and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.llama import read_sizes, weight_sources, whole_rope
from quire.models.hf_config import ConfigReader

__all__ = ["decoder_config", "weight_sources"]


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes. Raises ModelError for a key or value that is not understood."""
    config = ConfigReader(raw, "granite")
    sizes, rope = read_sizes(config), whole_rope(config)
    config.only("hidden_act", "silu")
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(
        **sizes.heads,
        rope=rope,
        bias=attention_bias,
        output_bias=attention_bias,
        scale=config.number("attention_multiplier", 1.0),
    )
    layer = LayerConfig(mixer=attention, mlp=MlpConfig(size=sizes.inner, bias=config.flag("mlp_bias")))
    decoder = DecoderConfig(
        **sizes.decoder,
        layers=(layer,) * sizes.num_layers,
        branch_scale=config.number("residual_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )
    config.finish()
    return decoder
