"""Nemotron-H, Nemotron 3: each layer is one branch: Mamba-2, attention without positions, an MLP, or experts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import mamba2
from quire.models.families.glm4_moe import sigmoid_experts
from quire.models.families.llama import read_sizes
from quire.models.hf_config import ConfigReader
from quire.models.state_config import StateSpaceConfig
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = {
    "qkv": ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    "output": ("mixer.o_proj",),
    "mlp_in": ("mixer.up_proj",),
    "mlp_out": ("mixer.down_proj",),
    "router": ("mixer.gate",),
    "correction": ("mixer.gate.e_score_correction_bias",),
    "shared.mlp_in": ("mixer.shared_experts.up_proj",),
    "shared.mlp_out": ("mixer.shared_experts.down_proj",),
}
APART = {"experts.mlp_in": ("mixer.experts.{}.up_proj",), "experts.mlp_out": ("mixer.experts.{}.down_proj",)}
TOGETHER = {"experts.mlp_in.weight": ("mixer.experts.up_proj[{}]",)}
TOGETHER |= {"experts.mlp_out.weight": ("mixer.experts.down_proj[{}]",)}
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
UNUSED = re.compile(r"mtp\..*")


DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
}
# For training, draft tokens or kernels; transformers' code does not read them.
UNREAD = (
    "auto_map chunk_size expand mamba_proj_bias mamba_ssm_cache_dtype moe_shared_expert_overlap "
    "mtp_hybrid_override_pattern mtp_layers_block_type norm_eps num_logits_to_keep num_nextn_predict_layers "
    "rescale_prenorm_residual residual_in_fp32 rms_norm_eps rope_theta partial_rotary_factor sliding_window "
    "time_step_limit use_mamba_kernels"
).split()


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    kinds = _kinds(ConfigReader(raw, "nemotron_h"))
    config = ConfigReader({**DEFAULTS, **raw, "num_hidden_layers": len(kinds)}, "nemotron_h")
    sizes = read_sizes(config, num_kv_heads=8, head_dim=128, norm_eps="layer_norm_epsilon")
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern", *UNREAD):
        config.get(key)
    config.only("attention_head_dim", sizes.heads["head_dim"])
    config.only("attention_bias", False)
    config.only("mamba_hidden_act", "silu")
    config.only("mlp_hidden_act", "relu2")
    config.only("n_shared_experts", 1)
    if (size := config.get("moe_latent_size")) is not None:
        raise config.error("moe_latent_size", "null; experts of a projected input are not served", size)
    mlp = MlpConfig(size=sizes.inner, activation=Activation("relu_squared", gated=False), bias=config.flag("mlp_bias"))
    experts = sigmoid_experts(config)
    shared = replace(mlp, size=config.integer("moe_shared_expert_intermediate_size", 7688))
    experts = replace(experts, mlp=replace(mlp, size=experts.mlp.size, bias=False), shared=shared)
    state = LayerConfig(mixer=_state(config), mlp=None)
    attention = LayerConfig(mixer=AttentionConfig(**sizes.heads), mlp=None)
    layers = {
        **dict.fromkeys(("mamba", "linear_attention"), state),
        **dict.fromkeys(("attention", "full_attention"), attention),
        "mlp": LayerConfig(mixer=None, mlp=mlp),
        "moe": LayerConfig(mixer=None, mlp=experts),
    }
    decoder = DecoderConfig(**sizes.decoder, layers=tuple(config.of_layers(layers, kinds, len(kinds))))
    config.finish()
    return decoder


def _kinds(config: ConfigReader) -> list[str]:
    """Return the kind of each layer."""
    if kinds := config.texts("layers_block_type") or config.texts("layer_types"):
        return kinds
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= LETTERS.keys():
        raise config.error("hybrid_override_pattern", f"a letter of {' '.join(LETTERS)} for each layer", pattern)
    config.only("num_hidden_layers", len(pattern))
    return [LETTERS[letter] for letter in pattern]


def _state(config: ConfigReader) -> StateSpaceConfig:
    groups = config.integer("n_groups", 8)
    for key in ("time_step_max", "time_step_floor", "time_step_rank"):
        config.get(key)  # for the initial weights
    return StateSpaceConfig(
        num_heads=config.integer("mamba_num_heads", 128),
        num_groups=groups,
        head_dim=config.integer("mamba_head_dim", 64),
        state_dim=config.integer("ssm_state_size", 128),
        taps=config.integer("conv_kernel", 4),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias", True),
        dt_limits=(config.number("time_step_min", 0.001), math.inf),  # as in transformers' code
        norm_groups=groups,
    )


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = mamba2.weight_sources(config, names)
    together = any(name.endswith(".experts.up_proj") for name in names)
    layer = {**theirs.layer, **LAYER, **(TOGETHER if together else APART)}
    return replace(theirs, layer=layer, ignored=UNUSED, renamed={"backbone.": "model."})
