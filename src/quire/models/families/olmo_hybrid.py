"""OLMo Hybrid: the gated delta rule after norms in most layers, attention before norms in the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import llama, olmo2
from quire.models.families.bamba import adapted
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, reads
from quire.models.state_config import GatedDeltaConfig
from quire.models.weights import Sources

LAYER = {
    "state_in": tuple(f"linear_attn.{name}_proj" for name in "qkvgba"),
    "": ("linear_attn",),  # vectors of the state
    "gate_norm": ("linear_attn.o_norm",),
    "state_out": ("linear_attn.o_proj",),
}
APART = {"conv": tuple(f"linear_attn.{name}_conv1d" for name in "qkv")}


@reads("olmo_hybrid", max_position_embeddings=65_536)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config), _rope(config)
    config.only("hidden_act", "silu")
    for key in ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"):
        config.get(key)  # for the initial weights
    bias, heads = config.flag("attention_bias"), sizes.heads["num_heads"]
    attention = AttentionConfig(**sizes.heads, rope=rope, qk_norm="all heads", bias=bias, output_bias=bias)
    key_heads = config.integer("linear_num_key_heads", heads)
    dim_k = config.integer("linear_key_head_dim", int(0.75 * sizes.decoder["hidden_size"] / key_heads))
    state = GatedDeltaConfig(
        num_heads=config.integer("linear_num_value_heads", heads),
        num_k_heads=key_heads,
        dim_k=dim_k,
        dim_v=config.integer("linear_value_head_dim", 2 * dim_k),
        taps=config.integer("linear_conv_kernel_dim", 4),
        apart=True,
        beta_scale=2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0,
        norm_eps=1e-5,
    )
    mlp = MlpConfig(size=sizes.inner)
    layers = {
        "full_attention": LayerConfig(mixer=attention, mlp=mlp, norms="after"),
        "linear_attention": LayerConfig(mixer=state, mlp=mlp, norms="before"),
    }
    usual = ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(sizes.num_layers)]
    kinds = config.of_layers(layers, config.texts("layer_types", usual), sizes.num_layers)
    return DecoderConfig(**sizes.decoder, layers=tuple(kinds))


def _rope(config: ConfigReader) -> dict[str, Any] | None:
    """Return the RoPE parameters; None without RoPE, as in the published checkpoints."""
    plain = config.is_null("rope_parameters") or "rope_theta" in (given := config.mapping("rope_parameters"))
    rope = whole_rope(config)
    return None if plain and (config.is_null("rope_parameters") or given["rope_theta"] is None) else rope


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    return replace(theirs, parts=_Parts(config, names), layer={**theirs.layer, **olmo2.LAYER, **LAYER}, adapt=adapted)


class _Parts:
    """The tensors of parts whose names depend on the kind of the layer."""

    def __init__(self, config: DecoderConfig, names: frozenset[str]) -> None:
        old = not any(".attention_layer_norm." in name for name in names)  # as transformers names them
        apart = any(".q_conv1d." in name for name in names)
        self._config = config
        self._of_state = {
            "input_norm": ("input_layernorm" if old else "attention_layer_norm",),
            "mlp_norm": ("post_attention_layernorm" if old else "feedforward_layer_norm",),
            "conv": APART["conv"] if apart else ("linear_attn.conv1d",),
        }
        self._of_attention = {"output_norm": ("post_attention_layernorm" if old else "feedforward_layer_norm",)}

    def __call__(self, layer: int, part: str) -> tuple[str, ...] | None:
        """Return the tensors of a part of a layer; None: they are the same in all layers."""
        is_state = isinstance(self._config.layers[layer].mixer, GatedDeltaConfig)
        return (self._of_state if is_state else self._of_attention).get(part)
