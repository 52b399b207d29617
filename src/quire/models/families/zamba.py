"""Zamba, Zamba 2: Mamba layers, and before some of them a block of attention and an MLP whose weights they share."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.decoder_config import AsideConfig, AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import bamba
from quire.models.families.llama import ENDS, Sizes, read_sizes, whole_rope
from quire.models.families.mamba import read_rank
from quire.models.hf_config import ConfigReader, architectures
from quire.models.state_config import SelectiveConfig, StateSpaceConfig
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = bamba.LAYER | {"joined_norm": ("input_layernorm",)}
LAYERS = {
    "shared_transf": LAYER
    | {"state_x.weight": ("mamba.x_proj_weight",), "state_dt.weight": ("mamba.dt_proj_weight",)}
    | {"dt_bias": ("mamba.dt_proj_bias",)},
    "shared_transformer": LAYER | {"mlp_in": ("feed_forward.gate_up_proj",)},
}  # by the block's name
FIRST = {
    "vocab_size": 32000, "hidden_size": 3712, "intermediate_size": 14848, "num_hidden_layers": 76,
    "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
}  # fmt: skip
SECOND = FIRST | {"hidden_size": 2560, "num_hidden_layers": 54, "num_attention_heads": 32, "num_key_value_heads": None}
KINDS = {"linear_attention": False, "mamba": False, "hybrid": True}
USUAL = "mmmmmmhmmmmmhmmmmmhmmmmmhmmmmmhmmmmmhmmmmmhmmmmhmmmhmm"  # of Zamba 2, h for hybrid
# They follow from other keys, or are for a kernel or for initial weights, or transformers' code does not read them.
UNREAD = (
    "num_logits_to_keep use_mamba_kernels use_associative_scan use_mem_eff_path use_conv_bias chunk_size "
    "time_step_max time_step_floor kv_channels num_query_groups ffn_hidden_size auto_map"
).split()


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    first = "ZambaForCausalLM" in architectures(raw)
    config = ConfigReader({**(FIRST if first else SECOND), **raw}, "zamba" if first else "zamba2")
    hidden_size = config.integer("hidden_size")
    usual = 2 * hidden_size // config.heads("num_attention_heads", 2 * hidden_size)
    dim = config.integer("attention_head_dim", usual) if first else usual
    sizes = read_sizes(config, head_dim=dim, tied=True)
    config.only("attention_head_dim", dim)
    config.only("attention_hidden_size", 2 * hidden_size)
    config.only("hidden_act", "gelu")
    config.only("tie_word_embeddings", True)  # without it, transformers' code shares no weights between layers either
    for key in UNREAD:
        config.get(key)
    state = _selective(config, hidden_size) if first else _state_space(config, hidden_size)
    bias = config.flag("add_bias_linear") and not first
    rope = whole_rope(config)
    attention = AttentionConfig(
        **sizes.heads, rope=rope if config.flag("use_mem_rope") else None, scale=(dim / 2) ** -0.5
    )
    mlp = MlpConfig(size=sizes.inner, activation=Activation("gelu"), bias=bias)
    aside = AsideConfig(weights_of=0, qkv_rank=None, mlp_rank=None)
    if not first:
        aside = _adapters(config, sizes, aside)
    kinds = config.of_layers(KINDS, _kinds(config, first, sizes.num_layers), sizes.num_layers)
    config.only("hybrid_layer_ids", [i for i, is_hybrid in enumerate(kinds) if is_hybrid])
    block, layers, uses = LayerConfig(mixer=attention, mlp=mlp), list[LayerConfig](), list[int]()
    count = config.integer("num_mem_blocks", 1)
    for is_hybrid in kinds:
        if is_hybrid:
            uses.append(len(layers))
            layers.append(replace(block, aside=replace(aside, weights_of=uses[(len(uses) - 1) % count])))
        layers.append(LayerConfig(mixer=state, mlp=None))
    decoder = DecoderConfig(**sizes.decoder, layers=tuple(layers))
    config.finish()
    return decoder


def _kinds(config: ConfigReader, first: bool, num_layers: int) -> list[str]:
    """Return the kind of each layer."""
    every, offset = config.integer("attn_layer_period", 6), config.count("attn_layer_offset", 4)
    usual = "mmh" + "".join("h" if i % every == offset else "m" for i in range(num_layers - 3)) if first else USUAL
    named = {"m": "mamba", "h": "hybrid"}
    return config.texts("layers_block_type") or config.texts("layer_types") or [named[one] for one in usual]


def _adapters(config: ConfigReader, sizes: Sizes, aside: AsideConfig) -> AsideConfig:
    """Read the options of a block of Zamba 2."""
    rank = config.integer("adapter_rank", 128)
    config.only("use_shared_mlp_adapter", True)
    config.only("use_long_context", False)
    in_attention = config.flag("use_shared_attention_adapter")
    if in_attention and sizes.heads["num_heads"] != sizes.heads["num_kv_heads"]:
        raise ModelError(
            f"config.json: num_key_value_heads is {sizes.heads['num_kv_heads']}; with use_shared_attention_adapter it "
            f"must be num_attention_heads, {sizes.heads['num_heads']}"
        )
    return replace(aside, qkv_rank=rank if in_attention else None, mlp_rank=rank)


def _selective(config: ConfigReader, hidden_size: int) -> SelectiveConfig:
    width, parts = _width(config, hidden_size, 2)
    config.only("hidden_mamba_act", "silu")
    config.get("time_step_min")  # for initial weights
    return SelectiveConfig(
        width=width,
        state_dim=config.integer("mamba_d_state", 16),
        taps=config.integer("mamba_d_conv", 4),
        rank=read_rank(config, "mamba_dt_rank", hidden_size),
        bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias", True),
        parts=parts,
    )


def _state_space(config: ConfigReader, hidden_size: int) -> StateSpaceConfig:
    width, heads = _width(config, hidden_size, 8)
    config.only("rms_norm_eps", 1e-5)  # the state's norm always uses this value
    config.only("time_step_limit")
    config.only("mamba_headdim", width // heads)
    groups = config.integer("mamba_ngroups", 1)
    return StateSpaceConfig(
        num_heads=heads,
        num_groups=groups,
        head_dim=width // heads,
        state_dim=config.integer("mamba_d_state", 64),
        taps=config.integer("mamba_d_conv", 4),
        bias=config.flag("add_bias_linear"),
        conv_bias=True,
        dt_limits=(config.number("time_step_min", 0.001), math.inf),  # as in transformers' code
        norm_groups=groups,
    )


def _width(config: ConfigReader, hidden_size: int, usual: int) -> tuple[int, int]:
    """Return the inner channels of a Mamba layer, and the number of their heads."""
    width, heads = config.integer("mamba_expand", 2) * hidden_size, config.integer("n_mamba_heads", usual)
    if width % heads:
        raise ModelError(f"config.json: n_mamba_heads is {heads}, which does not divide the {width} inner channels")
    return width, heads


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    block = "shared_transf" if isinstance(config.layers[-1].mixer, SelectiveConfig) else "shared_transformer"
    theirs = list(accumulate((layer.aside is None for layer in config.layers), initial=0))  # the layer of each of ours
    numbers: list[str] = []
    uses: dict[int, int] = {}  # of ours -> its number
    ends = {**ENDS, "final_norm.weight": "model.final_layernorm.weight"}
    for i, layer in enumerate(config.layers):
        if layer.aside is not None:
            numbers.append(f"{theirs[layer.aside.weights_of]}.{block}")
            ends[f"layers.{i}.aside.weight"] = f"model.layers.{theirs[i]}.linear.weight"
            uses[i] = len(uses)
        else:
            numbers.append(f"{theirs[i]}.mamba_decoder" if i - 1 in uses else f"{theirs[i]}")

    def adapters(index: int, part: str) -> tuple[str, ...] | None:
        kind, _, half = part.rpartition("_")
        end = f"_adapter_list.{uses.get(index)}.{('down', 'up').index(half)}" if half in ("down", "up") else ""
        if kind == "qkv":
            return tuple(f"self_attn.linear_{one}{end}" for one in "qkv")
        return (f"feed_forward.gate_up_proj{end}",) if end else None

    # Some tools write the block's weights once for each of its uses.
    others = "|".join(str(theirs[i]) for i in uses if config.holder(f"layers.{i}.qkv") != i)
    ignored = re.compile(rf"model\.layers\.({others})\.{block}\..*") if others else None
    return Sources(
        ends, "model.layers.{}.", LAYERS[block], ignored, partial(_adapted, config), adapters, numbers=numbers
    )


def _adapted(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: the state's projections and vectors of Zamba have dimensions for its parts."""
    mixer = config.layers[int(name.split(".")[1])].mixer if name.startswith("layers.") else None
    if isinstance(mixer, SelectiveConfig):
        if ".state_in." in name:  # each channel's input, then its gate
            return torch.cat([tensor[::2], tensor[1::2]])
        if ".state_x." in name and tensor.dim() == 3 and sum(mixer.x_parts) == mixer.parts * tensor.shape[1]:
            dt, B, C = torch.split(tensor, [part // mixer.parts for part in mixer.x_parts], 1)
            return torch.cat([_diagonal(part) for part in (dt, C, B)])
        if ".state_dt." in name and tensor.dim() == 3:
            return _diagonal(tensor)
        if name.endswith((".A_log", ".D", ".dt_bias")) and tensor.dim() > 1:
            return tensor.flatten(0, 1)
    return bamba.adapted(name, part, tensor)


def _diagonal(blocks: Tensor) -> Tensor:
    """Return a matrix of these blocks: [n, a, b] -> [n a, n b]."""
    found: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return found
