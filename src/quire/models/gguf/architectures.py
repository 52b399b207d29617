"""The supported GGUF architectures: a table for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from quire.errors import ModelError
from quire.models.gguf.architecture import FACTORS, Architecture, Turns, numbers_of
from quire.models.gguf.metadata import Metadata
from quire.models.gguf.names import (
    ATTENTION,
    BACKBONE_ENDS,
    BERT_ENDS,
    CORRECTED_EXPERTS,
    ENDS,
    EXPERTS,
    FEED_FORWARD,
    FEED_FORWARD_EXPERTS,
    GATED_DELTA,
    GEMMA4,
    GEMMA_NORMS,
    GRANITE_EXPERTS,
    LATENT,
    LAYER,
    LAYER_AFTER,
    MIXER,
    MIXERS,
    MIXTRAL_EXPERTS,
    OWN_TENSORS,
    SELECTIVE,
    SELECTIVE_MIXER,
    SHARED_EXPERT,
    SHORT_CONVOLUTION,
    SHORT_CONVOLUTION_EXPERTS,
    STATE_SPACE,
    Names,
)
from quire.models.rope import share_of

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func
UNROTATED = 1e30  # divides the frequency of dimensions that are not rotated


def _attention_bias(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias")}


def _llama(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return _attention_bias(metadata, config) | {"mlp_bias": metadata.has("blk.0.ffn_gate.bias")}


def _gemma(deepest: int, _: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scale of scores. The largest model, identified by its layers, uses hidden size / heads."""
    width = config["hidden_size"] // config["num_attention_heads"]
    is_largest = config["num_hidden_layers"] == deepest
    return {"query_pre_attn_scalar": width if is_largest else config["head_dim"]}


def _gemma3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters", {})
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    found = _gemma(62, metadata, config) | {
        "rope_theta": rope.get("rope_theta", 1e6),
        "rope_local_base_freq": metadata.get("rope.freq_base_swa", 10_000.0),
        "rope_scaling": scaling or None,
        "rope_parameters": None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
    }
    windows = metadata.get("attention.sliding_window_pattern")
    if isinstance(windows, list):
        found["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in windows]
    elif windows is not None:
        found["sliding_window_pattern"] = windows
    return found


def _phi3(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    original = metadata.get("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = metadata.get("attention.sliding_window")
    return {"original_max_position_embeddings": original, "sliding_window": window or None}


def _qwen2vl(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    metadata.get("rope.dimension_sections")  # for images; in text, all sections have the same position
    return {}


def _exaone4(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window and the layers that have it; without a window, all layers have full attention."""
    window, slides = metadata.get("attention.sliding_window"), metadata.get("attention.sliding_window_pattern")
    found: dict[str, Any] = {"sliding_window": window or None}
    if isinstance(slides, list):
        found["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    elif slides is not None:
        raise metadata.error("attention.sliding_window_pattern", slides, "an array with layers of both kinds")
    return found


def _ernie(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": metadata.has("blk.0.attn_q.bias")}


def _gpt2(_: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the renamed keys, and None for keys that GPT-2 does not have."""
    renamed = {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "n_inner": "intermediate_size",
    }  # fmt: skip
    gone = (*renamed.values(), "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters")
    return {ours: config[usual] for ours, usual in renamed.items()} | dict.fromkeys(gone)


def _bert(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of token types, and None for keys that BERT does not have."""
    types = metadata.file.tensors.get("token_types.weight")
    gone = dict.fromkeys(("num_key_value_heads", "head_dim", "rms_norm_eps"))
    return {"type_vocab_size": 0 if types is None else types.shape[0]} | gone


def _starcoder2(metadata: Metadata, _: Mapping[str, Any]) -> dict[str, Any]:
    return {"use_bias": metadata.has("blk.0.attn_q.bias"), "rms_norm_eps": None}


def _qwen3_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return _attention_bias(metadata, config) | {"intermediate_size": config["intermediate_size"] or 1}


def _qwen35(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    metadata.get("rope.dimension_sections")  # for images; in text, all sections have the same position
    num_layers, every = config["num_hidden_layers"], metadata.integer("full_attention_interval", 4)
    linear = metadata.get("attention.recurrent_layers", [(i + 1) % every != 0 for i in range(num_layers)])
    if not isinstance(linear, list) or len(linear) < num_layers:
        raise metadata.error("attention.recurrent_layers", linear, f"an array with both kinds of {num_layers} layers")
    num_heads = metadata.integer("ssm.time_step_rank")
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in linear[:num_layers]],
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // num_heads,
    }


def _qwen35_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    _scores(metadata, SOFTMAX)
    return _qwen35(metadata, config) | {"intermediate_size": config["intermediate_size"] or 1}


def _scores(metadata: Metadata, served: int) -> None:
    """Raise ModelError if the router's scores are not those that are supported with this architecture."""
    if (found := metadata.get("expert_gating_func", served)) != served:
        raise metadata.error("expert_gating_func", found, f"{served} with this architecture")


def _qwen3_next_turns(metadata: Metadata) -> dict[str, Turns]:
    """Return the order of b and a: the value heads of a key head alternate between the two."""
    return {"ssm_ba": Turns(2, metadata.integer("ssm.time_step_rank") // metadata.integer("ssm.group_count"))}


def _granite(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read Granite 4 without recurrent layers, which is stored as Granite and still has the keys of a state."""
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        metadata.get(f"ssm.{key}")
    for key in ("expert_count", "expert_used_count"):
        if count := metadata.count(key):
            raise metadata.error(key, count, "0 with this architecture")
    metadata.get("expert_shared_feed_forward_length")  # repeats feed_forward_length
    return _llama(metadata, config)


def _granite_hybrid(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    counts = _counts(metadata, "attention.head_count_kv")
    shared = metadata.get("expert_shared_feed_forward_length", config["intermediate_size"])
    has_rope = metadata.get("rope.scaling.finetuned", True)
    return _attention_bias(metadata, config) | {
        **_mamba_sizes(metadata),
        "layer_types": ["attention" if count else "mamba" for count in counts],
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "shared_intermediate_size": shared,
        "position_embedding_type": "rope" if has_rope else "nope",
        "mamba_expand": _expansion(metadata, config),
    }


def _expansion(metadata: Metadata, config: Mapping[str, Any]) -> int:
    """Return a state's channels per number of a hidden state. Raises ModelError if that is no integer."""
    hidden_size, inner = config["hidden_size"], metadata.integer("ssm.inner_size")
    if inner % hidden_size:
        raise metadata.error("ssm.inner_size", inner, f"a multiple of embedding_length, {hidden_size}")
    return int(inner // hidden_size)


def _counts(metadata: Metadata, key: str) -> list[int]:
    """Return each layer's number, from a file with one for each layer, or with one for all."""
    found, num_layers = metadata.get(key), metadata.integer("block_count")
    counts = found if isinstance(found, list) else [found] * num_layers
    if len(counts) != num_layers or not all(type(count) is int and count >= 0 for count in counts):
        raise metadata.error(key, found, f"one number for each of {num_layers} layers")
    return counts


def _mamba_sizes(metadata: Metadata) -> dict[str, Any]:
    return {
        "mamba_n_heads": metadata.integer("ssm.time_step_rank"),
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _in_any_layer(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": _in_any_layer(metadata, "ssm_in.bias"),
    }


def _in_any_layer(metadata: Metadata, tensor: str) -> bool:
    return any(name.endswith(f".{tensor}") for name in metadata.file.tensors)


def _falcon_h1(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes. The multipliers are 1, since the file's weights contain them."""
    return _llama(metadata, config) | {
        **_mamba_sizes(metadata),
        "mamba_d_ssm": metadata.integer("ssm.inner_size"),
        "mamba_rms_norm": _in_any_layer(metadata, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # llama.cpp applies the gate first
        "projectors_bias": _in_any_layer(metadata, "ssm_in.bias"),
    }


def _latent(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of DeepSeek-V2, or of DeepSeek-V3 if the router's scores are sigmoids."""
    rope = {key: value for key, value in config.get("rope_parameters", {}).items() if key != "partial_rotary_factor"}
    rope_dim = metadata.integer("rope.dimension_count")
    log_scale = metadata.get("rope.scaling.yarn_log_multiplier")
    if log_scale is not None:  # it is a tenth of mscale
        scale = round(10 * metadata.number("rope.scaling.yarn_log_multiplier"), 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    key = metadata.integer("attention.key_length_mla", metadata.integer("attention.key_length"))
    value = metadata.integer("attention.value_length_mla", metadata.integer("attention.value_length"))
    found = {
        "rope_parameters": rope,
        "head_dim": None,
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key - rope_dim,
        "v_head_dim": value,
        **_groups(metadata),
    }
    if metadata.get("expert_gating_func", SOFTMAX) == SIGMOID:
        return found | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    _scores(metadata, SOFTMAX)
    return found | {"topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def _groups(metadata: Metadata) -> dict[str, Any]:
    """Return the keys for the layers that have experts, and for their routing."""
    return {
        "first_k_dense_replace": metadata.count("leading_dense_block_count"),
        "norm_topk_prob": metadata.get("expert_weights_norm", False),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


def _glm4_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    _scores(metadata, SIGMOID)
    metadata.get("rope.dimension_sections")  # for images; in text, all sections have the same position
    has_norms = metadata.has("blk.0.attn_q_norm.weight")
    return _attention_bias(metadata, config) | _groups(metadata) | {"use_qk_norm": has_norms}


def _ernie_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    _scores(metadata, SOFTMAX)
    metadata.get("expert_shared_feed_forward_length")  # follows from the tensors' shapes
    return _ernie(metadata, config)


def _gemma4(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, full_dim = config["num_hidden_layers"], config["head_dim"]
    slides = metadata.get("attention.sliding_window_pattern")
    if not isinstance(slides, list) or len(slides) != num_layers:
        raise metadata.error(
            "attention.sliding_window_pattern", slides, f"an array with both kinds of {num_layers} layers"
        )
    dim = metadata.integer("attention.key_length_swa", full_dim)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if metadata.integer(key, dim) != dim:
            raise metadata.error(key, metadata.get(key), f"attention.key_length_swa, {dim}")
    rope = config.get("rope_parameters", {})
    found = {
        "layer_types": ["sliding_attention" if one else "full_attention" for one in slides],
        "head_dim": dim,
        "global_head_dim": full_dim,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", 1e4)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": rope.get("rope_theta", 1e6),
                "partial_rotary_factor": _rotated_share(metadata, full_dim),
            },
        },
        "num_kv_shared_layers": metadata.count("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": metadata.count("embedding_length_per_layer_input"),
    }
    heads, inner = metadata.get("attention.head_count_kv"), config["intermediate_size"]
    first_sharing = max(0, num_layers - found["num_kv_shared_layers"])
    if isinstance(heads, list):
        full = {count for count, one in zip(heads, slides, strict=False) if not one}
        if len(heads) != num_layers or len(full) != 1:
            raise metadata.error("attention.head_count_kv", heads, "the same in all layers of full attention")
        found["num_global_key_value_heads"] = full.pop()
    if any(not slides[i] and not metadata.has(f"blk.{i}.attn_v.weight") for i in range(first_sharing)):
        found["attention_k_eq_v"] = True
    if isinstance(inner, list):  # layers that share keys may have MLPs of twice the size
        if not inner or inner != [inner[0] * (1 if i < first_sharing else 2) for i in range(num_layers)]:
            raise metadata.error("feed_forward_length", inner, "the same, and twice as much in layers that share keys")
        found |= {"intermediate_size": inner[0], "use_double_wide_mlp": True}
    if metadata.has("per_layer_token_embd.weight"):
        found["vocab_size_per_layer_input"] = metadata.file.tensors["per_layer_token_embd.weight"].shape[0]
    if metadata.count("expert_count"):
        found |= {
            "enable_moe_block": True,
            "num_experts": metadata.integer("expert_count"),
            "top_k_experts": metadata.integer("expert_used_count"),
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        }
    return found


def _rotated_share(metadata: Metadata, head_dim: int) -> float:
    """Return the share of a head that is rotated. The other frequencies have the factor UNROTATED."""
    if not metadata.has(FACTORS):
        return 1.0
    factors = numbers_of(metadata, FACTORS)
    rotated = factors.count(1.0)
    rest = factors[rotated:]
    if 2 * len(factors) != head_dim or factors[:rotated] != [1.0] * rotated or min(rest, default=UNROTATED) < UNROTATED:
        raise ModelError(
            f"{metadata.file.path}: {FACTORS} has {len(factors)} numbers, {rotated} of which are 1; it must have "
            f"{head_dim // 2}: 1 for each pair that is rotated, and then {UNROTATED:g}"
        )
    return share_of(2 * rotated, head_dim)


def _lfm2_moe(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    _scores(metadata, SIGMOID)
    found = _lfm2(metadata, config)
    del found["block_auto_adjust_ff_dim"]
    return found


def _qwen35_turns(metadata: Metadata) -> dict[str, Turns]:
    """Return the order of the value heads, alone and after q and k."""
    keys, num_heads = metadata.integer("ssm.group_count"), metadata.integer("ssm.time_step_rank")
    size = metadata.integer("ssm.inner_size") // num_heads
    after = Turns(keys, size, 2 * keys * metadata.integer("ssm.state_size"))
    by_head = dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), Turns(keys, 1))
    return by_head | {"attn_gate": Turns(keys, size), "attn_qkv": after, "ssm_conv1d": after}


def _gpt_oss(_: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters with `truncate` off, which a GGUF file does not store."""
    rope = config.get("rope_parameters", {})
    return {"rope_parameters": rope | ({"truncate": False} if rope.get("rope_type") == "yarn" else {})}


def _lfm2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = metadata.get("attention.head_count_kv")
    kinds = heads if isinstance(heads, list) else [heads] * config["num_hidden_layers"]
    return {
        "layer_types": ["full_attention" if count else "conv" for count in kinds],
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "norm_eps": config["rms_norm_eps"],
        "rms_norm_eps": None,
        "block_auto_adjust_ff_dim": False,  # the file has the size after the adjustment
    }


def _nemotron_h(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    _scores(metadata, SIGMOID)
    metadata.get("rope.scaling.finetuned")  # no layer has positions
    heads, sizes = (_counts(metadata, key) for key in ("attention.head_count_kv", "feed_forward_length"))
    num_heads = metadata.integer("ssm.time_step_rank")
    return {
        "layers_block_type": [
            "attention" if heads[i] else "mamba" if not sizes[i] else
            "moe" if metadata.has(f"blk.{i}.ffn_gate_inp.weight") else "mlp"
            for i in range(config["num_hidden_layers"])
        ],
        "intermediate_size": max(sizes) or 1,
        "rope_parameters": None,
        "layer_norm_epsilon": metadata.get("attention.layer_norm_epsilon", config["rms_norm_eps"]),
        "mamba_num_heads": num_heads,
        "mamba_head_dim": metadata.integer("ssm.inner_size") // num_heads,
        "n_groups": metadata.integer("ssm.group_count"),
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_bias": _in_any_layer(metadata, "ssm_in.bias"),
        "use_conv_bias": _in_any_layer(metadata, "ssm_conv1d.bias"),
        "mlp_bias": _in_any_layer(metadata, "ffn_up.bias"),
    }  # fmt: skip


def _mamba2(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    inner, num_heads = metadata.integer("ssm.inner_size"), metadata.integer("ssm.time_step_rank")
    return _recurrent(metadata, config) | {
        "intermediate_size": None,
        "expand": _expansion(metadata, config),
        "num_heads": num_heads,
        "head_dim": inner // num_heads,
        "n_groups": metadata.integer("ssm.group_count"),
    }


def _mamba(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Mamba, or of Falcon-Mamba, whose epsilon of dt, B and C is not in the file: its default."""
    if not isinstance(has_norms := metadata.get("ssm.dt_b_c_rms", False), bool):
        raise metadata.error("ssm.dt_b_c_rms", has_norms, "true or false")
    found = _recurrent(metadata, config) | {
        "intermediate_size": metadata.integer("ssm.inner_size"),
        "time_step_rank": metadata.integer("ssm.time_step_rank"),
    }
    falcon = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
    return found | (falcon if has_norms else {})


def _recurrent(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that Mamba and Mamba-2 share, and None for usual keys that they do not have."""
    return {
        "max_position_embeddings": None,
        "rms_norm_eps": None,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "use_bias": _in_any_layer(metadata, "ssm_in.bias"),
        "use_conv_bias": _in_any_layer(metadata, "ssm_conv1d.bias"),
    }


def _jamba(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    has_experts = _in_any_layer(metadata, "ffn_gate_inp.weight")
    return {
        **_every(metadata, "attn", "attn_q.weight", config["num_hidden_layers"]),
        **_every(metadata, "expert", "ffn_gate_inp.weight", config["num_hidden_layers"]),
        "num_experts": metadata.integer("expert_count") if has_experts else 1,
        "mamba_expand": _expansion(metadata, config),
        "mamba_dt_rank": metadata.integer("ssm.time_step_rank"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _in_any_layer(metadata, "ssm_conv1d.bias"),
        "mamba_proj_bias": _in_any_layer(metadata, "ssm_in.bias"),
    }


def _every(metadata: Metadata, kind: str, tensor: str, num_layers: int) -> dict[str, int]:
    """Return the period and the offset of the layers that have a tensor. Raises ModelError if they have no period."""
    layers = [i for i in range(num_layers) if metadata.has(f"blk.{i}.{tensor}")]
    offset = layers[0] if layers else num_layers
    period = layers[1] - offset if len(layers) > 1 else num_layers
    if layers != [i for i in range(num_layers) if i % period == offset]:
        raise ModelError(
            f"{metadata.file.path}: the layers {layers} have {tensor}; they must be at the same distance from each "
            "other, and fewer layers before the first one"
        )
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}


LLAMA = Architecture(name="LlamaForCausalLM", model_type="llama", layer=LAYER, more=_llama, pairs=True)
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
MIXTRAL = Architecture(
    name="MixtralForCausalLM",
    model_type="mixtral",
    layer=ATTENTION | MIXTRAL_EXPERTS,
    keys=LOCAL_EXPERTS,
    pairs=True,
)
QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
ROUTED_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
}
QWEN35_MOE = Architecture(
    name="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    layer=LAYER | GATED_DELTA | EXPERTS | SHARED_EXPERT,
    keys=QWEN_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    more=_qwen35_moe,
    norms_plus_one=True,
    turns=_qwen35_turns,
    column_turns={"ssm_out": "attn_gate"},
    head=OWN_TENSORS,
)
MAMBA2 = Architecture(
    name="Mamba2ForCausalLM",
    model_type="mamba2",
    layer=MIXER,
    prefix="backbone.layers.{}.",
    ends=BACKBONE_ENDS,
    more=_mamba2,
    attends=False,
)
NEMOTRON_H = Architecture(
    name="NemotronHForCausalLM",
    model_type="nemotron_h",
    layer=MIXERS,
    prefix="backbone.layers.{}.",
    ends=BACKBONE_ENDS,
    keys=ROUTED_EXPERTS
    | {
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "moe_latent_size": "moe_latent_size",
    },
    more=_nemotron_h,
)
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
LFM2_ENDS: Names = {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"}
WINDOW = {"attention.sliding_window": "sliding_window"}
COHERE = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen2": Architecture(name="Qwen2ForCausalLM", model_type="qwen2", layer=LAYER),
    "qwen2vl": Architecture(name="Qwen2ForCausalLM", model_type="qwen2", layer=LAYER, more=_qwen2vl),
    "qwen3": Architecture(name="Qwen3ForCausalLM", model_type="qwen3", layer=LAYER, more=_attention_bias),
    "qwen3moe": Architecture(
        name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        layer=LAYER | EXPERTS,
        keys=QWEN_EXPERTS,
        fixed={"norm_topk_prob": True},
        more=_qwen3_moe,
    ),
    "gemma2": Architecture(
        name="Gemma2ForCausalLM",
        model_type="gemma2",
        layer=LAYER | GEMMA_NORMS,
        keys=WINDOW
        | {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        more=partial(_gemma, 46),
        norms_plus_one=True,
    ),
    "gemma3": Architecture(
        name="Gemma3ForCausalLM",
        model_type="gemma3_text",
        layer=LAYER | GEMMA_NORMS,
        keys=WINDOW,
        more=_gemma3,
        norms_plus_one=True,
    ),
    "phi3": Architecture(
        name="Phi3ForCausalLM",
        model_type="phi3",
        layer=LAYER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        more=_phi3,
    ),
    "bert": Architecture(
        name="BertModel",
        model_type="bert",
        layer={
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        prefix="encoder.layer.{}.",
        ends=BERT_ENDS | {"token_embd_norm": "embeddings.LayerNorm"},
        keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
        more=_bert,
        causal=False,
    ),
    "nomic-bert": Architecture(
        name="NomicBertModel",
        model_type="nomic_bert",
        layer={
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_gate": "mlp.fc12",
            "ffn_up": "mlp.fc11",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        prefix="encoder.layers.{}.",
        ends=BERT_ENDS | {"token_embd_norm": "emb_ln"},
        keys={"attention.layer_norm_epsilon": "layer_norm_eps"},
        more=_bert,
        causal=False,
    ),
    "gpt2": Architecture(
        name="GPT2LMHeadModel",
        model_type="gpt2",
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        prefix="transformer.h.{}.",
        ends={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        keys={"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        more=_gpt2,
        transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"}),
    ),
    "starcoder2": Architecture(
        name="Starcoder2ForCausalLM",
        model_type="starcoder2",
        layer=LAYER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        keys={"attention.layer_norm_epsilon": "norm_epsilon"},
        more=_starcoder2,
    ),
    "granite": Architecture(
        name="GraniteForCausalLM", model_type="granite", layer=LAYER, keys=SCALES, more=_granite, pairs=True
    ),
    "granitemoe": Architecture(
        name="GraniteMoeForCausalLM",
        model_type="granitemoe",
        layer=ATTENTION | GRANITE_EXPERTS,
        keys=SCALES | LOCAL_EXPERTS | {"expert_shared_feed_forward_length": "shared_intermediate_size"},
        more=_attention_bias,
        pairs=True,
    ),
    "granitehybrid": Architecture(
        name="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        layer=ATTENTION
        | GRANITE_EXPERTS
        | STATE_SPACE
        | {
            "ffn_gate": "shared_mlp.gate_proj",
            "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.down_proj",
        },
        keys=SCALES,
        more=_granite_hybrid,
        pairs=True,
    ),
    "falcon-h1": Architecture(
        name="FalconH1ForCausalLM",
        model_type="falcon_h1",
        layer=ATTENTION | STATE_SPACE | FEED_FORWARD | {"ffn_norm": "pre_ff_layernorm.weight"},  # without .weight
        ends=ENDS | {"output_norm": "model.final_layernorm"},
        more=_falcon_h1,
    ),
    "mamba2": MAMBA2,
    "mamba": replace(MAMBA2, name="MambaForCausalLM", model_type="mamba", layer=SELECTIVE_MIXER, more=_mamba),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "jamba": Architecture(
        name="JambaForCausalLM",
        model_type="jamba",
        layer=ATTENTION | SELECTIVE | FEED_FORWARD | FEED_FORWARD_EXPERTS | {"ffn_norm": "pre_ff_layernorm"},
        ends=ENDS | {"output_norm": "model.final_layernorm"},
        keys={"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        more=_jamba,
    ),
    "olmo2": Architecture(
        name="Olmo2ForCausalLM",
        model_type="olmo2",
        layer=LAYER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        more=_attention_bias,
    ),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", model_type="smollm3", layer=LAYER, more=_llama, pairs=True),
    "command-r": Architecture(name="CohereForCausalLM", model_type="cohere", layer=LAYER, keys=COHERE),
    "cohere2": Architecture(name="Cohere2ForCausalLM", model_type="cohere2", layer=LAYER, keys=COHERE | WINDOW),
    "glm4": Architecture(
        name="Glm4ForCausalLM",
        model_type="glm4",
        layer=LAYER
        | {
            "ffn_up": "mlp.gate_up_proj",
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        more=_attention_bias,
    ),
    "exaone4": Architecture(
        name="Exaone4ForCausalLM",
        model_type="exaone4",
        layer=LAYER
        | {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        more=_exaone4,
    ),
    "ernie4_5": Architecture(name="Ernie4_5ForCausalLM", model_type="ernie4_5", layer=LAYER, more=_ernie),
    "qwen35": Architecture(
        name="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        layer=LAYER | GATED_DELTA,
        more=_qwen35,
        norms_plus_one=True,
        turns=_qwen35_turns,
        column_turns={"ssm_out": "attn_gate"},
        head=OWN_TENSORS,
    ),
    "qwen35moe": QWEN35_MOE,
    "qwen3next": replace(  # with its joint projections split, it equals Qwen3.5
        QWEN35_MOE,
        layer=QWEN35_MOE.layer | {"ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a")},
        turns=_qwen3_next_turns,
        column_turns={},
    ),
    "gpt-oss": Architecture(
        name="GptOssForCausalLM",
        model_type="gpt_oss",
        layer=LAYER
        | EXPERTS
        | {
            "ffn_gate_inp": "mlp.router",
            "post_attention_norm": "post_attention_layernorm",
            "attn_sinks.weight": "self_attn.sinks",
        },
        keys=WINDOW | LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        more=_gpt_oss,
    ),
    "lfm2": Architecture(
        name="Lfm2ForCausalLM",
        model_type="lfm2",
        layer=SHORT_CONVOLUTION,
        ends=LFM2_ENDS,
        more=_lfm2,
    ),
    "lfm2moe": Architecture(
        name="Lfm2MoeForCausalLM",
        model_type="lfm2_moe",
        layer=SHORT_CONVOLUTION | SHORT_CONVOLUTION_EXPERTS,
        ends=LFM2_ENDS,
        keys=QWEN_EXPERTS
        | {"leading_dense_block_count": "num_dense_layers", "expert_weights_scale": "routed_scaling_factor"},
        more=_lfm2_moe,
    ),
    "deepseek2": Architecture(
        name="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        layer=LAYER | CORRECTED_EXPERTS | LATENT,
        keys=ROUTED_EXPERTS,
        more=_latent,
        head=LAYER_AFTER,
    ),
    "glm4moe": Architecture(
        name="Glm4MoeForCausalLM",
        model_type="glm4_moe",
        layer=LAYER | CORRECTED_EXPERTS | {"post_attention_norm": "post_attention_layernorm"},
        keys=ROUTED_EXPERTS,
        more=_glm4_moe,
        head=LAYER_AFTER,
    ),
    "ernie4_5-moe": Architecture(
        name="Ernie4_5_MoeForCausalLM",
        model_type="ernie4_5_moe",
        layer=LAYER | CORRECTED_EXPERTS | {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        more=_ernie_moe,
    ),
    "gemma4": Architecture(
        name="Gemma4ForCausalLM",
        model_type="gemma4_text",
        layer=LAYER | GEMMA_NORMS | GEMMA4,
        ends=ENDS
        | {
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        keys=WINDOW | {"final_logit_softcapping": "final_logit_softcapping"},
        more=_gemma4,
    ),
    "seed_oss": Architecture(
        name="SeedOssForCausalLM",
        model_type="seed_oss",
        layer=LAYER | {"post_attention_norm": "post_attention_layernorm"},
    ),
}


def architecture_of(metadata: Metadata) -> Architecture:
    """Return the architecture of a file. Raises ModelError if it is not supported."""
    name = metadata.architecture
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{metadata.file.path} has the architecture {name!r}, of which no GGUF files are served; served are "
            f"{', '.join(ARCHITECTURES)}"
        )
    return MIXTRAL if name == "llama" and metadata.get("expert_count", 0) else ARCHITECTURES[name]
