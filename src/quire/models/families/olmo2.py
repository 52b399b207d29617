"""OLMo 2: Llama with a norm after each branch, not before it; all heads of q, and of k, are normalised together."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, reads

LAYER = {
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "output_norm": ("post_attention_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}


@reads("olmo2", rms_norm_eps=1e-5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config), whole_rope(config)
    config.only("hidden_act", "silu")
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(
        **sizes.heads, rope=rope, qk_norm="all heads", bias=attention_bias, output_bias=attention_bias
    )
    layer = LayerConfig(mixer=attention, mlp=MlpConfig(size=sizes.inner))
    return DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers, input_norms=False, branch_norms=True)


weight_sources = llama.sources_with(llama.weight_sources, LAYER)
