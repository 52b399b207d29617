"""Command R, R7B, A: both branches share a norm, RoPE of neighbouring pairs, no RoPE in layers of full attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, layers_with
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.families.pairs import pairs_apart
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources

THETA = {"rope_theta": 500_000.0}  # default of Command R


@reads("cohere2", max_position_embeddings=8192, layer_norm_eps=1e-5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, tied=True, norm_eps="layer_norm_eps"), whole_rope(config)
    config.only("hidden_act", "silu")
    config.only("use_qk_norm", False)
    for key in ("use_parallel_block", "use_embedding_sharing", "use_gated_activation"):
        config.only(key, True)
    config.get("use_parallel_embedding")  # a setting of the original implementation
    config.only("position_embedding_type", "rope_gptj")
    config.only("layer_switch", config.get("sliding_window_pattern", 4))  # has the same meaning
    config.only("rotary_pct", 1.0)
    config.only("order_of_interleaved_layers", "local_attn_first")
    bias = config.flag("attention_bias")
    attention, mlp = AttentionConfig(**sizes.heads, bias=bias, output_bias=bias), MlpConfig(size=sizes.inner)
    if "CohereForCausalLM" in config.texts("architectures"):
        layers = layers_with(attention, mlp, (None,) * sizes.num_layers, (THETA | rope,) * sizes.num_layers)
    else:
        windows = _windows(config, sizes.num_layers)
        layers = layers_with(attention, mlp, windows, [None if window is None else rope for window in windows])
    return DecoderConfig(
        **sizes.decoder,
        layers=layers,
        norm="layer",
        norm_bias=False,
        branches="parallel, one norm",
        logit_scale=config.number("logit_scale", 0.0625),
    )


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return each layer's window: by `layer_types`, or for all layers except every n-th."""
    every = config.integer("sliding_window_pattern", 4)
    alternating = ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(num_layers)]
    config.get("_sliding_window_pattern")  # already applied in layer_types
    return config.windows(config.texts("layer_types", alternating), config.window("sliding_window", 4096), num_layers)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    return replace(llama.weight_sources(config, names), adapt=partial(pairs_apart, config))
