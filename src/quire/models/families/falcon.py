"""Falcon: parallel attention and MLP, RoPE, LayerNorm, one fused QKV projection by groups of heads."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.gpt2 import ACTIVATIONS
from quire.models.families.llama import whole_rope
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = {
    "qkv": ("self_attention.query_key_value",),
    "output": ("self_attention.dense",),
    "mlp_in": ("mlp.dense_h_to_4h",),
    "mlp_out": ("mlp.dense_4h_to_h",),
}
ONE_NORM = {"input_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",)}
TWO_NORMS = {"input_norm": ("ln_attn",), "mlp_norm": ("ln_mlp",)}


@reads("falcon")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    hidden_size = config.integer("hidden_size", config.get("n_embed"))
    num_heads = config.heads("num_attention_heads", hidden_size)
    config.only("alibi", False)  # ALiBi models were trained with slopes rounded to bfloat16, as in transformers
    config.only("apply_residual_connection_post_layernorm", False)
    config.get("auto_map")  # custom code of the first checkpoints, which is now part of transformers
    activation = config.get("activation", "gelu")
    config.only("activation", *ACTIVATIONS)
    bias, grouped = config.flag("bias"), config.flag("new_decoder_architecture")
    num_kv_heads = config.integer("num_kv_heads", num_heads)
    if not grouped:
        num_kv_heads = 1 if config.flag("multi_query", True) else num_heads
    config.get("multi_query")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        rope=whole_rope(config),
        bias=bias,
        output_bias=bias,
    )
    mlp = MlpConfig(
        size=config.integer("ffn_hidden_size", 4 * hidden_size),
        activation=Activation(ACTIVATIONS[activation], gated=False),
        bias=bias,
    )
    parallel = config.flag("parallel_attn", True)
    if grouped:
        config.only("parallel_attn", True)
    norms = config.integer("num_ln_in_parallel_attn", 2 if grouped else 1)
    config.only("num_ln_in_parallel_attn", *((1, 2) if grouped else (1,)))
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_position_embeddings", 2048),
        layers=(LayerConfig(mixer=attention, mlp=mlp),) * config.integer("num_hidden_layers"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        branches="in turn" if not parallel else "parallel" if norms == 2 else "parallel, one norm",
    )


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    ends = {
        "embedding": "transformer.word_embeddings.weight",
        "final_norm.weight": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
        "lm_head": "lm_head.weight",
    }
    layer = LAYER | (TWO_NORMS if config.branches == "parallel" else ONE_NORM)
    return Sources(ends, "transformer.h.{}.", layer, adapt=partial(_adapt, config))


def _adapt(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Reorder each group's queries, key and value to all of q, all of k, all of v."""
    if ".qkv." not in name:
        return tensor
    heads = config.attention[0].heads
    groups = tensor.view(heads.num_kv_heads, -1, heads.head_dim, *tensor.shape[1:])
    return torch.cat([groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)])
