"""ERNIE 4.5 with experts: routing adds a correction to each expert's score, and there are shared experts."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.ernie4_5 import DEFAULTS, THETA
from quire.models.families.glm4_moe import EXPERTS
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.families.mtp import dense_block
from quire.models.families.pairs import pairs_apart
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources

AHEAD = re.compile(rf"model\.mtp_.*|{llama.FREQUENCIES.pattern}")  # of the draft head
LAYER = {**EXPERTS, "correction": ("mlp.moe_statics.e_score_correction_bias",)}


@reads("ernie4_5_moe", **DEFAULTS)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, num_kv_heads=4, tied=True)
    config.only("hidden_act", "silu")
    config.only("moe_norm_min", 1e-12)  # without effect: no sum of routing weights is as small
    config.only("moe_gate", "topk", "topk_fused")
    config.only("moe_use_aux_free", True)
    config.only("use_rmsnorm", True)
    for key in ("router_aux_loss_coef", "moe_capacity", "num_nextn_predict_layers"):  # for training or draft tokens
        config.get(key)
    config.only("use_bias", False)
    size = config.integer("moe_intermediate_size", 1536)
    attention = AttentionConfig(**sizes.heads, rope=THETA | whole_rope(config))
    dense, shared = MlpConfig(size=sizes.inner), config.count("moe_num_shared_experts", 2)
    experts = ExpertsConfig(
        count=config.integer("moe_num_experts", 64),
        per_token=config.integer("moe_k", 6),
        mlp=MlpConfig(size=size),
        renormalised=True,
        corrected=True,
        shared=MlpConfig(size=size * shared) if shared else None,
    )
    layers = tuple(
        LayerConfig(mixer=attention, mlp=experts if sparse else dense) for sparse in _sparse(config, sizes.num_layers)
    )
    return DecoderConfig(**sizes.decoder, layers=layers)


def _sparse(config: ConfigReader, num_layers: int) -> list[bool]:
    """Return, for each layer, whether it has experts."""
    first, every = config.count("moe_layer_start_index", 1), config.integer("moe_layer_interval", 1)
    last = config.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last == -1 else config.count("moe_layer_end_index", 0)
    return [first <= i <= last and (i + 1) % every == 0 for i in range(num_layers)]


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    return replace(theirs, layer={**theirs.layer, **LAYER}, ignored=AHEAD, adapt=partial(_adapt, config))


def _adapt(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: the correction is stored as one row, RoPE has neighbouring pairs."""
    return tensor.flatten() if name.endswith(".correction") else pairs_apart(config, name, part, tensor)


draft_head = dense_block(weight_sources, _adapt)
