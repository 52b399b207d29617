"""Gemma 2: capped scores and logits, windows in every other layer, norms around each branch, a GELU gate."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, MlpConfig, layers_with
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = {
    "output_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_output_norm": ("post_feedforward_layernorm",),
}


@reads("gemma2", max_position_embeddings=8192)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=4, head_dim=256, tied=True), whole_rope(config)
    num_layers = sizes.num_layers
    config.only("hidden_act", "gelu_pytorch_tanh")  # older configs have it in addition to hidden_activation
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("use_bidirectional_attention", False)
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
    window = config.window("sliding_window", 4096)
    config.only("sliding_window_size", window)  # some configs repeat the value under this key
    attention_bias = config.flag("attention_bias")
    attention = AttentionConfig(
        **sizes.heads,
        bias=attention_bias,
        output_bias=attention_bias,
        scale=1.0 / math.sqrt(config.number("query_pre_attn_scalar", 256)),
        softcap=cap(config, "attn_logit_softcapping", 50.0),
    )
    mlp = MlpConfig(size=sizes.inner, activation=Activation("gelu_tanh"))
    windows = config.windows(config.texts("layer_types", alternating), window, num_layers)
    return DecoderConfig(
        **sizes.decoder,
        layers=layers_with(attention, mlp, windows, (rope,) * num_layers),
        branch_norms=True,
        logit_softcap=cap(config, "final_logit_softcapping", 30.0),
        embedding_scale=math.sqrt(sizes.decoder["hidden_size"]),
        rounds_embedding_scale=True,
    )


def cap(config: ConfigReader, key: str, default: float) -> float | None:
    """Return the cap: None if the key is null, Gemma's default if it is missing."""
    return None if config.is_null(key) else config.number(key, default)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    return replace(theirs, layer={**theirs.layer, **LAYER}, adapt=one_plus)


def one_plus(name: str, part: str, tensor: Tensor) -> Tensor:
    """Add 1 to the weights of norms, as Gemma's norms multiply by 1 + weight."""
    return tensor.float() + 1.0 if "norm." in name else tensor
