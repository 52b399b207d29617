"""Qwen3-Next: Qwen3.5 with experts, whose checkpoints store the first projection of a recurrent layer by key heads."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.models.decoder_config import DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import qwen3_5, qwen3_5_moe
from quire.models.families.mtp import own_tensors
from quire.models.families.qwen3_5 import read_mixers, read_text_sizes
from quire.models.families.qwen3_5_moe import read_experts
from quire.models.families.qwen3_moe import sparse_layers
from quire.models.hf_config import ConfigReader, reads
from quire.models.state_config import GatedDeltaConfig
from quire.models.weights import Sources

LAYER = {"state_in": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")}


@reads("qwen3_next")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_text_sizes(config, num_kv_heads=2)
    config.only("hidden_act", "silu")
    config.only("use_sliding_window", False)
    config.get("max_window_layers")  # without effect, as there is no window
    dense, experts = MlpConfig(size=sizes.inner), read_experts(config, count=512, per_token=10)
    mixers = zip(read_mixers(config, sizes, in_pairs=True), sparse_layers(config, sizes.num_layers), strict=True)
    layers = tuple(LayerConfig(mixer=mixer, mlp=experts if sparse else dense) for mixer, sparse in mixers)
    return DecoderConfig(**sizes.decoder, layers=layers)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = qwen3_5_moe.weight_sources(config, names)
    return replace(theirs, layer={**theirs.layer, **LAYER}, adapt=partial(adapted, config))


def adapted(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: all queries, then all keys, values and gates; all of b, then all of a."""
    mixer = config.layers[int(name.split(".")[1])].mixer if ".in_proj_" in part else None
    if not isinstance(mixer, GatedDeltaConfig):
        return qwen3_5.adapted(config, name, part, tensor)
    share = mixer.num_heads // mixer.num_k_heads  # value heads per key head
    values = share * mixer.dim_v
    sizes = [share, share] if ".in_proj_ba." in part else [mixer.dim_k, mixer.dim_k, values, values]
    by_head = tensor.unflatten(0, (mixer.num_k_heads, sum(sizes)))  # type: ignore[no-untyped-call]
    return torch.cat([rows.flatten(0, 1) for rows in by_head.split(sizes, 1)])


draft_head = own_tensors(weight_sources, adapted)
