"""MiniMax-Text-01: lightning attention in most layers, softmax attention in the others; experts, post-norms."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families import mixtral
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader, reads
from quire.models.state_config import LightningConfig
from quire.models.weights import Sources

LAYER = {
    "state_in": ("self_attn.qkv_proj", "self_attn.output_gate"),
    "gate_norm": ("self_attn.norm",),
    "state_out": ("self_attn.out_proj",),
}
TOGETHER = {  # one tensor has the weights of all experts
    "router": ("mlp.gate",),
    "experts.mlp_in.weight": ("mlp.experts.gate_up_proj[{}]",),
    "experts.mlp_out.weight": ("mlp.experts.down_proj[{}]",),
}
# Numbers that follow from the number of heads and of the layer.
UNUSED = re.compile(r"model\.layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)")


@reads("minimax", max_position_embeddings=4096 * 32, rms_norm_eps=1e-5)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes, rope = read_sizes(config, num_kv_heads=8), {"rope_theta": 1e6} | whole_rope(config)
    config.only("hidden_act", "silu")
    for key in ("router_aux_loss_coef", "router_jitter_noise", "block_size"):  # for training, and for a kernel
        config.get(key)
    experts = ExpertsConfig(
        count=config.integer("num_local_experts", 8),
        per_token=config.integer("num_experts_per_tok", 2),
        mlp=MlpConfig(size=sizes.inner),
        renormalised=True,
    )
    attention = AttentionConfig(**sizes.heads, window=config.window("sliding_window"), rope=rope)
    scales = {
        name: (config.number(f"{name}_alpha_factor", 1.0), config.number(f"{name}_beta_factor", 1.0))
        for name in ("full_attn", "linear_attn", "mlp")
    }
    usual = ["linear_attention" if i % 2 else "full_attention" for i in range(sizes.num_layers)]
    kinds = {"full_attention": True, "linear_attention": False}
    layers = []
    for i, full in enumerate(config.of_layers(kinds, config.texts("layer_types", usual), sizes.num_layers)):
        mixer = attention if full else _lightning(attention, i, sizes.num_layers)
        own = scales["full_attn" if full else "linear_attn"]
        layers.append(LayerConfig(mixer=mixer, mlp=experts, mixer_scales=own, mlp_scales=scales["mlp"]))
    return DecoderConfig(**sizes.decoder, layers=tuple(layers), norms_residual=True)


def _lightning(attention: AttentionConfig, index: int, num_layers: int) -> LightningConfig:
    """Return the linear attention of a layer, whose heads forget more slowly in later layers."""
    heads, factor = attention.num_heads, 1 - index / (num_layers - 1 + 1e-5) + 1e-5
    slopes = tuple(2.0 ** (-8 * (head + 1) / heads) * factor for head in range(heads))
    return LightningConfig(num_heads=heads, head_dim=attention.head_dim, slopes=slopes, norm_eps=1e-6)


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = mixtral.weight_sources(config, names)
    together = TOGETHER if any(name.endswith(".experts.gate_up_proj") for name in names) else {}
    return replace(theirs, layer={**theirs.layer, **LAYER, **together}, ignored=UNUSED, adapt=partial(_adapt, config))


def _adapt(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    """Reorder rows: all values, then all keys and all queries, instead of q, k and v of each head."""
    mixer = config.layers[int(name.split(".")[1])].mixer if ".qkv_proj." in part else None
    if not isinstance(mixer, LightningConfig):
        return tensor
    heads = tensor.unflatten(0, (mixer.num_heads, 3, mixer.head_dim))  # type: ignore[no-untyped-call]
    return torch.cat([heads[:, i].flatten(0, 1) for i in (2, 1, 0)])
