"""Granite: Llama with a multiplier for the embeddings, the scores, what each branch adds, and the logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.decoder_config import DecoderConfig
from quire.models.families.llama import common_fields, weight_sources
from quire.models.hf_config import ConfigReader

__all__ = ["decoder_config", "weight_sources"]


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes. Raises ModelError for a key or value that is not understood."""
    config = ConfigReader(raw, "granite")
    sizes = common_fields(config)
    config.only("hidden_act", "silu")
    attention_bias = config.flag("attention_bias")
    decoder = DecoderConfig(
        **sizes,
        windows=(None,) * sizes["num_layers"],
        branch_scale=config.number("residual_multiplier", 1.0),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )
    config.finish()
    return decoder
