"""Configurations as they were published: the keys and the values of each config.json that say what a model is.

Lists of a value for each layer are written by their rule. What only says which release wrote it is left out.
"""

import json
from typing import Any

SMOLLM = """{"_name_or_path": "HuggingFaceTB/cosmo2-tokenizer", "architectures": ["LlamaForCausalLM"],
"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
"hidden_size": 576, "initializer_range": 0.02, "intermediate_size": 1536, "max_position_embeddings": 2048,
"mlp_bias": false, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "tie_word_embeddings": true,
"torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 49152}"""

SMOLLM2 = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.0416666666,
"intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
"model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
"vocab_size": 49152}"""

LLAMA_3_2 = """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
"initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
"model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
"pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
"low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true,
"vocab_size": 128256}"""

MISTRAL = """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
"hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
"model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
"torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}"""

GPT2 = """{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
"bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
"n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
"summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
"task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}}, "vocab_size": 50257}"""

DISTILGPT2 = """{"_num_labels": 1, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
"attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "id2label": {"0": "LABEL_0"},
"initializer_range": 0.02, "label2id": {"LABEL_0": 0}, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 6, "n_positions": 1024, "resid_pdrop": 0.1,
"summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true, "summary_type": "cls_index",
"summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
"vocab_size": 50257}"""

BLOOM = """{"apply_residual_connection_post_layernorm": false, "architectures": ["BloomForCausalLM"],
"attention_dropout": 0.0, "attention_softmax_in_fp32": true, "bias_dropout_fusion": true, "bos_token_id": 1,
"eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,
"masked_softmax_fusion": true, "model_type": "bloom", "n_embed": 1024, "n_inner": null, "n_layer": 24,
"num_attention_heads": 16, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048,
"skip_bias_add": true, "skip_bias_add_qkv": false, "transformers_version": "4.20.0", "unk_token_id": 0,
"use_cache": true, "vocab_size": 250880}"""

QWEN2_5 = """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
"eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
"intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
"num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
"transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
"vocab_size": 151936}"""

QWEN3 = """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
"initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
"model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
"use_sliding_window": false, "vocab_size": 151936}"""

GEMMA2 = """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
"max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
"num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
"rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4",
"use_cache": true, "vocab_size": 256000}"""

GEMMA2_9B = json.dumps(json.loads(GEMMA2) | {"head_dim": 256, "hidden_size": 3584, "sliding_window_size": 4096,
"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 42, "intermediate_size": 14336})  # fmt: skip

GEMMA3_1B = """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
"final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
"initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
"num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0,
"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null,
"rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
"transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144}"""

PHI3_MINI = """{"_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"],
"attention_bias": false, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config",
"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id": 32000,
"hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
"max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32, "num_hidden_layers": 32,
"num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
"rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": 2047,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": true,
"vocab_size": 32064}"""

PHI4_MINI = json.dumps(json.loads(PHI3_MINI) | {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
"mlp_bias": False, "max_position_embeddings": 131072, "num_attention_heads": 24, "num_key_value_heads": 8,
"partial_rotary_factor": 0.75, "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48,
"type": "longrope"}, "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064})  # fmt: skip

OLMO2_1B = """{"architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
"intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 16,
"num_hidden_layers": 16, "num_key_value_heads": 16, "pad_token_id": 100277, "rms_norm_eps": 1e-06,
"rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false, "torch_dtype": "float32",
"transformers_version": "4.50.0", "use_cache": true, "vocab_size": 100352}"""

GRANITE_3 = """{"architectures": ["GraniteForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
"logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "granite",
"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
"residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000000.0,
"tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.49.0", "use_cache": true,
"vocab_size": 49159}"""

SMOLLM3 = """{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": null, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
"intermediate_size": 11008, "layer_types": ["full_attention", "full_attention", "full_attention", "full_attention"],
"max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": false, "model_type": "smollm3",
"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "num_attention_heads": 16, "num_hidden_layers": 4,
"num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null,
"rope_theta": 5000000.0, "sliding_window": null, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0",
"use_cache": false, "use_sliding_window": false, "vocab_size": 128256}"""  # 4 of its 36 layers

STARCODER2 = """{"activation_function": "gelu", "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1,
"attention_softmax_in_fp32": true, "bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0,
"hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.018042, "intermediate_size": 12288,
"layer_norm_epsilon": 1e-05, "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
"norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30,
"num_key_value_heads": 2, "residual_dropout": 0.1, "rope_theta": 999999.4420358813,
"scale_attention_softmax_in_fp32": true, "scale_attn_weights": true, "sliding_window": 4096, "torch_dtype": "float32",
"transformers_version": "4.37.0.dev0", "use_bias": true, "use_cache": true, "vocab_size": 49152}"""

PYTHIA = """{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
"hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
"max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12, "num_hidden_layers": 12,
"rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16",
"transformers_version": "4.24.0", "use_cache": true, "use_parallel_residual": true, "vocab_size": 50304}"""

NEOX_20B = json.dumps(json.loads(PYTHIA) | {"attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast",
"hidden_dropout_prob": 0, "hidden_size": 6144, "num_attention_heads": 64, "num_hidden_layers": 44})  # fmt: skip

MIXTRAL = """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
"max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
"num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": true,
"vocab_size": 32000}"""

QWEN3_MOE = """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
"hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960,
"max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
"norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
"num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
"rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
"use_sliding_window": false, "vocab_size": 151936}"""


def _layers(count: int, every: int, usual: str, other: str = "full_attention") -> list[str]:
    """Kinds of layers: each `every`-th is the other one."""
    return [other if i % every == every - 1 else usual for i in range(count)]


def _as(text: str, **changes: Any) -> dict[str, Any]:
    """A config with some keys changed."""
    return {**json.loads(text), **changes}


LLAMA_3_1 = _as(
    LLAMA_3_2, head_dim=128, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
    rope_scaling={"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                  "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    tie_word_embeddings=False, eos_token_id=[128001, 128008, 128009],
)  # fmt: skip
LLAMA_4_SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "torch_dtype": "bfloat16",
    "boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092, "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0,
        "attn_scale": 0.1, "attn_temperature_tuning": True, "bos_token_id": 200000, "for_llm_compressor": False,
        "eos_token_id": [200001, 200007, 200008], "floor_scale": 8192, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "no_rope_layers": [],
        "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 16, "output_router_logits": False, "pad_token_id": 200018, "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0, "use_qk_norm": True,
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_cache": True, "vocab_size": 202048,
    },
    "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408, "num_hidden_layers": 34},
}  # fmt: skip
QWEN3_8B = _as(
    QWEN3, hidden_size=4096, intermediate_size=12288, num_attention_heads=32, num_hidden_layers=36,
    max_window_layers=36, tie_word_embeddings=False,
)  # fmt: skip
QWEN2_5_7B = _as(
    QWEN2_5, hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_hidden_layers=28,
    num_key_value_heads=4, max_window_layers=28, sliding_window=131072, tie_word_embeddings=False, vocab_size=152064,
    eos_token_id=151645,
)  # fmt: skip
QWEN2_5_VL = {
    **QWEN2_5_7B, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "max_position_embeddings": 128000, "sliding_window": 32768, "use_mrope": None, "image_token_id": 151655,
    "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420,
                      "model_type": "qwen2_5_vl", "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14},
}  # fmt: skip
QWEN3_VL: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": True,
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "text_config": {
        "model_type": "qwen3_vl_text", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560,
        "initializer_range": 0.02, "intermediate_size": 9728, "max_position_embeddings": 262144,
        "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "tie_word_embeddings": True, "use_cache": True, "vocab_size": 151936,
    },
    "vision_config": {"model_type": "qwen3_vl", "depth": 24, "hidden_size": 1024, "out_hidden_size": 2560,
                      "deepstack_visual_indexes": [5, 11, 17]},
}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True,
    "image_token_id": 248056, "video_token_id": 248057, "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    "text_config": {
        "model_type": "qwen3_5_text", "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True,
        "dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3584,
        "layer_types": _layers(24, 4, "linear_attention"), "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 8,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "use_cache": True,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                            "rope_theta": 10000000, "rope_type": "default"},
        "tie_word_embeddings": True, "vocab_size": 248320,
    },
    "vision_config": {"model_type": "qwen3_5", "depth": 12, "hidden_size": 768, "out_hidden_size": 1024},
}  # fmt: skip
QWEN3_6_MOE: dict[str, Any] = {
    **QWEN3_5, "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "tie_word_embeddings": False,
    "text_config": {
        **{key: value for key, value in QWEN3_5["text_config"].items() if key != "intermediate_size"},
        "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "layer_types": _layers(40, 4, "linear_attention"),
        "linear_num_value_heads": 32, "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "output_router_logits": False,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
    },
    "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_size": 1152, "out_hidden_size": 2048},
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = _as(
    QWEN3_MOE, architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", full_attention_interval=4,
    head_dim=256, hidden_size=2048, intermediate_size=5120, linear_conv_kernel_dim=4, linear_key_head_dim=128,
    linear_num_key_heads=16, linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144,
    moe_intermediate_size=512, num_attention_heads=16, num_experts=512, num_experts_per_tok=10, num_key_value_heads=2,
    partial_rotary_factor=0.25, rope_theta=10000000, shared_expert_intermediate_size=512,
)  # fmt: skip
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "boi_token_index": 255999,
    "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
    "mm_tokens_per_image": 256, "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                    "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024},
    "vision_config": {"hidden_size": 1152, "image_size": 896, "model_type": "siglip_vision_model", "patch_size": 14,
                      "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27,
                      "vision_use_head": False},
}  # fmt: skip
GEMMA3N: dict[str, Any] = {
    "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "torch_dtype": "bfloat16",
    "audio_soft_tokens_per_image": 188, "audio_token_id": 262273, "boa_token_id": 256000, "boi_token_id": 255999,
    "eoa_token_id": 262272, "eoi_token_id": 262144, "eos_token_id": [1, 106], "image_token_id": 262145,
    "initializer_range": 0.02, "vision_soft_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3n_text", "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4, "attention_bias": False,
        "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
        "initializer_range": 0.02, "intermediate_size": [8192] * 30, "laurel_rank": 64,
        "layer_types": _layers(30, 5, "sliding_attention"), "max_position_embeddings": 32768,
        "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2, "num_kv_shared_layers": 10,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": 512, "use_cache": True, "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {"architecture": "mobilenetv5_300m_enc", "hidden_size": 2048, "model_type": "gemma3n_vision"},
    "audio_config": {"hidden_size": 1536, "model_type": "gemma3n_audio"},
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "dtype": "bfloat16",
    "audio_token_id": 258881, "boa_token_id": 256000, "boi_token_id": 255999, "eoa_token_index": 258883,
    "eoi_token_id": 258882, "eos_token_id": [1, 106], "image_token_id": 258880, "initializer_range": 0.02,
    "tie_word_embeddings": True, "video_token_id": 258884, "vision_soft_tokens_per_image": 280,
    "text_config": {
        "model_type": "gemma4_text", "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False,
        "bos_token_id": 2, "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
        "hidden_size_per_layer_input": 256, "initializer_range": 0.02, "intermediate_size": 6144,
        "layer_types": _layers(35, 5, "sliding_attention"), "max_position_embeddings": 131072,
        "num_attention_heads": 8, "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20,
        "pad_token_id": 0, "rms_norm_eps": 1e-06, "sliding_window": 512, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "use_cache": True, "use_double_wide_mlp": True, "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    },
    "vision_config": {"model_type": "gemma4_vision", "hidden_size": 768, "num_hidden_layers": 16},
    "audio_config": {"model_type": "gemma4_audio", "hidden_size": 1024, "num_hidden_layers": 12},
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": _layers(24, 2, "sliding_attention"), "max_position_embeddings": 131072, "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "pad_token_id": 199999, "rms_norm_eps": 1e-05, "rope_theta": 150000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "use_cache": True, "vocab_size": 201088,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip
MISTRAL_V3 = _as(MISTRAL, rope_theta=1000000.0, sliding_window=None, vocab_size=32768)
MISTRAL_SMALL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
    "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
    "torch_dtype": "bfloat16", "vision_feature_layer": -1,
    "text_config": {
        "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "initializer_range": 0.02, "intermediate_size": 32768, "max_position_embeddings": 131072,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
        "vocab_size": 131072,
    },
    "vision_config": {"hidden_size": 1024, "image_size": 1540, "model_type": "pixtral", "num_hidden_layers": 24},
}  # fmt: skip
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
    "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True,
    "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "use_cache": True, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip
GRANITE_4_H: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": False,
    "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.1,
    "intermediate_size": 512, "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)], "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_attention_heads": 12,
    "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 64,
    "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100352,
}  # fmt: skip
GRANITE_4_H_MICRO = GRANITE_4_H | {
    "attention_multiplier": 0.015625, "hidden_size": 2048, "intermediate_size": 8192, "logits_scaling": 8,
    "mamba_n_heads": 64, "num_attention_heads": 32, "num_experts_per_tok": 0, "num_key_value_heads": 8,
    "num_local_experts": 0, "shared_intermediate_size": 8192,
}  # fmt: skip
GRANITE_4_H_1B = GRANITE_4_H | {
    "intermediate_size": 4096, "num_experts_per_tok": 0, "num_local_experts": 0, "shared_intermediate_size": 4096,
}  # fmt: skip
LFM2_350M = LFM2 | {
    "block_dim": 1024, "block_ff_dim": 6656, "conv_dim": 1024, "conv_dim_out": 1024, "hidden_size": 1024,
    "num_attention_heads": 16, "num_heads": 16,
}  # fmt: skip
BAMBA: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "attention_bias": False, "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "bos_token_id": 128000, "eos_token_id": 128001,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
    "max_position_embeddings": 4096, "mlp_bias": False, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
}  # fmt: skip
NEMOTRON_H: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False,
    "attention_dropout": 0.0, "attention_head_dim": 128, "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4,
    "eos_token_id": 2, "expand": 2, "hidden_dropout": 0.0, "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "initializer_range": 0.02,
    "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 8192, "mlp_bias": False,
    "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 32, "num_hidden_layers": 52,
    "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0, "rescale_prenorm_residual": True,
    "residual_in_fp32": False, "rms_norm_eps": 1e-05, "ssm_state_size": 128, "tie_word_embeddings": False,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
    "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 131072,
}  # fmt: skip
DEEPSEEK_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "attention_bias": False,
    "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    **DEEPSEEK_V2_LITE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
    "topk_method": "noaux_tc", "vocab_size": 129280,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
DEEPSEEK_V32: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key not in ("auto_map", "aux_loss_alpha", "seq_aux")},
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "bos_token_id": 0, "eos_token_id": 1,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
}  # fmt: skip
DEEPSEEK_R1_QWEN = {**QWEN2_5_7B, "max_position_embeddings": 131072, "rope_theta": 10000, "use_mrope": False}
GLM4: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 151552,
}  # fmt: skip
GLM5: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "attention_bias": False,
    "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "head_dim": 64, "hidden_size": 6144, "index_head_dim": 128,
    "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True, "initializer_range": 0.02,
    "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 202752, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "pretraining_tp": 1, "q_lora_rank": 2048,
    "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_interleave": True, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
GLM4_AIR: dict[str, Any] = {
    **GLM4, "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "first_k_dense_replace": 1,
    "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
    "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False,
}  # fmt: skip
PHI_4: dict[str, Any] = _as(
    PHI3_MINI, hidden_size=5120, intermediate_size=17920, max_position_embeddings=16384, num_attention_heads=40,
    num_hidden_layers=40, num_key_value_heads=10, original_max_position_embeddings=16384, rope_theta=250000,
    sliding_window=None, vocab_size=100352, bos_token_id=100257, eos_token_id=100265, pad_token_id=100349,
)  # fmt: skip
ERNIE: dict[str, Any] = {
    "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "bos_token_id": 1, "eos_token_id": 2,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
    "max_position_embeddings": 131072, "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "use_bias": False, "use_cache": False, "vocab_size": 103424,
}  # fmt: skip
ERNIE_21B: dict[str, Any] = {
    **ERNIE, "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560,
    "intermediate_size": 12288, "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536,
    "moe_k": 6, "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28,
    "num_key_value_heads": 4,
}  # fmt: skip
EXAONE_4: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 361, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 4096, "layer_types": ["full_attention"] * 30, "max_position_embeddings": 65536,
    "num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 8, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000, "sliding_window": None, "sliding_window_pattern": None,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 102400,
}  # fmt: skip
SEED_OSS: dict[str, Any] = {
    "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "attention_bias": True, "attention_dropout": 0.1,
    "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648, "max_position_embeddings": 524288,
    "mlp_bias": False, "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8, "pad_token_id": 1,
    "residual_dropout": 0.1, "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 155136,
}  # fmt: skip
COMMAND_R7B: dict[str, Any] = {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 5, "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05,
    "logit_scale": 0.25, "max_position_embeddings": 132096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
    "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16", "use_cache": True,
    "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
    "use_parallel_embedding": True, "vocab_size": 256000,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "alibi": False,
    "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "bias": False, "bos_token_id": 11,
    "eos_token_id": 11, "hidden_dropout": 0.0, "hidden_size": 4544, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
    "parallel_attn": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 65024,
}  # fmt: skip
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_dropout": 0.0,
    "activation_function": "relu", "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True,
    "dropout": 0.1, "eos_token_id": 2, "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0,
    "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
    "prefix": "</s>", "torch_dtype": "float16", "use_cache": True, "vocab_size": 50272, "word_embed_proj_dim": 768,
}  # fmt: skip

# What people look for, by maker: the name of the repository -> its config.json.
REPOSITORIES: dict[str, dict[str, dict[str, Any]]] = {
    "Qwen": {
        "Qwen/Qwen3.5-0.8B": QWEN3_5,
        "Qwen/Qwen3.6-35B-A3B": QWEN3_6_MOE,
        "Qwen/Qwen3-0.6B": json.loads(QWEN3),
        "Qwen/Qwen3-8B": QWEN3_8B,
        "Qwen/Qwen3-30B-A3B": json.loads(QWEN3_MOE),
        "Qwen/Qwen3-Next-80B-A3B-Instruct": QWEN3_NEXT,
        "Qwen/Qwen3-VL-4B-Instruct": QWEN3_VL,
        "Qwen/Qwen2.5-7B-Instruct": QWEN2_5_7B,
        "Qwen/Qwen2.5-VL-7B-Instruct": QWEN2_5_VL,
    },
    "Google": {
        "google/gemma-4-E2B-it": GEMMA4,
        "google/gemma-3n-E2B-it": GEMMA3N,
        "google/gemma-3-4b-it": GEMMA3_4B,
        "google/gemma-3-1b-it": json.loads(GEMMA3_1B),
        "google/gemma-2-9b-it": json.loads(GEMMA2_9B),
    },
    "Meta": {
        "meta-llama/Llama-4-Scout-17B-16E-Instruct": LLAMA_4_SCOUT,
        "meta-llama/Llama-3.2-1B": json.loads(LLAMA_3_2),
        "meta-llama/Llama-3.1-8B-Instruct": LLAMA_3_1,
        "facebook/opt-125m": OPT,
    },
    "OpenAI": {"openai/gpt-oss-20b": GPT_OSS, "openai-community/gpt2": json.loads(GPT2)},
    "Mistral": {
        "mistralai/Mistral-Small-3.1-24B-Instruct-2503": MISTRAL_SMALL,
        "mistralai/Mistral-7B-Instruct-v0.3": MISTRAL_V3,
        "mistralai/Mixtral-8x7B-Instruct-v0.1": json.loads(MIXTRAL),
    },
    "DeepSeek": {
        "deepseek-ai/DeepSeek-V3.2": DEEPSEEK_V32,
        "deepseek-ai/DeepSeek-V3": DEEPSEEK_V3,
        "deepseek-ai/DeepSeek-V2-Lite": DEEPSEEK_V2_LITE,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": DEEPSEEK_R1_QWEN,
    },
    "Z.ai": {"zai-org/GLM-5": GLM5, "zai-org/GLM-4.5-Air": GLM4_AIR, "zai-org/GLM-4-9B-0414": GLM4},
    "IBM": {
        "ibm-granite/granite-4.0-h-tiny": GRANITE_4_H,
        "ibm-granite/granite-4.0-h-micro": GRANITE_4_H_MICRO,
        "ibm-granite/granite-4.0-h-1b": GRANITE_4_H_1B,
        "ibm-ai-platform/Bamba-9B": BAMBA,
        "ibm-granite/granite-3.3-2b-instruct": json.loads(GRANITE_3),
    },
    "Liquid": {"LiquidAI/LFM2-1.2B": LFM2, "LiquidAI/LFM2-350M": LFM2_350M},
    "Hugging Face": {
        "HuggingFaceTB/SmolLM3-3B": json.loads(SMOLLM3),
        "HuggingFaceTB/SmolLM2-135M-Instruct": json.loads(SMOLLM2),
    },
    "Microsoft": {"microsoft/phi-4": PHI_4, "microsoft/Phi-4-mini-instruct": json.loads(PHI4_MINI)},
    "Others": {
        "allenai/OLMo-2-0425-1B-Instruct": json.loads(OLMO2_1B),
        "baidu/ERNIE-4.5-21B-A3B-PT": ERNIE_21B,
        "baidu/ERNIE-4.5-0.3B-PT": ERNIE,
        "bigcode/starcoder2-3b": json.loads(STARCODER2),
        "bigscience/bloom-560m": json.loads(BLOOM),
        "ByteDance-Seed/Seed-OSS-36B-Instruct": SEED_OSS,
        "CohereLabs/c4ai-command-r7b-12-2024": COMMAND_R7B,
        "EleutherAI/pythia-160m": json.loads(PYTHIA),
        "nvidia/Nemotron-H-8B-Base-8K": NEMOTRON_H,
        "LGAI-EXAONE/EXAONE-4.0-1.2B": EXAONE_4,
        "tiiuae/falcon-7b": FALCON,
    },
}
