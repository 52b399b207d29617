"""Qwen3-MoE: Qwen3 with experts in place of the MLPs of all layers, or of some."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families import llama, qwen3
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, reads

LAYER = {
    "router": ("mlp.gate",),
    "experts.mlp_in": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "experts.mlp_out": ("mlp.experts.{}.down_proj",),
}


@reads("qwen3_moe", max_position_embeddings=32_768)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=4), whole_rope(config)
    config.only("hidden_act", "silu")
    config.get("router_aux_loss_coef")  # for training
    window = config.window("sliding_window", 4096)
    if not config.flag("use_sliding_window"):
        window = None
        # Without a window, this key has no effect. With one it is refused, as implementations disagree on its meaning.
        config.get("max_window_layers")
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(
        **sizes.heads, window=window, rope=rope, qk_norm="head", bias=attention_bias, output_bias=attention_bias
    )
    dense, experts = MlpConfig(size=sizes.inner), _experts(config)
    sparse = sparse_layers(config, sizes.num_layers)
    layers = tuple(LayerConfig(mixer=attention, mlp=experts if chosen else dense) for chosen in sparse)
    return DecoderConfig(**sizes.decoder, layers=layers)


def _experts(config: ConfigReader) -> ExpertsConfig:
    count = config.integer("num_experts", config.integer("num_local_experts", 128))  # newer configs have the latter
    config.only("num_local_experts", count)
    return ExpertsConfig(
        count=count,
        per_token=config.integer("num_experts_per_tok", 8),
        mlp=MlpConfig(size=config.integer("moe_intermediate_size", 768)),
        renormalised=config.flag("norm_topk_prob"),
    )


def sparse_layers(config: ConfigReader, num_layers: int) -> list[bool]:
    """Return, for each layer, whether it has experts."""
    step, dense = config.integer("decoder_sparse_step", 1), config.layers("mlp_only_layers", [])
    return [(i + 1) % step == 0 and i not in dense for i in range(num_layers)]


weight_sources = llama.sources_with(qwen3.weight_sources, LAYER)
