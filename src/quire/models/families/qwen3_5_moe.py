"""Qwen3.5's text part with experts, including a gated shared expert in each layer."""

from __future__ import annotations

from dataclasses import replace

from quire.models.decoder_config import DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families import qwen3_5, qwen3_moe
from quire.models.families.mtp import own_tensors
from quire.models.families.qwen3_5 import read_mixers, read_text_sizes
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources

SHARED = {
    "shared.mlp_in": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared.mlp_out": ("mlp.shared_expert.down_proj",),
    "shared_gate": ("mlp.shared_expert_gate",),
}
TOGETHER = {  # one tensor has the weights of all experts
    "experts.mlp_in.weight": ("mlp.experts.gate_up_proj[{}]",),
    "experts.mlp_out.weight": ("mlp.experts.down_proj[{}]",),
}


# intermediate_size is that of layers without experts, which this family does not have.
@reads("qwen3_5_moe", intermediate_size=1)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_text_sizes(config, num_kv_heads=2)
    config.only("hidden_act", "silu")
    config.only("mlp_only_layers", [])
    config.only("norm_topk_prob", True)
    experts = read_experts(config, count=256, per_token=8)
    layers = tuple(LayerConfig(mixer=mixer, mlp=experts) for mixer in read_mixers(config, sizes))
    return DecoderConfig(**sizes.decoder, layers=layers)


def read_experts(config: ConfigReader, count: int, per_token: int) -> ExpertsConfig:
    """Return the experts of a layer. count, per_token: default values."""
    config.get("router_aux_loss_coef")  # for training
    return ExpertsConfig(
        count=config.integer("num_experts", count),
        per_token=config.integer("num_experts_per_tok", per_token),
        mlp=MlpConfig(size=config.integer("moe_intermediate_size", 512)),
        renormalised=config.flag("norm_topk_prob", True),
        shared=MlpConfig(size=config.integer("shared_expert_intermediate_size", 512)),
        shared_gate=True,
    )


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = qwen3_5.weight_sources(config, names)
    layer = {**theirs.layer, **qwen3_moe.LAYER, **SHARED}
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in names):
        layer |= TOGETHER
    return replace(theirs, layer=layer)


draft_head = own_tensors(weight_sources, qwen3_5.adapted)
