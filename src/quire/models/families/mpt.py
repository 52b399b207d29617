"""MPT: ALiBi, LayerNorm and linears without biases, a plain GELU MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = {
    "input_norm": ("norm_1",),
    "qkv": ("attn.Wqkv",),
    "output": ("attn.out_proj",),
    "mlp_norm": ("norm_2",),
    "mlp_in": ("ffn.up_proj",),
    "mlp_out": ("ffn.down_proj",),
}
ENDS = {
    "embedding": "transformer.wte.weight",
    "final_norm.weight": "transformer.norm_f.weight",
    "lm_head": "lm_head.weight",
}


@reads("mpt")
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    hidden_size = config.integer("d_model", 2048)
    num_heads = config.heads("n_heads", hidden_size)
    config.only("expansion_ratio", 4)
    config.only("no_bias", True)
    config.only("norm_type", "low_precision_layernorm")
    config.only("embedding_fraction", 1.0)
    # transformers' code always uses ALiBi. The other keys are settings of the original implementation and training.
    for key in ("auto_map", "emb_pdrop", "init_config", "init_device", "learned_pos_emb", "tokenizer_name", "verbose"):
        config.get(key)
    config.only("logit_scale", None)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        scale=_read_scale(config.mapping("attn_config")),
    )
    mlp = MlpConfig(size=4 * hidden_size, activation=Activation("gelu", gated=False))
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("max_seq_len", 2048),
        layers=(LayerConfig(mixer=attention, mlp=mlp),) * config.integer("n_layers"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        alibi_slopes=alibi_slopes(num_heads),
        norm="layer",
        norm_bias=False,
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
    )


def _read_scale(raw: Mapping[str, Any]) -> float | None:
    """Return the scale of the scores. Raises ModelError for any other setting of attention that is not the default."""
    config = ConfigReader(raw, "mpt", place="config.json: attn_config")
    config.only("attn_type", "multihead_attention")
    config.only("alibi", True)
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        config.only(key, False)
    config.only("clip_qkv", None)
    for key in ("attn_impl", "attn_pdrop"):  # for the original implementation; for training
        config.get(key)
    config.only("alibi_bias_max", 8)
    scale = config.optional_number("softmax_scale")
    config.finish()
    return scale


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return powers of 2^(-8 / n), with n a power of two. With fewer than n heads, every second one comes first."""
    n = 2 ** math.ceil(math.log2(num_heads))
    slopes = tuple(2.0 ** (-8.0 * (i + 1) / n) for i in range(n))
    return slopes if n == num_heads else (slopes[1::2] + slopes[::2])[:num_heads]


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    return Sources(ENDS, "transformer.blocks.{}.", LAYER)
