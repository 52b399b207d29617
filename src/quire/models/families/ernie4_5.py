"""ERNIE 4.5: Llama with a RoPE of neighbouring pairs, and biases everywhere or nowhere."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.families.pairs import pairs_apart
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources

DEFAULTS = {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
THETA = {"rope_theta": 500_000.0}  # the default


@reads("ernie4_5", **DEFAULTS)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, num_kv_heads=2, head_dim=128, tied=True)
    config.only("hidden_act", "silu")
    bias = config.flag("use_bias")
    attention = AttentionConfig(**sizes.heads, rope=THETA | whole_rope(config), bias=bias, output_bias=bias)
    layer = LayerConfig(mixer=attention, mlp=MlpConfig(size=sizes.inner, bias=bias))
    return DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    return replace(llama.weight_sources(config, names), adapt=partial(pairs_apart, config))
