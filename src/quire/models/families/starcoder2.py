"""StarCoder 2: grouped-query attention and RoPE as in Llama; LayerNorm, a plain GELU MLP and biases as in GPT-2."""

from __future__ import annotations

from dataclasses import replace

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = {"mlp_in": ("mlp.c_fc",), "mlp_out": ("mlp.c_proj",)}


@reads("starcoder2", max_position_embeddings=4096, norm_epsilon=1e-5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, num_kv_heads=2, tied=True, norm_eps="norm_epsilon")
    config.only("hidden_act", "gelu_pytorch_tanh")
    config.only("mlp_type", "default")
    config.only("norm_type", "layer_norm")
    config.only("scale_attn_weights", True)
    # Repeated values under unused names, settings for rounding, settings for training.
    for key in ("activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32",
                "scale_attention_softmax_in_fp32", "residual_dropout", "embedding_dropout"):  # fmt: skip
        config.get(key)
    use_bias = config.flag("use_bias", True)
    attention = AttentionConfig(
        **sizes.heads,
        window=config.window("sliding_window"),
        rope=whole_rope(config),
        bias=use_bias,
        output_bias=use_bias,
    )
    mlp = MlpConfig(size=sizes.inner, activation=Activation("gelu_tanh", gated=False), bias=use_bias)
    layer = LayerConfig(mixer=attention, mlp=mlp)
    return DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers, norm="layer")


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    ends = {**theirs.ends, "final_norm.bias": "model.norm.bias"}
    return replace(theirs, ends=ends, layer={**theirs.layer, **LAYER})
