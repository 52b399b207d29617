"""Llama 4's text part: chunked attention in most layers, no RoPE in the others, experts with weighted inputs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import Tensor

from quire.models.decoder_config import AttentionConfig, DecoderConfig, ExpertsConfig, LayerConfig, MlpConfig
from quire.models.families import llama
from quire.models.families.llama import Sizes, read_sizes, whole_rope
from quire.models.families.pairs import pairs_apart
from quire.models.hf_config import ConfigReader, reads
from quire.models.rope import Temperature
from quire.models.weights import Sources

LAYER = {
    "mlp_in": ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "mlp_out": ("feed_forward.down_proj",),
    "router": ("feed_forward.router",),
    "experts.mlp_in": ("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    "experts.mlp_out": ("feed_forward.experts.{}.down_proj",),
    "shared.mlp_in": ("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    "shared.mlp_out": ("feed_forward.shared_expert.down_proj",),
}
TOGETHER = {  # one tensor has the weights of all experts, [in, out] each
    "experts.mlp_in.weight": ("feed_forward.experts.gate_up_proj[{}]",),
    "experts.mlp_out.weight": ("feed_forward.experts.down_proj[{}]",),
}


@reads("llama4", max_position_embeddings=131_072, rms_norm_eps=1e-5, rope_theta=500_000.0)
def decoder_config(config: ConfigReader) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    sizes = read_sizes(config, num_kv_heads=8, head_dim=128)
    config.only("hidden_act", "silu")
    config.only("for_llm_compressor", False)
    for key in ("router_aux_loss_coef", "router_jitter_noise"):  # for training
        config.get(key)
    mixers, mlps = _mixers(config, sizes), _mlps(config, sizes)
    layers = tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True))
    return DecoderConfig(**sizes.decoder, layers=layers)


def _mixers(config: ConfigReader, sizes: Sizes) -> list[AttentionConfig]:
    bias, rope = config.flag("attention_bias"), whole_rope(config)
    plain = AttentionConfig(**sizes.heads, bias=bias, output_bias=bias)
    turned = replace(plain, rope=rope, qk_norm="head, no weight" if config.flag("use_qk_norm", True) else None)
    scale, floor = config.number("attn_scale", 0.1), config.number("floor_scale", 8192)
    config.only("attn_temperature_tuning", True, False, 4)  # the first configs have 4, which means True
    if config.get("attn_temperature_tuning", True):
        plain = replace(plain, temperature=Temperature(scale, floor))
    every = config.integer("no_rope_layer_interval", 4)
    rotated = config.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(sizes.num_layers)]
    if not isinstance(rotated, list) or len(rotated) != sizes.num_layers or any(one not in (0, 1) for one in rotated):
        wanted = f"a list of 1, or 0 for a layer without RoPE, for each of {sizes.num_layers} layers"
        raise config.error("no_rope_layers", wanted, rotated)
    chunk = config.window("attention_chunk_size", 8192)
    usual = ["chunked_attention" if one else "full_attention" for one in rotated]
    kinds = {"chunked_attention": True, "full_attention": False}
    chunked = config.of_layers(kinds, config.texts("layer_types", usual), sizes.num_layers)
    mixers = zip([turned if one else plain for one in rotated], chunked, strict=True)
    return [replace(mixer, window=chunk, chunked=True) if one else mixer for mixer, one in mixers]


def _mlps(config: ConfigReader, sizes: Sizes) -> list[MlpConfig | ExpertsConfig]:
    dense = MlpConfig(size=config.integer("intermediate_size_mlp", 16_384))
    experts = ExpertsConfig(
        count=config.integer("num_local_experts", 16),
        per_token=config.integer("num_experts_per_tok", 1),
        mlp=MlpConfig(size=sizes.inner),
        renormalised=False,
        scores="sigmoid",
        weighed="inputs",
        shared=MlpConfig(size=sizes.inner),
    )
    step = config.integer("interleave_moe_layer_step", 1)
    sparse = config.layers("moe_layers", list(range(step - 1, sizes.num_layers, step)))
    return [experts if i in sparse else dense for i in range(sizes.num_layers)]


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = llama.weight_sources(config, names)
    layer = {**theirs.layer, **LAYER}
    if any(name.endswith(".feed_forward.experts.gate_up_proj") for name in names):
        layer |= TOGETHER
    return replace(theirs, layer=layer, adapt=partial(_adapt, config))


def _adapt(config: DecoderConfig, name: str, part: str, tensor: Tensor) -> Tensor:
    return tensor.T if "[" in part else pairs_apart(config, name, part, tensor)
