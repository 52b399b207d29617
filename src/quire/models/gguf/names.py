"""The names of a layer's tensors in GGUF files and in other checkpoints.

Names omit `.weight` and `.bias`, unless the two sides differ in it. {} is the index of an expert: a GGUF file has all
experts in one tensor. A tuple of names are equal parts of the rows of one GGUF tensor.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Names: TypeAlias = dict[str, str | tuple[str, ...]]


class HeadNames(NamedTuple):
    """The names of a draft head, which is the layer after the last one, {}, in a GGUF file."""

    prefix: str  # of `ends`
    layer_prefix: str  # of its layer's tensors
    ends: Names  # tensors that the layers before it do not have


ENDS: Names = {  # outside the layers
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
BERT_ENDS: Names = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
}
ATTENTION: Names = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
}
LAYER: Names = ATTENTION | {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
FEED_FORWARD: Names = {
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
FEED_FORWARD_EXPERTS: Names = {
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate_exps": "feed_forward.experts.{}.gate_proj",
    "ffn_up_exps": "feed_forward.experts.{}.up_proj",
    "ffn_gate_up_exps": ("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
    "ffn_down_exps": "feed_forward.experts.{}.down_proj",
}
EXPERTS: Names = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_gate_up_exps": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED_EXPERT: Names = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
CORRECTED_EXPERTS: Names = EXPERTS | {  # with shared experts
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
MIXTRAL_EXPERTS: Names = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
GEMMA_NORMS: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GATED_DELTA: Names = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
GRANITE_EXPERTS: Names = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_gate_up_exps": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.down_proj",
}
_STATE_SPACE = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt.bias": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
STATE_SPACE: Names = {theirs: f"mamba.{ours}" for theirs, ours in _STATE_SPACE.items()}
_SELECTIVE = {"ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_dt.bias": "dt_proj.bias"}  # with STATE_SPACE: Mamba-1
BACKBONE_ENDS: Names = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
MIXER: Names = {theirs: f"mixer.{ours}" for theirs, ours in _STATE_SPACE.items()}
MIXER |= {"attn_norm": "norm"}
SELECTIVE: Names = STATE_SPACE | {theirs: f"mamba.{ours}" for theirs, ours in _SELECTIVE.items()}
SELECTIVE |= {
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
}
SELECTIVE_MIXER: Names = MIXER | {theirs: f"mixer.{ours}" for theirs, ours in _SELECTIVE.items()}
MIXERS: Names = MIXER | {
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
}
LATENT: Names = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",  # together with attn_v_b
}
GEMMA4: Names = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_exps": "experts.{}.gate_proj",
    "ffn_up_exps": "experts.{}.up_proj",
    "ffn_gate_up_exps": ("experts.{}.gate_proj", "experts.{}.up_proj"),
    "ffn_down_exps": "experts.{}.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
SHORT_CONVOLUTION: Names = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
SHORT_CONVOLUTION_EXPERTS: Names = {
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_gate_up_exps": ("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    "ffn_down_exps": "feed_forward.experts.{}.w2",
}
JOIN = "nextn.eh_proj"
LAYER_AFTER = HeadNames(
    "model.layers.{}.",
    "model.layers.{}.",
    {
        JOIN: "eh_proj",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.shared_head_norm": "shared_head.norm",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.shared_head_head": "shared_head.head",
    },
)
OWN_TENSORS = HeadNames(
    "mtp.",
    "mtp.layers.0.",
    {
        JOIN: "fc",
        "nextn.enorm": "pre_fc_norm_embedding",
        "nextn.hnorm": "pre_fc_norm_hidden",
        "nextn.shared_head_norm": "norm",
        "nextn.embed_tokens": "layers.0.embed_tokens",
        "nextn.shared_head_head": "layers.0.shared_head.head",
    },
)
