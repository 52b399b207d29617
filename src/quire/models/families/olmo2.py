"""OLMo 2: Llama with a norm after each branch, not before it; all heads of q, and of k, are normalised together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader
from quire.models.weights import Sources

DEFAULTS = {"rms_norm_eps": 1e-5}
LAYER = {
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "output_norm": ("post_attention_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    config = ConfigReader({**DEFAULTS, **raw}, "olmo2")
    sizes, rope = read_sizes(config), whole_rope(config)
    config.only("hidden_act", "silu")
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(
        **sizes.heads, rope=rope, qk_norm="all heads", bias=attention_bias, output_bias=attention_bias
    )
    layer = LayerConfig(mixer=attention, mlp=MlpConfig(size=sizes.inner))
    decoder = DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers, input_norms=False, branch_norms=True)
    config.finish()
    return decoder


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    return replace(theirs, layer={**theirs.layer, **LAYER})
