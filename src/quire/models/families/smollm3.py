"""SmolLM3: Llama with some layers without RoPE, which may have windows."""

from __future__ import annotations

from quire.errors import ModelError
from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, layers_with
from quire.models.families.llama import read_sizes, weight_sources, whole_rope
from quire.models.hf_config import ConfigReader, reads

__all__ = ["decoder_config", "weight_sources"]


@reads("smollm3", max_position_embeddings=32_768, rope_theta=2_000_000.0)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=4, tied=True), whole_rope(config)
    rotated = _rotated(config, sizes.num_layers)
    config.only("hidden_act", "silu")
    config.get("max_window_layers")  # present in published configs, without effect
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(**sizes.heads, bias=attention_bias, output_bias=attention_bias)
    mlp = MlpConfig(size=sizes.inner, bias=config.flag("mlp_bias"))
    layers = layers_with(attention, mlp, _windows(config, rotated), [rope if turns else None for turns in rotated])
    return DecoderConfig(**sizes.decoder, layers=layers)


def _rotated(config: ConfigReader, num_layers: int) -> list[bool]:
    """Return, for each layer, whether it has RoPE: if `no_rope_layers` has a 1, by default all but every n-th."""
    every = config.integer("no_rope_layer_interval", 4)
    listed = config.get("no_rope_layers", [int((i + 1) % every != 0) for i in range(num_layers)])
    if not isinstance(listed, list) or len(listed) < num_layers or not all(turns in (0, 1) for turns in listed):
        raise config.error("no_rope_layers", f"a list with a 0 or a 1 for each of {num_layers} layers", listed)
    return [turns == 1 for turns in listed[:num_layers]]


def _windows(config: ConfigReader, rotated: list[bool]) -> tuple[int | None, ...]:
    """Return each layer's window: by `layer_types`, by default without RoPE, and only with `use_sliding_window`."""
    window = config.window("sliding_window")
    if not config.flag("use_sliding_window"):
        window = None
    kinds = ["full_attention" if turns or window is None else "sliding_attention" for turns in rotated]
    kinds = config.texts("layer_types", kinds)
    windows = config.windows(kinds, window, len(rotated))
    if window is None and "sliding_attention" in kinds:
        raise ModelError(
            "config.json: layer_types has sliding_attention, which needs a sliding_window, and use_sliding_window"
        )
    return windows
