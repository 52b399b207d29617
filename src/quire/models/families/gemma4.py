"""Gemma 4's text part: heads differ by layer, some layers share another layer's keys, per-layer embeddings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from quire.errors import ModelError
from quire.models.decoder_config import (
    AttentionConfig,
    DecoderConfig,
    ExpertsConfig,
    LayerConfig,
    MlpConfig,
    PerLayerConfig,
)
from quire.models.families import gemma2
from quire.models.families.llama import Sizes, check_whole_heads, read_sizes
from quire.models.hf_config import ConfigReader, reads
from quire.models.rope import check_rope
from quire.models.weights import Sources
from quire.ops.activation import Activation

PER_LAYER = "config.json: per_layer_config"
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}  # the default
ENDS = {
    "per_layer_embedding": "model.embed_tokens_per_layer.weight",
    "per_layer_projection.weight": "model.per_layer_model_projection.weight",
    "per_layer_projection_norm.weight": "model.per_layer_projection_norm.weight",
}
LAYER = {
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "scale": ("layer_scalar",),
    "per_layer_gate": ("per_layer_input_gate",),
    "per_layer_output": ("per_layer_projection",),
    "per_layer_norm": ("post_per_layer_input_norm",),
    "dense_output_norm": ("post_feedforward_layernorm_1",),
    "experts_norm": ("pre_feedforward_layernorm_2",),
    "experts_output_norm": ("post_feedforward_layernorm_2",),
    "router": ("router.proj",),
    "router_norm.weight": ("router.scale",),
    "shares": ("router.per_expert_scale",),
}
TOGETHER = {  # one tensor has the weights of all experts
    "experts.mlp_in.weight": ("experts.gate_up_proj[{}]",),
    "experts.mlp_out.weight": ("experts.down_proj[{}]",),
}
APART = {  # in GGUF files
    "experts.mlp_in": ("experts.{}.gate_proj", "experts.{}.up_proj"),
    "experts.mlp_out": ("experts.{}.down_proj",),
}
UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.([kv]_proj|[kv]_norm)\.weight")  # of layers that share keys


@reads("gemma4", max_position_embeddings=131_072)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, num_kv_heads=4, head_dim=256, tied=True)
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("use_bidirectional_attention", "vision")  # only between tokens of an image
    return DecoderConfig(
        **sizes.decoder,
        layers=_layers(config, sizes),
        branch_norms=True,
        layer_scales=True,
        per_layer=_per_layer(config),
        logit_softcap=config.optional_number("final_logit_softcapping"),
        embedding_scale=sizes.decoder["hidden_size"] ** 0.5,
        rounds_embedding_scale=True,
    )


def _layers(config: ConfigReader, sizes: Sizes) -> tuple[LayerConfig, ...]:
    num_layers = sizes.num_layers
    alternating = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)]
    kinds = [*config.texts("layer_types", alternating)]
    kinds[-1:] = ["full_attention"]  # the last layer has full attention, whatever the config
    windows = config.windows(kinds, config.window("sliding_window", 512), num_layers)
    heads, ropes = _heads(config, sizes, kinds), _ropes(config)
    bias, k_is_v = config.flag("attention_bias"), config.flag("attention_k_eq_v")
    num_sharing = config.count("num_kv_shared_layers", 0)
    first_sharing = max(0, num_layers - num_sharing)
    widens, experts = config.flag("use_double_wide_mlp"), _experts(config)
    layers = []
    for i, kind in enumerate(kinds):
        shares = i >= first_sharing
        if shares and kind not in kinds[:first_sharing]:
            raise ModelError(
                f"config.json: num_kv_shared_layers is {num_sharing}; layer {i} of {kind} would read "
                "the keys of an earlier layer of its kind, which does not exist"
            )
        mixer = AttentionConfig(
            **heads[i],
            window=windows[i],
            rope=ropes[kind],
            bias=bias,
            output_bias=bias,
            qk_norm="head",
            scale=1.0,
            v_norm=True,
            v_is_k=k_is_v and kind == "full_attention",
            kv_of=max(j for j in range(first_sharing) if kinds[j] == kind) if shares else None,
        )
        inner = 2 * sizes.inner if widens and shares else sizes.inner
        mlp = MlpConfig(size=inner, activation=Activation("gelu_tanh"))
        layers.append(LayerConfig(mixer=mixer, mlp=mlp, experts=experts))
    return tuple(layers)


def _heads(config: ConfigReader, sizes: Sizes, kinds: list[str]) -> list[dict[str, Any]]:
    """Return each layer's heads. `per_layer_config` sets them or, in older configs, two keys for full attention."""
    full = {"head_dim": config.integer("global_head_dim", 512)}
    kv_heads = config.get("num_global_key_value_heads")
    if kv_heads is not None and config.flag("attention_k_eq_v"):
        full["num_kv_heads"] = config.integer("num_global_key_value_heads")
    if not config.has("per_layer_config"):
        return [sizes.heads | (full if kind == "full_attention" else {}) for kind in kinds]
    given = {re.sub(r"^0+(?=\d)", "", key): value for key, value in config.mapping("per_layer_config").items()}
    own = ConfigReader(given, "gemma4", place=PER_LAYER)  # transformers pads indices with zeros
    heads = [_changed_heads(sizes, own.mapping(str(i)), f"{PER_LAYER}: {i}") for i in range(len(kinds))]
    own.finish()
    return heads


def _changed_heads(sizes: Sizes, changes: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a layer's heads with the changes of an entry of `per_layer_config`."""
    config = ConfigReader(changes, "gemma4", place=place)
    heads = {
        **sizes.heads,
        "head_dim": config.integer("head_dim", sizes.heads["head_dim"]),
        "num_kv_heads": config.integer("num_key_value_heads", sizes.heads["num_kv_heads"]),
    }
    config.finish()
    return heads


def _ropes(config: ConfigReader) -> dict[str, dict[str, Any]]:
    """Return the RoPE parameters of each kind of layer."""
    given = config.mapping("rope_parameters") or ROPES
    if given.keys() != ROPES.keys() or not all(isinstance(rope, dict) for rope in given.values()):
        raise ModelError(
            f"config.json: rope_parameters is {given!r}; it must have one object for each of {', '.join(ROPES)}"
        )
    for rope in given.values():
        check_rope(rope)
        check_whole_heads(config, rope)
    return given


def _per_layer(config: ConfigReader) -> PerLayerConfig | None:
    vocab_size = config.integer("vocab_size_per_layer_input", 262_144)
    size = config.count("hidden_size_per_layer_input", 256)
    if size == 0:
        return None
    least = config.integer("vocab_size", vocab_size)  # a token without a row would fail the step of all requests
    if vocab_size < least:
        raise config.error("vocab_size_per_layer_input", f"at least vocab_size, which is {least}", vocab_size)
    return PerLayerConfig(vocab_size=vocab_size, size=size)


def _experts(config: ConfigReader) -> ExpertsConfig | None:
    if not config.flag("enable_moe_block"):
        for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            config.get(key)
        return None
    return ExpertsConfig(
        count=config.integer("num_experts"),
        per_token=config.integer("top_k_experts"),
        mlp=MlpConfig(size=config.integer("moe_intermediate_size"), activation=Activation("gelu_tanh")),
        renormalised=True,
        scaled=True,
    )


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = gemma2.weight_sources(config, names)
    apart = any(".experts.0." in name for name in names)
    layer = {**theirs.layer, **LAYER, **(APART if apart else TOGETHER)}
    return replace(
        theirs,
        ends={**theirs.ends, **ENDS},
        layer=layer,
        parts=partial(_parts, config),
        ignored=UNUSED,
        adapt=partial(_adapt, config),
    )


def _parts(config: DecoderConfig, layer: int, part: str) -> tuple[str, ...] | None:
    """Return the projections of a layer: layers that share keys only have q, and in some layers v is k."""
    mixer = config.layers[layer].mixer
    if part != "qkv" or not isinstance(mixer, AttentionConfig):
        return None
    return tuple(f"self_attn.{name}_proj" for name in "qkv"[: len(mixer.projected)])


def _adapt(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Fold the scale of the router's input into its norm."""
    return tensor.float() * config.hidden_size**-0.5 if ".router_norm." in name else tensor
