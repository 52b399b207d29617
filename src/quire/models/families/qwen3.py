"""Qwen3: Llama with normalised q and k."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, layers_with
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.families.qwen2 import windows
from quire.models.hf_config import ConfigReader, reads


@reads("qwen3", max_position_embeddings=32_768)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=32, head_dim=128), whole_rope(config)
    config.only("hidden_act", "silu")
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(**sizes.heads, qk_norm="head", bias=attention_bias, output_bias=attention_bias)
    ropes = (rope,) * sizes.num_layers
    layers = layers_with(attention, MlpConfig(size=sizes.inner), windows(config, sizes.num_layers), ropes)
    return DecoderConfig(**sizes.decoder, layers=layers)


weight_sources = llama.sources_with(llama.weight_sources, llama.HEAD_NORMS)
