"""GLM-4.5, GLM-4.6: GLM-4 with experts, chosen from groups by corrected sigmoids, and a shared expert."""

from __future__ import annotations

from dataclasses import replace

from quire.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    ExpertsConfig,
    LatentConfig,
    LayerConfig,
    MlpConfig,
)
from quire.models.families import llama
from quire.models.families.llama import read_sizes, rope_parameters
from quire.models.families.mtp import layer_after
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources

EXPERTS = {
    "router": ("mlp.gate",),
    "correction": ("mlp.gate.e_score_correction_bias",),
    "experts.mlp_in": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "experts.mlp_out": ("mlp.experts.{}.down_proj",),
    "shared.mlp_in": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    "shared.mlp_out": ("mlp.shared_experts.down_proj",),
}
NORMS = {"q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}


@reads("glm4_moe", max_position_embeddings=131_072, rms_norm_eps=1e-5, partial_rotary_factor=0.5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=8), rope_parameters(config)
    config.only("hidden_act", "silu")
    attention = AttentionConfig(
        **sizes.heads,
        rope=rope,
        bias=config.flag("attention_bias"),
        qk_norm="head" if config.flag("use_qk_norm") else None,
    )
    experts = sigmoid_experts(config)
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):  # layers after the last one, which predict draft tokens
        config.get(key)
    return DecoderConfig(
        **sizes.decoder, layers=first_dense(config, attention, sizes.inner, experts, 1, sizes.num_layers)
    )


def sigmoid_experts(config: ConfigReader) -> ExpertsConfig:
    """Read the experts of a family that routes like DeepSeek-V3."""
    size, shared = config.integer("moe_intermediate_size", 1408), config.count("n_shared_experts", 1)
    return ExpertsConfig(
        count=config.integer("n_routed_experts", 128),
        per_token=config.integer("num_experts_per_tok", 8),
        mlp=MlpConfig(size=size),
        renormalised=config.flag("norm_topk_prob", True),
        scores="sigmoid",
        corrected=True,
        groups=config.integer("n_group", 1),
        groups_chosen=config.integer("topk_group", 1),
        factor=config.number("routed_scaling_factor", 1.0),
        shared=MlpConfig(size=size * shared) if shared else None,
    )


def first_dense(
    config: ConfigReader,
    attention: AttentionConfig | LatentConfig,
    inner: int,
    experts: ExpertsConfig,
    usual: int,
    num_layers: int,
) -> tuple[LayerConfig, ...]:
    """Return layers of which the first few have an MLP, and the others experts. usual: the default of that number."""
    dense, sparse = (LayerConfig(mixer=attention, mlp=mlp) for mlp in (MlpConfig(size=inner), experts))
    first = config.count("first_k_dense_replace", usual)
    return tuple(dense if i < first else sparse for i in range(num_layers))


def listed_mlps(
    config: ConfigReader, inner: int, experts: ExpertsConfig, first: int, count: int
) -> list[MlpConfig | ExpertsConfig]:
    """Return the MLP or the experts of each layer, by `mlp_layer_types`. first: MLPs before the experts without it."""
    found: dict[str, MlpConfig | ExpertsConfig] = {"dense": MlpConfig(size=inner), "sparse": experts}
    kinds = config.texts("mlp_layer_types") or ["dense" if i < first else "sparse" for i in range(count)]
    if len(kinds) != count or not set(kinds) <= found.keys():
        raise config.error("mlp_layer_types", f"dense or sparse for each of {count} layers", kinds)
    return [found[kind] for kind in kinds]


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    layer = {**theirs.layer, **EXPERTS, **NORMS}
    return replace(theirs, layer=layer, ignored=llama.beyond(config))


draft_head = layer_after(weight_sources)
