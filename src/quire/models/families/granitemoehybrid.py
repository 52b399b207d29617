"""Granite 4: Mamba-2 in most layers, attention without positions or with RoPE in the others."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families.bamba import MIXER, adapted, read_state_space
from quire.models.families.llama import ENDS, read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, reads
from quire.models.state_config import StateSpaceConfig
from quire.models.weights import Sources

LAYER = MIXER | {
    "input_norm": ("input_layernorm",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp_in": ("shared_mlp.input_linear",),
    "mlp_out": ("shared_mlp.output_linear",),
}
EXPERTS: dict[str, tuple[str, ...]] = {
    "router": ("block_sparse_moe.router.layer",),
    # One tensor has the weights of all experts.
    "experts.mlp_in.weight": ("block_sparse_moe.input_linear.weight[{}]",),
    "experts.mlp_out.weight": ("block_sparse_moe.output_linear.weight[{}]",),
    "shared.mlp_in": ("shared_mlp.input_linear",),
    "shared.mlp_out": ("shared_mlp.output_linear",),
}
SHARED_APART = ("shared_mlp.gate_proj", "shared_mlp.up_proj")
APART: dict[str, tuple[str, ...]] = {  # in GGUF files
    "router": ("block_sparse_moe.router.layer",),
    "experts.mlp_in": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "experts.mlp_out": ("block_sparse_moe.experts.{}.w2",),
    "shared.mlp_in": SHARED_APART,
    "shared.mlp_out": ("shared_mlp.down_proj",),
}


@reads("granitemoehybrid")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config)
    config.only("hidden_act", "silu")
    for key in ("router_aux_loss_coef", "init_method"):
        config.get(key)  # for training
    config.only("normalization_function", "rmsnorm")
    rope = whole_rope(config)
    config.only("position_embedding_type", "rope", "nope")
    bias = config.flag("attention_bias")
    attention = AttentionConfig(
        **sizes.heads,
        rope=rope if config.get("position_embedding_type") == "rope" else None,
        bias=bias,
        output_bias=bias,
        scale=config.number("attention_multiplier", 1.0),
    )
    state = read_state_space(config, sizes.decoder["hidden_size"])
    mixers: dict[str, AttentionConfig | StateSpaceConfig] = {
        **dict.fromkeys(("attention", "full_attention"), attention),
        **dict.fromkeys(("mamba", "linear_attention"), state),
    }
    usual = config.texts("layer_types", ["linear_attention"] * sizes.num_layers)
    kinds = config.texts("layers_block_type") or usual
    mlp = read_mlp(config, sizes.inner)
    return DecoderConfig(
        **sizes.decoder,
        layers=tuple(LayerConfig(mixer=one, mlp=mlp) for one in config.of_layers(mixers, kinds, sizes.num_layers)),
        branch_scale=config.number("residual_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0),
    )


def read_mlp(config: ConfigReader, inner: int) -> MlpConfig | ExpertsConfig:
    """Return each layer's MLP, or its experts with that MLP as shared expert. inner: the experts' size."""
    count, per_token = config.count("num_local_experts", 8), config.count("num_experts_per_tok", 2)
    shared = MlpConfig(size=config.integer("shared_intermediate_size", 1024))
    if not count:
        return shared
    mlp = MlpConfig(size=inner)
    return ExpertsConfig(count=count, per_token=per_token, mlp=mlp, renormalised=True, shared=shared)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    layer = LAYER | experts_sources(names)
    if any("shared_mlp.gate_proj." in name for name in names):
        layer |= {"mlp_in": SHARED_APART, "mlp_out": ("shared_mlp.down_proj",)}
    return Sources(ENDS, "model.layers.{}.", layer, adapt=adapted)


def experts_sources(names: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return the sources of the experts' weights in a checkpoint with tensors of these names, as in `Sources.layer`."""
    return APART if any(".experts.0." in name or "shared_mlp.gate_proj." in name for name in names) else EXPERTS
