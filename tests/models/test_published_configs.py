"""Configurations as they were published: each is understood, and means what its authors meant."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.errors import ModelError
from quire.models import read_config
from quire.models.decoder_config import DecoderConfig, ExpertsConfig, MlpConfig
from tests.models.published import (
    BLOOM,
    DISTILGPT2,
    GEMMA2,
    GEMMA2_9B,
    GEMMA3_1B,
    GPT2,
    GRANITE_3,
    LLAMA_3_2,
    MISTRAL,
    MIXTRAL,
    NEOX_20B,
    OLMO2_1B,
    PHI3_MINI,
    PHI4_MINI,
    PYTHIA,
    QWEN2_5,
    QWEN3,
    QWEN3_MOE,
    SMOLLM,
    SMOLLM2,
    SMOLLM3,
    STARCODER2,
)

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
