"""Qwen3: Llama with normalised q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, layers_with
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.families.qwen2 import windows
from quire.models.hf_config import ConfigReader
from quire.models.weights import Sources

DEFAULTS = {"max_position_embeddings": 32_768}


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    config = ConfigReader({**DEFAULTS, **raw}, "qwen3")
    sizes, rope = read_sizes(config, num_kv_heads=32, head_dim=128), whole_rope(config)
    config.only("hidden_act", "silu")
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(**sizes.heads, qk_norm="head", bias=attention_bias, output_bias=attention_bias)
    ropes = (rope,) * sizes.num_layers
    layers = layers_with(attention, MlpConfig(size=sizes.inner), windows(config, sizes.num_layers), ropes)
    decoder = DecoderConfig(**sizes.decoder, layers=layers)
    config.finish()
    return decoder


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    return replace(theirs, layer={**theirs.layer, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)})
