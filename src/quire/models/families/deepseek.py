"""DeepSeek-V2, V3, V3.2, R1, GLM-5, A.X K2: multi-head latent attention, and experts, some of them shared.

The attention of DeepSeek-V3.2, GLM-5 and A.X K2 is sparse: an indexer chooses the keys that a row attends to. A.X K2
has gates of values, and of some norms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quire.errors import ModelError
from quire.models.decoder_config import (
    DecoderConfig,
    ExpertsConfig,
    IndexConfig,
    LatentConfig,
    LayerConfig,
    MlpConfig,
)
from quire.models.families import llama
from quire.models.families.glm4_moe import EXPERTS, first_dense, listed_mlps, sigmoid_experts
from quire.models.families.llama import Sizes, read_sizes, whole_rope
from quire.models.families.mtp import HeadFormat, layer_after
from quire.models.hf_config import ConfigReader, architectures
from quire.models.rope import extension, rope_type, yarn_magnitude
from quire.models.weights import Sources

NO_BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.q_proj\.bias")  # q_proj has no bias, despite attention_bias
V3, V32, GLM5 = "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
AXK2 = "AXK2ForCausalLM"
V3_DEFAULTS = {
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
# The defaults of those with an indexer, which differ from those of V3.
SPARSE_DEFAULTS = V3_DEFAULTS | {"max_position_embeddings": 163_840, "index_n_heads": 64, "q_lora_rank": 1536}
GLM5_DEFAULTS = SPARSE_DEFAULTS | {
    "max_position_embeddings": 202_752, "index_n_heads": 32, "q_lora_rank": 2048, "n_group": 1, "topk_group": 1,
    "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
AXK2_DEFAULTS = {
    "vocab_size": 163_840, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 131_072,
    "moe_intermediate_size": 512, "n_routed_experts": 128, "routed_scaling_factor": 2.5, "kv_lora_rank": 128,
    "q_lora_rank": 384, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "index_n_heads": 16,
}  # fmt: skip
DEFAULTS = {V3: V3_DEFAULTS, V32: SPARSE_DEFAULTS, GLM5: GLM5_DEFAULTS, AXK2: AXK2_DEFAULTS}
INDEXER = "self_attn.indexer"


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    name = next((name for name in architectures(raw) if name in DEFAULTS), None)
    third, sparse = name is not None, name in (V32, GLM5, AXK2)
    config = ConfigReader({**DEFAULTS.get(name or "", {}), **raw}, "deepseek")
    sizes = read_sizes(config)
    config.only("hidden_act", "silu")
    config.only("mlp_bias", False)
    if not sparse:
        config.only("rms_norm_eps", 1e-6)  # the latent's norm always uses this value
    for key in (
        "head_dim",
        "qk_head_dim",
        "auto_map",
        "aux_loss_alpha",
        "seq_aux",
        "ep_size",
        "moe_layer_freq",
        "num_nextn_predict_layers",
        "num_mtp_layers",
    ):  # they follow from other keys, or are for training or draft tokens
        config.get(key)
    interleaved = not third or config.flag("rope_interleave", True)
    mixer = _attention(config, sizes, interleaved)
    experts = _v3_experts(config) if third else _v2_experts(config)
    first, gate = 3 if third else 0, None
    if name == AXK2:
        config.only("moe_layer_freq", 1)
        config.only("n_group", 1)  # transformers' code may choose experts of other groups, whose scores it sets to 0
        first, gate, mixer = 1, config.integer("gated_norm_rank", 16), replace(mixer, gated=True)
    layers = first_dense(config, mixer, sizes.inner, experts, first, sizes.num_layers)
    if sparse:
        layers = _sparse(config, layers, name == GLM5)
    decoder = DecoderConfig(**sizes.decoder, layers=layers, norm_gate=gate)
    config.finish()
    return decoder


def _attention(config: ConfigReader, sizes: Sizes, interleaved: bool) -> LatentConfig:
    if not interleaved:
        raise ModelError("config.json: rope_interleave is False; family 'deepseek' serves True only")
    rope = whole_rope(config)
    plain_dim, rope_dim = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    scale = (plain_dim + rope_dim) ** -0.5
    if rope_type(rope) != "default" and rope.get("mscale_all_dim"):
        factor = extension(rope, sizes.decoder["max_position_embeddings"])
        scale *= yarn_magnitude(factor, rope["mscale_all_dim"]) ** 2
    return LatentConfig(
        num_heads=sizes.heads["num_heads"],
        latent=config.integer("kv_lora_rank", 512),
        rope_dim=rope_dim,
        plain_dim=plain_dim,
        v_dim=config.integer("v_head_dim", 128),
        q_rank=None if config.is_null("q_lora_rank") else config.integer("q_lora_rank", 1536),
        rope=rope,
        bias=config.flag("attention_bias"),
        scale=scale,
    )


def _sparse(config: ConfigReader, layers: tuple[LayerConfig, ...], glm: bool) -> tuple[LayerConfig, ...]:
    """Return the layers with their indexers, and with the MLPs of `mlp_layer_types` if that is given."""
    count = len(layers)
    config.only("indexer_rope_interleave", glm)
    config.only("moe_router_dtype", "float32")
    config.get("index_share_for_mtp_iteration")  # of draft heads
    if kinds := config.texts("layer_types"):
        config.of_layers({"indexed_attention": None}, kinds, count)
    index = IndexConfig(
        num_heads=config.integer("index_n_heads"),
        head_dim=config.integer("index_head_dim", 128),
        top_k=config.integer("index_topk", 2048),
        interleaved=glm,
    )
    shared = _shared(config, count) if glm else [False] * count
    mlps = [layer.mlp for layer in layers]
    if config.texts("mlp_layer_types"):
        mlps = [*listed_mlps(config, config.integer("intermediate_size"), _v3_experts(config), 0, count)]
    return tuple(
        LayerConfig(mixer=replace(layer.mixer, index=replace(index, shared=one)), mlp=mlp)
        for layer, mlp, one in zip(layers, mlps, shared, strict=True)
        if isinstance(layer.mixer, LatentConfig)
    )


def _shared(config: ConfigReader, count: int) -> list[bool]:
    """Return for each layer of GLM-5 whether it takes the keys that an earlier layer chose."""
    every, offset = max(1, config.count("index_topk_freq", 1)), config.count("index_skip_topk_offset", 2)
    pattern, kinds = config.get("index_topk_pattern"), config.get("indexer_types")
    if kinds is None and isinstance(pattern, str):
        kinds = [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    kinds = pattern if kinds is None else kinds
    if kinds is None:
        return [max(i - offset + 1, 0) % every != 0 for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in ("full", "shared") for kind in kinds):
        raise config.error("indexer_types", f"a list with full or shared for each of {count} layers", kinds)
    return [kind == "shared" for kind in kinds]


def _v3_experts(config: ConfigReader) -> ExpertsConfig:
    config.only("scoring_func", "sigmoid")
    config.only("topk_method", "noaux_tc")
    return sigmoid_experts(config)


def _v2_experts(config: ConfigReader) -> ExpertsConfig:
    config.only("scoring_func", "softmax")
    config.only("norm_topk_prob", False)
    config.only("topk_method", "greedy", "group_limited_greedy")
    in_groups = config.get("topk_method") == "group_limited_greedy"
    for key in ("n_group", "topk_group"):  # present in all configs
        config.get(key)
    size, shared = config.integer("moe_intermediate_size", 1407), config.count("n_shared_experts", 2)
    return ExpertsConfig(
        count=config.integer("n_routed_experts", 64),
        per_token=config.integer("num_experts_per_tok"),
        mlp=MlpConfig(size=size),
        renormalised=False,
        groups=config.integer("n_group") if in_groups else 1,
        groups_chosen=config.integer("topk_group") if in_groups else 1,
        group_best=1,
        factor=config.number("routed_scaling_factor", 1.0),
        shared=MlpConfig(size=size * shared) if shared else None,
    )


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs, mixer = llama.weight_sources(config, names), config.layers[0].mixer
    if isinstance(mixer, LatentConfig) and mixer.index is not None:
        _check_indexer(mixer.index, names)
    has_row = isinstance(mixer, LatentConfig) and mixer.q_rank is not None
    layer = {
        "qkv": ("self_attn.q_a_proj" if has_row else "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
        "q": ("self_attn.q_b_proj",),
        "kv": ("self_attn.kv_b_proj",),
        "q_norm": ("self_attn.q_a_layernorm",),
        "latent_norm": ("self_attn.kv_a_layernorm",),
        "gates": ("self_attn.g_proj",),
        "index_q": (f"{INDEXER}.wq_b",),
        "index_k": (f"{INDEXER}.wk",),
        "index_norm": (f"{INDEXER}.k_norm",),
        "index_weights": (f"{INDEXER}.weights_proj",),
    }
    if config.norm_gate is not None:
        layer["input_norm"] = ("input_layernorm.norm",)
        for ours, norm in (("input_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            layer |= {f"{ours}_down": (f"{norm}.W_down",), f"{ours}_up": (f"{norm}.W_up",)}
        gated = {i for i, one in enumerate(config.layers) if isinstance(one.mlp, ExpertsConfig)}
        own = {"mlp_norm": ("post_attention_layernorm.norm",)}
        renamed = {"W_down": "mlp.fc1", "W_up": "mlp.fc2", "self_attn.q_b_proj": "self_attn.q_gate_proj"}
        theirs = replace(theirs, parts=lambda i, part: own.get(part) if i in gated else None, renamed=renamed)
    adapt = partial(adapted, config)
    layer = {**theirs.layer, **EXPERTS, **layer}
    return replace(theirs, layer=layer, ignored=llama.beyond(config), zeros=NO_BIAS, adapt=adapt)


def _check_indexer(index: IndexConfig, names: frozenset[str]) -> None:
    """Raise ModelError if a checkpoint has no indexer. names: of its tensors; none if they are not known yet."""
    if names and not any(f"{INDEXER}." in name for name in names):
        raise ModelError(
            f"config.json asks for sparse attention (index_topk is {index.top_k}), and the checkpoint has no indexer; "
            f"it must have {INDEXER}.wq_b, wk, k_norm and weights_proj in its layers, or, for dense "
            f"attention, the architecture {V3}"
        )


def adapted(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Reorder rows: the rotated part of a head comes first, in pairs (i, i + half) instead of (2 i, 2 i + 1)."""
    mixer = config.layers[int(name.split(".")[1])].mixer if name.startswith("layers.") else None
    if not isinstance(mixer, LatentConfig):
        return tensor
    if ".kv_a_proj_with_mqa." in part:
        latent, turned = tensor[: mixer.latent], tensor[mixer.latent :]
        return torch.cat([latent, turned[::2], turned[1::2]])
    if f".{INDEXER}." in part:
        if mixer.index is None or not mixer.index.interleaved or ".weights_proj." in part:
            return tensor
        heads = tensor.unflatten(0, (-1, mixer.index.head_dim))  # type: ignore[no-untyped-call]
        turned, plain = heads[:, : mixer.rope_dim], heads[:, mixer.rope_dim :]
        return torch.cat([turned[:, ::2], turned[:, 1::2], plain], 1).flatten(0, 1)
    if ".q_proj." in part or ".q_b_proj." in part:
        heads = tensor.unflatten(0, (mixer.num_heads, -1))  # type: ignore[no-untyped-call]
        plain, turned, gates = torch.tensor_split(heads, (mixer.plain_dim, mixer.plain_dim + mixer.rope_dim), 1)
        return torch.cat([torch.cat([turned[:, ::2], turned[:, 1::2], plain], 1).flatten(0, 1), gates.flatten(0, 1)])
    return tensor


_draft_head = layer_after(weight_sources, adapted)


def draft_head(raw: Mapping[str, Any], config: DecoderConfig, names: frozenset[str]) -> HeadFormat | None:
    """Return the head in the layer after the last one. Without its own indexer, it attends to all keys."""
    last = config.layers[-1]
    if isinstance(last.mixer, LatentConfig) and last.mixer.index is not None:
        own = f"model.layers.{config.num_layers}.{INDEXER}.wk.weight" in names
        mixer = replace(last.mixer, index=replace(last.mixer.index, shared=False) if own else None)
        config = replace(config, layers=(*config.layers[:-1], replace(last, mixer=mixer)))
    return _draft_head(raw, config, names)
