"""GPT-2: learned positions, LayerNorm, one fused QKV projection, a plain GELU MLP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.hf_config import ConfigReader
from quire.models.weights import Sources
from quire.ops.activation import Activation, Function

LAYER = {
    "input_norm": ("ln_1",),
    "qkv": ("attn.c_attn",),
    "output": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "mlp_in": ("mlp.c_fc",),
    "mlp_out": ("mlp.c_proj",),
}
ACTIVATIONS: dict[str, Function] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    config = ConfigReader(raw, "gpt2")
    hidden_size = config.integer("n_embd")
    num_heads = config.heads("n_head", hidden_size)
    activation = config.get("activation_function", "gelu_new")
    config.only("activation_function", *ACTIVATIONS)
    config.only("scale_attn_weights", True)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.only("add_cross_attention", False)
    config.only("n_special", 0)
    for key in ("n_ctx", "attn_pdrop", "reorder_and_upcast_attn"):  # equal to n_positions, for training, for rounding
        config.get(key)
    for key in raw:
        if key.startswith("summary_"):  # a classifier's head
            config.get(key)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        bias=True,
        output_bias=True,
    )
    mlp = MlpConfig(
        size=config.integer("n_inner", 4 * hidden_size),
        activation=Activation(ACTIVATIONS[activation], gated=False),
        bias=True,
    )
    decoder = DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=config.integer("n_positions", 1024),
        layers=(LayerConfig(mixer=attention, mlp=mlp),) * config.integer("n_layer"),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        learned_positions=True,
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
    )
    config.finish()
    return decoder


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    # OpenAI's checkpoints have the names of the bare transformer, without a prefix.
    prefix = "transformer." if any(name.startswith("transformer.") for name in names) else ""
    ends = {
        "embedding": f"{prefix}wte.weight",
        "positions": f"{prefix}wpe.weight",
        "final_norm.weight": f"{prefix}ln_f.weight",
        "final_norm.bias": f"{prefix}ln_f.bias",
        "lm_head": "lm_head.weight",
    }
    masks = re.compile(rf"{re.escape(prefix)}h\.\d+\.attn\.(masked_)?bias")
    return Sources(ends, f"{prefix}h.{{}}.", LAYER, masks, _adapt)


def _adapt(name: str, part: str, tensor: Tensor) -> Tensor:
    """Transpose projections, which GPT-2 stores as [in, out]."""
    return tensor.T if tensor.dim() == 2 and name.startswith("layers.") else tensor
