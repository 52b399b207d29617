"""OPT: GPT-2's shape with ReLU, separate projections, and a table of positions that begins with two unused rows."""

from __future__ import annotations

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.gpt2 import ACTIVATIONS
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources
from quire.ops.activation import Activation, Function

LAYER = {
    "input_norm": ("self_attn_layer_norm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.out_proj",),
    "mlp_norm": ("final_layer_norm",),
    "mlp_in": ("fc1",),
    "mlp_out": ("fc2",),
}
FUNCTIONS: dict[str, Function] = {**ACTIVATIONS, "relu": "relu"}
FIRST_POSITION = 2


@reads("opt")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    hidden_size = config.integer("hidden_size")
    num_heads = config.heads("num_attention_heads", hidden_size)
    activation = config.get("activation_function", "relu")
    config.only("activation_function", *FUNCTIONS)
    config.only("do_layer_norm_before", True)
    config.only("_remove_final_layer_norm", False)
    config.only("layer_norm_elementwise_affine", True)
    config.only("word_embed_proj_dim", hidden_size)
    for key in ("activation_dropout", "dropout", "init_std", "layerdrop"):  # training
        config.get(key)
    bias = config.flag("enable_bias", True)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        bias=bias,
        output_bias=bias,
    )
    mlp = MlpConfig(
        size=config.integer("ffn_dim"), activation=Activation(FUNCTIONS[activation], gated=False), bias=bias
    )
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        layers=(LayerConfig(mixer=attention, mlp=mlp),) * config.integer("num_hidden_layers"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        learned_positions=True,
        first_position=FIRST_POSITION,
        norm="layer",
        norm_eps=1e-5,
    )


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    prefix = "model.decoder." if any(name.startswith("model.decoder.") for name in names) else "decoder."
    ends = {
        "embedding": f"{prefix}embed_tokens.weight",
        "positions": f"{prefix}embed_positions.weight",
        "final_norm.weight": f"{prefix}final_layer_norm.weight",
        "final_norm.bias": f"{prefix}final_layer_norm.bias",
        "lm_head": "lm_head.weight",
    }
    return Sources(ends, f"{prefix}layers.{{}}.", LAYER)
