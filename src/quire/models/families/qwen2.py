"""Qwen2: Llama with biases on q, k and v, and with optional windows in its upper layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, layers_with
from quire.models.families.llama import read_sizes, weight_sources, whole_rope
from quire.models.hf_config import ConfigReader

__all__ = ["decoder_config", "weight_sources"]

DEFAULTS = {"max_position_embeddings": 32_768}


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    config = ConfigReader({**DEFAULTS, **raw}, "qwen2")
    sizes, rope = read_sizes(config, num_kv_heads=32), whole_rope(config)
    config.only("hidden_act", "silu")
    config.only("use_mrope", False)
    attention, ropes = AttentionConfig(**sizes.heads, bias=True), (rope,) * sizes.num_layers
    layers = layers_with(attention, MlpConfig(size=sizes.inner), windows(config, sizes.num_layers), ropes)
    decoder = DecoderConfig(**sizes.decoder, layers=layers)
    config.finish()
    return decoder


def windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: by `layer_types` or `max_window_layers`, and only with `use_sliding_window`."""
    window = config.window("sliding_window", 4096)
    if not config.flag("use_sliding_window"):
        window = None
    first = config.count("max_window_layers", 28)
    older = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    return config.windows(config.texts("layer_types", older), window, num_layers)
