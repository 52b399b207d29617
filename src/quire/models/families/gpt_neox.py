"""GPT-NeoX, Pythia: parallel attention and MLP, a RoPE of a part of each head, LayerNorm."""

from __future__ import annotations

import re
from functools import partial

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import bloom, gpt2
from quire.models.families.llama import rope_parameters
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = {
    "input_norm": ("input_layernorm",),
    "qkv": ("attention.query_key_value",),
    "output": ("attention.dense",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp_in": ("mlp.dense_h_to_4h",),
    "mlp_out": ("mlp.dense_4h_to_h",),
}
ACTIVATIONS = {**gpt2.ACTIVATIONS, "gelu_fast": "gelu_tanh"}
BUFFERS = re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")  # of old checkpoints


@reads("gpt_neox", rotary_pct=0.25)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    hidden_size = config.integer("hidden_size")
    num_heads = config.heads("num_attention_heads", hidden_size)
    rope = rope_parameters(config, "rotary_emb_base", "rotary_pct")
    activation = config.get("hidden_act", "gelu")
    config.only("hidden_act", *ACTIVATIONS)
    for key in ("classifier_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob"):  # training
        config.get(key)
    attention_bias = config.flag("attention_bias", True)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        rope=rope,
        bias=attention_bias,
        output_bias=attention_bias,
    )
    mlp = MlpConfig(
        size=config.integer("intermediate_size"),
        activation=Activation(ACTIVATIONS[activation], gated=False),
        bias=True,
    )
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        layers=(LayerConfig(mixer=attention, mlp=mlp),) * config.integer("num_hidden_layers"),
        tied_embeddings=config.flag("tie_word_embeddings"),
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        branches="parallel" if config.flag("use_parallel_residual", True) else "in turn",
    )


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    ends = {
        "embedding": "gpt_neox.embed_in.weight",
        "final_norm.weight": "gpt_neox.final_layer_norm.weight",
        "final_norm.bias": "gpt_neox.final_layer_norm.bias",
        "lm_head": "lm_head.weight" if "lm_head.weight" in names else "embed_out.weight",
    }
    return Sources(ends, "gpt_neox.layers.{}.", LAYER, BUFFERS, partial(bloom.apart, config))
