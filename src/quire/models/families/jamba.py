"""Jamba: Mamba-1 in most layers, attention without positions in the others; experts in every second layer."""

from __future__ import annotations

from functools import partial

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families import bamba
from quire.models.families.llama import ENDS, read_sizes
from quire.models.families.mamba import adapted, read_rank
from quire.models.hf_config import ConfigReader, reads
from quire.models.state_config import SelectiveConfig
from quire.models.weights import Sources

LAYER = bamba.LAYER | {
    "state_x": ("mamba.x_proj",),
    "state_dt": ("mamba.dt_proj",),
    "dt_bias": ("mamba.dt_proj.bias",),
    "dt_norm": ("mamba.dt_layernorm",),
    "B_norm": ("mamba.b_layernorm",),
    "C_norm": ("mamba.c_layernorm",),
    "router": ("feed_forward.router",),
    "experts.mlp_in": ("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    "experts.mlp_out": ("feed_forward.experts.{}.down_proj",),
}


@reads("jamba", max_position_embeddings=262_144)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, num_kv_heads=8)
    config.only("hidden_act", "silu")
    config.only("sliding_window")  # transformers' code attends to all keys
    for key in (
        "router_aux_loss_coef",
        "use_mamba_kernels",
        "use_mambapy",
        "use_associative_scan",
        "num_logits_to_keep",
    ):
        config.get(key)  # for training or a kernel
    hidden_size = sizes.decoder["hidden_size"]
    state = SelectiveConfig(
        width=config.integer("mamba_expand", 2) * hidden_size,
        state_dim=config.integer("mamba_d_state", 16),
        taps=config.integer("mamba_d_conv", 4),
        rank=read_rank(config, "mamba_dt_rank", hidden_size),
        bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias", True),
        norm_eps=sizes.decoder["norm_eps"],
        norm_weights=True,
    )
    config.only("mamba_inner_layernorms", True)
    attention, mlp = AttentionConfig(**sizes.heads), MlpConfig(size=sizes.inner)
    count, per_token = config.integer("num_experts", 16), config.integer("num_experts_per_tok", 2)
    sparse = mlp if count == 1 else ExpertsConfig(count=count, per_token=per_token, mlp=mlp, renormalised=False)
    attends, is_sparse = (
        (config.integer(f"{kind}_layer_period", period), config.count(f"{kind}_layer_offset", offset))
        for kind, period, offset in (("attn", 8, 4), ("expert", 2, 1))
    )
    layers = tuple(
        LayerConfig(
            mixer=attention if i % attends[0] == attends[1] else state,
            mlp=sparse if i % is_sparse[0] == is_sparse[1] else mlp,
        )
        for i in range(sizes.num_layers)
    )
    return DecoderConfig(**sizes.decoder, layers=layers)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    ends = {**ENDS, "final_norm.weight": "model.final_layernorm.weight"}
    return Sources(ends, "model.layers.{}.", LAYER, adapt=partial(adapted, config))
