"""EXAONE 4: norms after the branches, normalised q and k, and layers of full attention without RoPE."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, layers_with
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, reads

LAYER = {
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "output_norm": ("post_attention_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}


@reads("exaone4", rms_norm_eps=1e-5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=32), whole_rope(config)
    config.only("hidden_act", "silu")
    window = config.window("sliding_window", 4096)
    kinds = config.texts("layer_types", _by_pattern(config, window, sizes.num_layers))
    windows = config.windows(kinds, window, sizes.num_layers)
    ropes = [rope if window is None or own is not None else None for own in windows]
    attention = AttentionConfig(**sizes.heads, qk_norm="head")
    layers = layers_with(attention, MlpConfig(size=sizes.inner), windows, ropes)
    return DecoderConfig(**sizes.decoder, layers=layers, input_norms=False, branch_norms=True)


def _by_pattern(config: ConfigReader, window: int | None, num_layers: int) -> list[str]:
    """Return the layer types of older configs: every n-th has full attention, or, as in "LLLG", those with a G."""
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or not set(pattern) <= {"L", "G"}:
            raise config.error("sliding_window_pattern", "a number, or letters L and G", pattern)
        return [
            "full_attention" if pattern[i % len(pattern)] == "G" else "sliding_attention" for i in range(num_layers)
        ]
    every = 1 if window is None else config.integer("sliding_window_pattern", 4)
    return ["full_attention" if i % every == every - 1 else "sliding_attention" for i in range(num_layers)]


weight_sources = llama.sources_with(llama.weight_sources, LAYER)
