"""Mixtral: Mistral with experts in place of every MLP."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, reads

LAYER = {
    "router": ("block_sparse_moe.gate",),
    "experts.mlp_in": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "experts.mlp_out": ("block_sparse_moe.experts.{}.w2",),
}


@reads("mixtral", max_position_embeddings=4096 * 32, rms_norm_eps=1e-5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=8), {"rope_theta": 1e6} | whole_rope(config)
    config.only("hidden_act", "silu")
    for key in ("router_aux_loss_coef", "router_jitter_noise"):  # for training
        config.get(key)
    experts = ExpertsConfig(
        count=config.integer("num_local_experts", 8),
        per_token=config.integer("num_experts_per_tok", 2),
        mlp=MlpConfig(size=sizes.inner),
        renormalised=True,
    )
    attention = AttentionConfig(**sizes.heads, window=config.window("sliding_window"), rope=rope)
    layer = LayerConfig(mixer=attention, mlp=experts)
    return DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers)


weight_sources = llama.sources_with(llama.weight_sources, LAYER)
