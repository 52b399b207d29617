"""GLM-4: Llama with a RoPE of neighbouring pairs of a part of each head; GLM-4-0414 also has norms after branches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import read_sizes, rope_parameters
from quire.models.families.pairs import pairs_apart
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources

LAYER = {"mlp_in": ("mlp.gate_up_proj",)}
BRANCH_NORMS = {"output_norm": ("post_self_attn_layernorm",), "mlp_output_norm": ("post_mlp_layernorm",)}


@reads("glm4", max_position_embeddings=131_072, rms_norm_eps=1.5625e-07, partial_rotary_factor=0.5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=2, head_dim=128), rope_parameters(config)
    config.only("hidden_act", "silu")
    attention = AttentionConfig(**sizes.heads, rope=rope, bias=config.flag("attention_bias", True))
    layer = LayerConfig(mixer=attention, mlp=MlpConfig(size=sizes.inner))
    branch_norms = "Glm4ForCausalLM" in config.texts("architectures")
    return DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers, branch_norms=branch_norms)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    norms = BRANCH_NORMS if config.branch_norms else {}
    return replace(theirs, layer={**theirs.layer, **LAYER, **norms}, adapt=partial(pairs_apart, config))
