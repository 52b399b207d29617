"""Llama, Mistral, SmolLM: grouped-query attention, RoPE, RMSNorm before each block, a SwiGLU MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.models.decoder import DecoderConfig
from quire.models.hf_config import ConfigReader
from quire.models.rope import check_rope


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a config.json describes. Raises ModelError for a key or value that is not understood."""
    config = ConfigReader(raw, "llama")
    num_heads, num_layers = config.integer("num_attention_heads"), config.integer("num_hidden_layers")
    hidden_size = config.integer("hidden_size")
    old, new = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    rope = old or new  # as transformers has it
    for key in ("rope_theta", "partial_rotary_factor"):
        if (value := config.get(key)) is not None:
            rope.setdefault(key, value)
    if (original := config.get("original_max_position_embeddings")) is not None:
        rope["original_max_position_embeddings"] = original
    check_rope(rope)
    config.only("hidden_act", "silu")
    config.only("rope_interleaved", False)
    attention_bias = config.flag("attention_bias")
    # Mistral's configs mean these where they say nothing; a Llama has no window, whatever its config says.
    mistral = "MistralForCausalLM" in (raw.get("architectures") or [])
    window = config.get("sliding_window", None if "sliding_window" in raw else 4096) if mistral else None
    num_kv_heads = 8 if mistral else num_heads
    decoder = DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_kv_heads),
        head_dim=config.integer("head_dim", hidden_size // num_heads),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        tied_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=config.flag("mlp_bias"),
        windows=(window,) * num_layers,
    )
    config.finish()
    return decoder


def weight_sources(config: DecoderConfig) -> dict[str, tuple[str, ...]]:
    """The checkpoint's tensors that make up each of the decoder's weights, stacked in this order."""
    sources: dict[str, tuple[str, ...]] = {
        "embedding": ("model.embed_tokens.weight",),
        "final_norm": ("model.norm.weight",),
    }
    if not config.tied_embeddings:
        sources["lm_head"] = ("lm_head.weight",)
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        sources[f"{ours}input_norm"] = (f"{theirs}input_layernorm.weight",)
        sources[f"{ours}mlp_norm"] = (f"{theirs}post_attention_layernorm.weight",)
        for name, parts, bias in (
            ("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias),
            ("output", ("self_attn.o_proj",), config.output_bias),
            ("gate_up", ("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
            ("down", ("mlp.down_proj",), config.mlp_bias),
        ):
            for kind in ("weight", "bias") if bias else ("weight",):
                sources[f"{ours}{name}.{kind}"] = tuple(f"{theirs}{part}.{kind}" for part in parts)
    return sources


def ignored_weights(config: DecoderConfig) -> frozenset[str]:
    """Tensors that some checkpoints carry without need: the tied output projection, RoPE's frequencies."""
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    return frozenset(frequencies | ({"lm_head.weight"} if config.tied_embeddings else set()))
