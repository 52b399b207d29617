"""Nemotron: LayerNorms that multiply by 1 + weight, squared ReLU without a gate, a RoPE of a part of each head."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import read_sizes, rope_parameters
from quire.models.hf_config import ConfigReader, reads
from quire.models.weights import Sources
from quire.ops.activation import Activation

LAYER = {"mlp_in": ("mlp.up_proj",)}


@reads("nemotron", max_position_embeddings=4096, norm_eps=1e-5, partial_rotary_factor=0.5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, norm_eps="norm_eps"), rope_parameters(config)
    config.only("hidden_act", "relu2")
    bias = config.flag("attention_bias")
    attention = AttentionConfig(**sizes.heads, rope=rope, bias=bias, output_bias=bias)
    activation = Activation("relu_squared", gated=False)
    mlp = MlpConfig(size=sizes.inner, activation=activation, bias=config.flag("mlp_bias"))
    layer = LayerConfig(mixer=attention, mlp=mlp)
    return DecoderConfig(**sizes.decoder, layers=(layer,) * sizes.num_layers, norm="layer")


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    ends = {**theirs.ends, "final_norm.bias": "model.norm.bias"}
    return replace(theirs, ends=ends, layer={**theirs.layer, **LAYER}, adapt=_one_plus)


def _one_plus(name: str, part: str, tensor: Tensor) -> Tensor:
    """Add 1 to the weights of norms, which are stored as differences from 1."""
    return tensor.float() + 1.0 if name.endswith("norm.weight") else tensor
