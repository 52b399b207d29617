"""GPT-J: both branches share a norm, RoPE of neighbouring pairs of a part of each head, a bias of the logits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.gpt2 import ACTIVATIONS
from quire.models.families.pairs import pairs_apart
from quire.models.hf_config import ConfigReader
from quire.models.rope import share_of
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = {
    "input_norm": ("ln_1",),
    "qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "output": ("attn.out_proj",),
    "mlp_in": ("mlp.fc_in",),
    "mlp_out": ("mlp.fc_out",),
}
ENDS = {
    "embedding": "transformer.wte.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "lm_head": "lm_head.weight",
    "lm_head.bias": "lm_head.bias",
}
BUFFERS = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias|causal_mask|embed_positions)")  # of old checkpoints


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    config = ConfigReader(raw, "gptj")
    hidden_size = config.integer("n_embd")
    num_heads = config.heads("n_head", hidden_size)
    head_dim = hidden_size // num_heads
    activation = config.get("activation_function", "gelu_new")
    config.only("activation_function", *ACTIVATIONS)
    for key in ("rotary", "scale_attn_weights"):
        config.only(key, True)
    config.only("tie_word_embeddings", False)
    for key in ("n_ctx", "attn_pdrop"):  # equal to n_positions; for training
        config.get(key)
    for key in raw:
        if key.startswith("summary_"):  # a classifier's head
            config.get(key)
    share = share_of(config.integer("rotary_dim", 64), head_dim)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        rope={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share},
    )
    mlp = MlpConfig(
        size=config.integer("n_inner", 4 * hidden_size),
        activation=Activation(ACTIVATIONS[activation], gated=False),
        bias=True,
    )
    decoder = DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("n_positions", 2048),
        layers=(LayerConfig(mixer=attention, mlp=mlp),) * config.integer("n_layer"),
        tied_embeddings=False,
        head_bias=True,
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        branches="parallel, one norm",
    )
    config.finish()
    return decoder


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    return Sources(ENDS, "transformer.h.{}.", LAYER, BUFFERS, partial(pairs_apart, config))
