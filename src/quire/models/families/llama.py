"""Llama, Mistral, SmolLM: grouped-query attention, RoPE, RMSNorm before each branch, a SwiGLU MLP."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from quire.errors import ModelError
from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.mtp import own_tensors
from quire.models.hf_config import ConfigReader, architectures
from quire.models.rope import check_rope, rotated_share, takes_original
from quire.models.weights import Sources

WeightSources = Callable[[DecoderConfig, frozenset[str]], Sources]
# Ours -> theirs below a layer; several of theirs are stacked in this order.
LAYER = {
    "input_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp_in": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp_out": ("mlp.down_proj",),
}
HEAD_NORMS = {"q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)}  # of families that have them
ENDS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
# Default values of Mistral.
MISTRAL = {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "sliding_window": 4096}
HEAD_KEYS = ("mtp_num_hidden_layers", "mtp_intermediate_size")  # of a draft head
FREQUENCIES = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # of old checkpoints; we compute them
UNUSED = re.compile(rf"mtp\..*|{FREQUENCIES.pattern}")  # by the model without its draft head


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    mistral = "MistralForCausalLM" in architectures(raw)
    config = ConfigReader({**(MISTRAL if mistral else {}), **raw}, "llama")
    window = config.window("sliding_window")
    if not mistral:  # transformers' Llama ignores sliding_window
        window = None
    sizes, rope = read_sizes(config), whole_rope(config)
    config.only("hidden_act", "silu")
    config.only("rope_interleaved", False)
    for key in HEAD_KEYS:
        config.get(key)
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(
        **sizes.heads, window=window, rope=rope, bias=attention_bias, output_bias=attention_bias
    )
    layer = LayerConfig(mixer=attention, mlp=MlpConfig(size=sizes.inner, bias=config.flag("mlp_bias")))
    decoder = DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers)
    config.finish()
    return decoder


def whole_rope(config: ConfigReader) -> dict[str, Any]:
    """Return the RoPE parameters of a family that rotates whole heads, the same in all layers."""
    rope = rope_parameters(config)
    check_whole_heads(config, rope)
    return rope


def check_whole_heads(config: ConfigReader, rope: Mapping[str, Any]) -> None:
    """Raise ModelError if only a part of each head is rotated, which this family does not support."""
    if (share := rotated_share(rope)) != 1.0:
        raise ModelError(f"config.json: partial_rotary_factor is {share!r}; family {config.family!r} serves 1.0 only")


def rope_parameters(
    config: ConfigReader, theta_key: str = "rope_theta", share_key: str = "partial_rotary_factor"
) -> dict[str, Any]:
    """Return the RoPE parameters of all layers from a config in the old or the new format."""
    old, new = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    rope = {key: value for key, value in (old or new).items() if value is not None}  # the precedence in transformers
    for name, key in (("rope_theta", theta_key), ("partial_rotary_factor", share_key)):
        if (value := config.get(key)) is not None:
            rope.setdefault(name, value)
    original = config.get("original_max_position_embeddings")
    if original is not None and takes_original(rope):
        rope["original_max_position_embeddings"] = original
    check_rope(rope)
    return rope


class Sizes(NamedTuple):
    """The sizes that Llama-like families have under the same keys."""

    decoder: dict[str, Any]  # fields of a DecoderConfig
    heads: dict[str, Any]  # fields of an AttentionConfig
    inner: int  # size of an MLP
    num_layers: int


def read_sizes(
    config: ConfigReader,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    norm_eps: str = "rms_norm_eps",
) -> Sizes:
    """Read the sizes with a family's defaults. norm_eps: the key of that number."""
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    usual_kv_heads = num_heads if config.is_null("num_key_value_heads") else num_kv_heads or num_heads
    decoder = {
        "vocab_size": config.integer("vocab_size"),
        "hidden_size": hidden_size,
        "norm_eps": config.number(norm_eps, 1e-6),
        "max_position_embeddings": config.integer("max_position_embeddings", 2048),
        "tied_embeddings": config.flag("tie_word_embeddings", tied),
    }
    heads = {
        "num_heads": num_heads,
        "num_kv_heads": config.integer("num_key_value_heads", usual_kv_heads),
        "head_dim": config.integer("head_dim", head_dim or hidden_size // num_heads),
    }
    return Sizes(decoder, heads, config.integer("intermediate_size"), config.integer("num_hidden_layers"))


def beyond(config: DecoderConfig) -> re.Pattern[str]:
    """Return the pattern for tensors of later layers, which predict draft tokens, and old checkpoints' frequencies."""
    later = "|".join(str(config.num_layers + i) for i in range(8))
    return re.compile(rf"model\.layers\.({later})\..*|{FREQUENCIES.pattern}")


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    return Sources(ENDS, "model.layers.{}.", LAYER, UNUSED)


draft_head = own_tensors(weight_sources)


def sources_with(base: WeightSources, layer: Mapping[str, tuple[str, ...]]) -> WeightSources:
    """Return the `weight_sources` of a family that has those of another one but for these parts of a layer."""

    def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
        theirs = base(config, names)
        return replace(theirs, layer={**theirs.layer, **layer})

    return weight_sources
