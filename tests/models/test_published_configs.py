"""Configurations as they were published: each is understood, and means what its authors meant."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.errors import ModelError
from quire.models import read_config
from quire.models.decoder_config import DecoderConfig, ExpertsConfig, MlpConfig

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

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
PUBLISHED = {
    "SmolLM": (SMOLLM, (3, 64, 10_000.0, 2048, None), BF16),
    "SmolLM2": (SMOLLM2, (3, 64, 100_000, 8192, None), BF16),
    "Llama 3.2": (LLAMA_3_2, (8, 64, 500_000.0, 131_072, None), BF16),
    "Mistral": (MISTRAL, (8, 128, 10_000.0, 32_768, 4096), BF16),
    "GPT-2": (GPT2, (12, 64, None, 1024, None), F32),
    "DistilGPT2": (DISTILGPT2, (12, 64, None, 1024, None), F32),
    "BLOOM": (BLOOM, (16, 64, None, 2048, None), F32),
    "Qwen 2.5": (QWEN2_5, (2, 64, 1_000_000.0, 32_768, None), BF16),
    "Qwen3": (QWEN3, (8, 128, 1_000_000, 40_960, None), BF16),
    "Mixtral": (MIXTRAL, (8, 128, 1_000_000.0, 32_768, None), BF16),
    "Qwen3-MoE": (QWEN3_MOE, (4, 128, 1_000_000.0, 40_960, None), BF16),
    "Gemma 2 9B": (GEMMA2_9B, (8, 256, 10_000.0, 8192, 4096), F32),
    "Gemma 2": (GEMMA2, (4, 256, 10_000.0, 8192, 4096), F32),
    "Gemma 3 1B": (GEMMA3_1B, (1, 256, 10_000.0, 32_768, 512), BF16),
    "Phi-3 mini": (PHI3_MINI, (32, 96, 10_000.0, 4096, 2047), BF16),
    "Phi-4 mini": (PHI4_MINI, (8, 128, 10_000.0, 131_072, 262_144), BF16),
    "OLMo 2": (OLMO2_1B, (16, 128, 500_000, 4096, None), F32),
    "Granite 3": (GRANITE_3, (8, 64, 10_000_000.0, 131_072, None), BF16),
    "SmolLM3": (SMOLLM3, (4, 128, 5_000_000.0, 65_536, None), BF16),
    "StarCoder 2": (STARCODER2, (2, 128, 999999.4420358813, 16_384, 4096), F32),
    "Pythia": (PYTHIA, (12, 64, 10_000, 2048, None), F16),
    "GPT-NeoX 20B": (NEOX_20B, (64, 96, 10_000, 2048, None), F16),
}


@pytest.mark.parametrize(("text", "expected", "dtype"), PUBLISHED.values(), ids=PUBLISHED)
def test_published(tmp_path: Path, text: str, expected: tuple[object, ...], dtype: torch.dtype) -> None:
    (tmp_path / "config.json").write_text(text)
    decoder, found_dtype = read_config(tmp_path)
    rope = next((rope["rope_theta"] for rope in decoder.ropes if rope is not None), None)
    heads = decoder.layers[0].mixer.heads
    found = (heads.num_kv_heads, heads.head_dim, rope, decoder.max_position_embeddings, decoder.windows[0])
    assert found == expected
    assert found_dtype is dtype
    assert len(decoder.windows) == decoder.num_layers


def test_what_each_layer_does_in_the_published_configs(tmp_path: Path) -> None:
    """Gemma 3's layers with and without windows have different RoPE; SmolLM3's fourth layers have none."""
    (tmp_path / "config.json").write_text(GEMMA3_1B)
    decoder, _ = read_config(tmp_path)
    assert [i for i, window in enumerate(decoder.windows) if window is None] == [5, 11, 17, 23]
    thetas = [None if rope is None else rope["rope_theta"] for rope in decoder.ropes]
    assert thetas == [10_000.0 if window else 1_000_000.0 for window in decoder.windows]
    (tmp_path / "config.json").write_text(SMOLLM3)
    assert [rope is None for rope in read_config(tmp_path)[0].ropes] == [False, False, False, True]


def test_what_a_missing_key_means_depends_on_the_architecture(tmp_path: Path) -> None:
    raw = json.loads(MISTRAL)
    del raw["sliding_window"], raw["num_key_value_heads"]
    for architecture, window, num_kv_heads in (("MistralForCausalLM", 4096, 8), ("LlamaForCausalLM", None, 32)):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
        decoder, _ = read_config(tmp_path)
        assert (decoder.windows[0], decoder.layers[0].mixer.num_kv_heads) == (window, num_kv_heads)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"sliding_window": None}))
    assert read_config(tmp_path)[0].windows[0] is None


def test_experts(tmp_path: Path) -> None:
    """Which layers have them, how many, and their sizes; what missing keys mean is transformers' matter."""

    def read(text: str, **changes: object) -> DecoderConfig:
        raw = {key: value for key, value in (json.loads(text) | changes).items() if value != "DELETE"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return read_config(tmp_path)[0]

    some = ExpertsConfig(count=8, per_token=2, mlp=MlpConfig(size=14336), renormalised=True)
    assert read(MIXTRAL).experts == [some] * 32
    found = read(MIXTRAL, **dict.fromkeys(("rope_theta", "rms_norm_eps", "max_position_embeddings"), "DELETE"))
    assert (found.ropes[0], found.norm_eps) == ({"rope_theta": 1e6}, 1e-5)
    assert found.max_position_embeddings == 131_072
    whole = ExpertsConfig(count=128, per_token=8, mlp=MlpConfig(size=768), renormalised=True)
    assert read(QWEN3_MOE).experts == [whole] * 48
    assert read(QWEN3_MOE, num_experts="DELETE", num_local_experts=128).experts == [whole] * 48
    found = read(QWEN3_MOE, decoder_sparse_step=3, mlp_only_layers=[2, 8], norm_topk_prob=False)
    sparse = {i for i, layer in enumerate(found.layers) if isinstance(layer.mlp, ExpertsConfig)}
    assert sparse == set(range(5, 48, 3)) - {8}
    assert found.experts == [replace(whole, renormalised=False)] * len(sparse)
    assert not read(QWEN3_MOE, mlp_only_layers=list(range(48))).experts
    assert read(QWEN3_MOE, use_sliding_window=True, sliding_window=64, max_window_layers="DELETE").windows == (64,) * 48
    for changes, shown in (
        ({"use_sliding_window": True, "sliding_window": 64}, "does not understand: max_window_layers=48"),
        ({"num_local_experts": 64}, "num_local_experts is 64; family 'qwen3_moe' serves 128 only"),
        ({"num_experts": 0}, "num_experts is 0; it must be a positive integer"),
        ({"num_experts_per_tok": 129}, "129 experts a token cannot be chosen of 128"),
        ({"mlp_only_layers": [True]}, "it must be a list of layers' numbers"),
        ({"shared_expert_intermediate_size": 64}, "does not understand: shared_expert_intermediate_size=64"),
    ):
        with pytest.raises(ModelError, match=shown):
            read(QWEN3_MOE, **changes)
