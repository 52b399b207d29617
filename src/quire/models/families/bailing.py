"""Ling 3: Kimi delta attention in most layers, latent attention whose heads are gated in the others; experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.models.decoder_config import DecoderConfig, LatentConfig, LayerConfig
from quire.models.families import kimi_linear, llama
from quire.models.families.glm4_moe import EXPERTS, listed_mlps
from quire.models.families.llama import read_sizes, whole_rope
from quire.models.hf_config import ConfigReader
from quire.models.state_config import KeyDecayConfig
from quire.models.weights import Sources

DEFAULTS = {
    "vocab_size": 157_184,
    "num_experts": 512,
    "topk_group": 4,
    "num_expert_group": 8,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 768,
}
# They follow from other keys, or are for training or draft tokens.
UNREAD = "auto_map model_max_length mtp_loss_scaling_factor num_nextn_predict_layers qk_head_dim rope_theta".split()


def decoder_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """Return the decoder that a config.json describes. Raises ModelError for an unknown key or an invalid value."""
    longest = raw.get("model_max_length") or raw.get("max_position_embeddings") or 2**18
    config = ConfigReader({**DEFAULTS, **raw, "max_position_embeddings": longest}, "bailing")
    sizes = read_sizes(config)
    rope = {"rope_theta": 6e6} | whole_rope(config)
    config.only("hidden_act", "silu")
    config.only("attention_bias", False)
    for key in UNREAD:
        config.get(key)
    heads, count = sizes.heads["num_heads"], sizes.num_layers
    plain_dim, rope_dim = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    latent = LatentConfig(
        num_heads=heads,
        latent=config.integer("kv_lora_rank", 512),
        rope_dim=rope_dim,
        plain_dim=plain_dim,
        v_dim=config.integer("v_head_dim", 128),
        q_rank=None,
        rope=rope,
        bias=False,
        scale=(plain_dim + rope_dim) ** -0.5,
        head_gated=True,
    )
    bounded, floor = config.flag("kda_safe_gate", True), config.get("kda_lower_bound", -5.0)
    if not isinstance(floor, float) or not -1e3 <= floor < 0.0:
        raise config.error("kda_lower_bound", "a negative number from -1000 on", floor)
    state = KeyDecayConfig(
        num_heads=config.integer("linear_num_heads", heads),
        head_dim=config.integer("linear_head_dim", config.integer("head_dim", 128)),
        taps=config.integer("linear_conv_kernel_dim", config.integer("short_conv_kernel_size", 4)),
        rank=None,
        floor=floor if bounded else 0.0,
        norm_eps=sizes.decoder["norm_eps"],
    )
    every = config.integer("layer_group_size", 6)
    usual = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    mixers: dict[str, LatentConfig | KeyDecayConfig] = {"full_attention": latent, "linear_attention": state}
    experts = kimi_linear.read_experts(config)
    mlps = listed_mlps(config, sizes.inner, experts, config.count("first_k_dense_replace", 2), count)
    both = zip(config.of_layers(mixers, config.texts("layer_types", usual), count), mlps, strict=True)
    decoder = DecoderConfig(**sizes.decoder, layers=tuple(LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in both))
    config.finish()
    return decoder


def weight_sources(config: DecoderConfig, names: frozenset[str]) -> Sources:
    """Map the decoder's weights to the tensors of a checkpoint that has tensors of these names."""
    theirs = kimi_linear.weight_sources(config, names)
    state = {"state_in": tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "f", "g", "b"))}
    output = dict.fromkeys(("output", "state_out"), ("self_attn.dense",))
    ours = {**theirs.layer, **state, **output}
    layer = {part: tuple(name.replace("self_attn", "attention") for name in named) for part, named in ours.items()}
    layer |= {**EXPERTS, "correction": ("mlp.gate.expert_bias",)}
    ends = {**theirs.ends, "embedding": "model.word_embeddings.weight"}
    renamed = {".attention.dense": ".self_attn.o_proj", ".attention.f_": ".self_attn.forget_gate.f_"}
    renamed |= {".attention.": ".self_attn."}
    return replace(theirs, layer=layer, ends=ends, ignored=llama.beyond(config), renamed=renamed)
