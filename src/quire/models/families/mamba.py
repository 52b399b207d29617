"""Mamba and Falcon-Mamba: layers that are a selective state space alone, without an MLP and without attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.models.decoder_config import DecoderConfig, LayerConfig
from quire.models.families import mamba2
from quire.models.families.bamba import adapted as space_adapted
from quire.models.hf_config import ConfigReader, architectures
from quire.models.state_config import SelectiveConfig
from quire.models.weights import Sources

LAYER = {
    "state_x": ("mixer.x_proj",),
    "state_dt": ("mixer.dt_proj",),
    "dt_bias": ("mixer.dt_proj.bias",),
}
# For initial weights, training or a kernel.
UNREAD = (
    "time_step_scale time_step_min time_step_max time_step_init_scheme time_step_floor rescale_prenorm_residual "
    "residual_in_fp32 use_mambapy use_associative_scan use_falcon_mambapy d_model d_inner n_layer fused_add_norm "
    "rms_norm ssm_cfg pad_vocab_size_multiple"
).split()


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    falcon = "FalconMambaForCausalLM" in architectures(raw)
    config = ConfigReader(raw, "mamba")
    hidden_size, num_layers = config.integer("hidden_size", 768), config.integer("num_hidden_layers", 32)
    config.only("hidden_act", "silu")
    for key in UNREAD:
        config.get(key)
    inner = config.integer("intermediate_size", int(config.number("expand", 2) * hidden_size))
    state = SelectiveConfig(
        width=inner,
        state_dim=config.integer("state_size", 16),
        taps=config.integer("conv_kernel", 4),
        rank=read_rank(config, "time_step_rank", hidden_size),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias", True),
        norm_eps=config.number("mixer_rms_eps", 1e-6) if falcon else None,
    )
    decoder = DecoderConfig(
        vocab_size=config.integer("vocab_size", 50280),
        hidden_size=hidden_size,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        max_position_embeddings=mamba2.LONGEST,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        layers=(LayerConfig(mixer=state, mlp=None),) * num_layers,
    )
    config.finish()
    return decoder


def read_rank(config: ConfigReader, key: str, hidden_size: int) -> int:
    """Return the rank of the projection to dt."""
    return -(-hidden_size // 16) if config.get(key, "auto") == "auto" else config.integer(key)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = mamba2.weight_sources(config, names)
    return replace(theirs, layer={**theirs.layer, **LAYER}, adapt=partial(adapted, config))


def adapted(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: the second projection computes dt, C, B instead of dt, B, C."""
    mixer = config.layers[int(name.split(".")[1])].mixer if ".state_x." in name else None
    if isinstance(mixer, SelectiveConfig):
        dt, B, C = torch.split(tensor, list(mixer.x_parts))
        return torch.cat([dt, C, B])
    return space_adapted(name, part, tensor)
