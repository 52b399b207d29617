"""Configurations as they were published: each is understood, and means what its authors meant."""

import json
from pathlib import Path

import pytest
import torch

from quire.models import read_config

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

PUBLISHED = {
    "SmolLM": (SMOLLM, (3, 64, 10_000.0, 2048, None)),
    "SmolLM2": (SMOLLM2, (3, 64, 100_000, 8192, None)),
    "Llama 3.2": (LLAMA_3_2, (8, 64, 500_000.0, 131_072, None)),
    "Mistral": (MISTRAL, (8, 128, 10_000.0, 32_768, 4096)),
}


@pytest.mark.parametrize(("text", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_published(tmp_path: Path, text: str, expected: tuple[object, ...]) -> None:
    (tmp_path / "config.json").write_text(text)
    decoder, dtype = read_config(tmp_path)
    rope = decoder.rope["rope_theta"]
    found = (decoder.num_kv_heads, decoder.head_dim, rope, decoder.max_position_embeddings, decoder.windows[0])
    assert found == expected
    assert dtype is torch.bfloat16
    assert len(decoder.windows) == decoder.num_layers


def test_what_a_missing_key_means_depends_on_the_architecture(tmp_path: Path) -> None:
    raw = json.loads(MISTRAL)
    del raw["sliding_window"], raw["num_key_value_heads"]
    for architecture, window, num_kv_heads in (("MistralForCausalLM", 4096, 8), ("LlamaForCausalLM", None, 32)):
        (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
        decoder, _ = read_config(tmp_path)
        assert (decoder.windows[0], decoder.num_kv_heads) == (window, num_kv_heads)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"sliding_window": None}))
    assert read_config(tmp_path)[0].windows[0] is None
