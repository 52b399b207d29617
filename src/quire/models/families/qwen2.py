"""Qwen2: Llama with biases on q, k and v, and with optional windows in its upper layers."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, layers_with
from quire.models.families.llama import read_sizes, weight_sources, whole_rope
from quire.models.hf_config import ConfigReader, reads

__all__ = ["decoder_config", "weight_sources"]


@reads("qwen2", max_position_embeddings=32_768)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=32), whole_rope(config)
    config.only("hidden_act", "silu")
    config.only("use_mrope", False)
    attention, ropes = AttentionConfig(**sizes.heads, bias=True), (rope,) * sizes.num_layers
    layers = layers_with(attention, MlpConfig(size=sizes.inner), windows(config, sizes.num_layers), ropes)
    return DecoderConfig(**sizes.decoder, layers=layers)


def windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: by `layer_types` or `max_window_layers`, and only with `use_sliding_window`."""
    window = config.window("sliding_window", 4096)
    if not config.flag("use_sliding_window"):
        window = None
    first = config.count("max_window_layers", 28)
    older = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    return config.windows(config.texts("layer_types", older), window, num_layers)
