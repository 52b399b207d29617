"""Gemma 3's text part: Gemma 2 with normalised q and k, and with a separate RoPE for each kind of layer."""

from __future__ import annotations

import math
from typing import Any

from quire.errors import ModelError
from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, layers_with
from quire.models.families import gemma2, llama
from quire.models.families.llama import check_whole_heads, read_sizes
from quire.models.hf_config import ConfigReader, reads
from quire.models.rope import check_rope
from quire.ops.activation import Activation


@reads(
    "gemma3",  # whose published text parts omit many keys
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    max_position_embeddings=131_072,
)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, num_kv_heads=4, head_dim=256, tied=True)
    num_layers = sizes.num_layers
    config.only("hidden_activation", "gelu_pytorch_tanh")
    both_sides = config.flag("use_bidirectional_attention")
    config.only("attn_logit_softcapping", None)  # transformers reads it without applying it
    every = config.integer("sliding_window_pattern", 6)
    config.get("_sliding_window_pattern")  # already applied in layer_types
    alternating = ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(num_layers)]
    kinds = config.texts("layer_types", alternating)
    window = config.window("sliding_window", 4096)
    if both_sides and window is not None:
        window = window // 2 + 1  # keys to each side, the row's own included
    windows = config.windows(kinds, window, num_layers)
    ropes = _ropes(config)
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(
        **sizes.heads,
        qk_norm="head",
        bias=attention_bias,
        output_bias=attention_bias,
        scale=1.0 / math.sqrt(config.number("query_pre_attn_scalar", 256)),
    )
    mlp = MlpConfig(size=sizes.inner, activation=Activation("gelu_tanh"))
    return DecoderConfig(
        **sizes.decoder,
        layers=layers_with(attention, mlp, windows, [ropes[kind] for kind in kinds]),
        branch_norms=True,
        causal=not both_sides,
        logit_softcap=config.optional_number("final_logit_softcapping"),
        embedding_scale=math.sqrt(sizes.decoder["hidden_size"]),
        rounds_embedding_scale=True,
    )


def _ropes(config: ConfigReader) -> dict[str, dict[str, Any]]:
    """Return the RoPE parameters of each kind of layer. Older configs scale only those of full attention."""
    nested = config.mapping("rope_parameters")
    scaling = config.mapping("rope_scaling")
    thetas = {
        "full_attention": config.number("rope_theta", 1_000_000.0),
        "sliding_attention": config.number("rope_local_base_freq", 10_000.0),
    }
    if not nested.keys() <= thetas.keys():
        raise ModelError(
            f"config.json: rope_parameters is {nested!r}; family {config.family!r} serves one object for each of "
            f"{', '.join(thetas)}"
        )
    ropes = {}
    for kind, theta in thetas.items():
        given = nested.get(kind) or {}
        if not isinstance(given, dict):
            raise ModelError(f"config.json: rope_parameters' {kind} is {given!r}; it must be an object")
        ropes[kind] = {"rope_theta": theta} | given | (scaling if kind == "full_attention" else {})
        check_rope(ropes[kind])
        check_whole_heads(config, ropes[kind])
    return ropes


weight_sources = llama.sources_with(gemma2.weight_sources, llama.HEAD_NORMS)
