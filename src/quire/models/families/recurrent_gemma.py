"""RecurrentGemma: real-gated linear recurrent units in most layers, attention to a window in the others."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, LayerConfig, MlpConfig
from quire.models.families.bamba import adapted as space_adapted
from quire.models.families.llama import read_sizes, rope_parameters
from quire.models.hf_config import ConfigReader, reads
from quire.models.state_config import LinearUnitConfig
from quire.models.weights import Sources
from quire.ops.activation import Activation

ENDS = {
    "embedding": "model.embed_tokens.weight",
    "final_norm.weight": "model.final_norm.weight",
    "lm_head": "lm_head.weight",
}
LAYER = {
    "input_norm": ("temporal_pre_norm",),
    "qkv": tuple(f"temporal_block.{name}_proj" for name in "qkv"),
    "output": ("temporal_block.o_proj",),
    "state_in": ("temporal_block.linear_x", "temporal_block.linear_y"),
    "conv": ("temporal_block.conv_1d",),
    "A_log": ("temporal_block.rg_lru.recurrent_param",),
    "decay_heads": ("temporal_block.rg_lru.recurrent_gate_weight",),
    "decay_bias": ("temporal_block.rg_lru.recurrent_gate_bias",),
    "input_heads": ("temporal_block.rg_lru.input_gate_weight",),
    "input_bias": ("temporal_block.rg_lru.input_gate_bias",),
    "state_out": ("temporal_block.linear_out",),
    "mlp_norm": ("channel_pre_norm",),
    "mlp_in": ("mlp_block.gate_proj", "mlp_block.up_proj"),
    "mlp_out": ("mlp_block.down_proj",),
}


@reads(
    "recurrent_gemma",
    vocab_size=256_000,
    hidden_size=2560,
    intermediate_size=7680,
    num_attention_heads=10,
    num_hidden_layers=26,
    max_position_embeddings=2**20,
)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, tied=True)
    rope = {"partial_rotary_factor": 0.5} | rope_parameters(config)
    config.only("hidden_activation", "gelu_pytorch_tanh")
    for key in ("w_init_variance_scale", "final_w_init_variance_scale"):
        config.get(key)  # for the initial weights
    hidden_size, gelu = sizes.decoder["hidden_size"], Activation("gelu_tanh", gated=False)
    window = config.window("attention_window_size", 2048)
    bias = config.flag("attention_bias")
    attention = AttentionConfig(**sizes.heads, window=window, rope=rope, bias=bias, output_bias=True)
    state = LinearUnitConfig(
        width=config.integer("lru_width", hidden_size),
        num_heads=sizes.heads["num_heads"],
        taps=config.integer("conv1d_width", 4),
        activation=gelu,
    )
    if sizes.inner % 2:
        raise config.error("intermediate_size", "even: gate and up are a half of it each", sizes.inner)
    mlp = MlpConfig(size=sizes.inner // 2, activation=Activation("gelu_tanh"), bias=True)
    mixers: dict[str, AttentionConfig | LinearUnitConfig] = {"attention": attention, "recurrent": state}
    kinds = config.texts("block_types") or config.texts("_block_types", ["recurrent", "recurrent", "attention"])
    config.get("_block_types")
    repeated = [kinds[i % len(kinds)] for i in range(sizes.num_layers)]
    layers = (LayerConfig(mixer=mixer, mlp=mlp) for mixer in config.of_layers(mixers, repeated, sizes.num_layers))
    return DecoderConfig(
        **sizes.decoder,
        layers=tuple(layers),
        embedding_scale=float(torch.tensor(hidden_size**0.5).bfloat16()),  # in every dtype
        logit_softcap=config.number("logits_soft_cap", 30.0),
    )


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    return Sources(ENDS, "model.layers.{}.", LAYER, adapt=_adapt)


def _adapt(name: str, part: str, tensor: Tensor) -> Tensor:
    """Convert a tensor to our layout: norms add 1 to their weights."""
    return tensor.float() + 1.0 if name.endswith("norm.weight") else space_adapted(name, part, tensor)
